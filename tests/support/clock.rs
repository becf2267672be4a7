//! A machine with an adjustable clock: libfaketime in its processes reads the offset from a file. Only the
//! wall clock moves, as when a person or a time server sets it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tokio::process::Command;

/// Set if the machines of a cluster have clocks of their own.
pub const CLOCKS_VARIABLE: &str = "RUSSET_CLOCKS";
/// The variable that names the library.
const LIBRARY: &str = "RUSSET_LIBFAKETIME";

/// The clock of one machine.
pub struct Clock {
    file: PathBuf,
}

impl Clock {
    /// The clock of the machine `name`, stored in `folder`; `None` if machines share the real one.
    pub fn chosen(folder: &Path, name: &str) -> Option<Self> {
        std::env::var_os(CLOCKS_VARIABLE)?;
        Some(Self { file: folder.join(format!("clock-{name}")) })
    }

    /// Gives a process of the machine, and its children, this clock.
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

    /// Sets the offset in seconds to the real clock.
    pub fn set(&self, seconds: i64) -> Result<()> {
        // Renamed into place: it may be read at any moment.
        let new = self.file.with_extension("new");
        std::fs::write(&new, format!("{seconds:+}\n"))?;
        Ok(std::fs::rename(new, &self.file)?)
    }
}
