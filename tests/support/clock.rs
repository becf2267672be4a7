//! A machine whose clock can be set: libfaketime in its processes reads from a file how far it is off.
//! Only the wall clock moves, as when a person or a time server sets it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tokio::process::Command;

/// Set when the machines of a cluster are to have clocks of their own.
pub const CLOCKS_VARIABLE: &str = "RUSSET_CLOCKS";
/// The variable that names the library.
const LIBRARY: &str = "RUSSET_LIBFAKETIME";

/// The clock of one machine.
pub struct Clock {
    file: PathBuf,
}

impl Clock {
    /// The clock of the machine `name`, kept in `folder`; `None` where machines share the real one.
    pub fn chosen(folder: &Path, name: &str) -> Option<Self> {
        std::env::var_os(CLOCKS_VARIABLE)?;
        Some(Self { file: folder.join(format!("clock-{name}")) })
    }

    /// Lets a process of the machine, and what it starts, see this clock.
    pub fn apply_to(&self, command: &mut Command) -> Result<()> {
        let library = std::env::var_os(LIBRARY).with_context(|| format!("{LIBRARY} names no library"))?;
        if !self.file.exists() {
            self.set(0)?;
        }
        command
            .env("LD_PRELOAD", library)
            .env("FAKETIME_TIMESTAMP_FILE", &self.file)
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("NO_FAKE_STAT", "1");
        Ok(())
    }

    /// From now on the clock is that many seconds ahead of the truth, or behind it.
    pub fn set(&self, seconds: i64) -> Result<()> {
        // Renamed into place: it is read at any moment.
        let new = self.file.with_extension("new");
        std::fs::write(&new, format!("{seconds:+}\n"))?;
        Ok(std::fs::rename(new, &self.file)?)
    }
}
