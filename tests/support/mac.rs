//! A machine that simulates a Mac with one Thunderbolt port, by programs that replace macOS's tools.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cluster::repository;

/// The tools of one machine.
#[derive(Clone, Debug)]
pub struct FakeMac {
    folder: PathBuf,
    domain: String,
    address: IpAddr,
}

impl FakeMac {
    /// The tools of a machine with nothing plugged in; its port has this address.
    pub fn new(root: &Path, machine: &str, address: IpAddr) -> Result<Self> {
        let mac = Self { folder: folder(root, machine), domain: format!("DOMAIN-{machine}"), address };
        mac.write_tools(&[])?;
        Ok(mac)
    }

    /// Plugs in a cable to the other Mac.
    pub fn plug(&self, other: &FakeMac) -> Result<()> {
        self.write_tools(&[&other.domain])
    }

    /// Unplugs the cable.
    pub fn unplug(&self) -> Result<()> {
        self.write_tools(&[])
    }

    fn write_tools(&self, peer: &[&str]) -> Result<()> {
        let mut mac = Command::new(repository().join("tests/mac_stub/mac"));
        let played = mac.arg(&self.folder).args([&self.domain, &self.address.to_string()]).args(peer);
        ensure!(
            played.status().context("tests/mac_stub/mac does not run")?.success(),
            "tests/mac_stub/mac failed"
        );
        Ok(())
    }
}

/// Folder of a machine's tools, if it simulates a Mac.
pub fn folder(root: &Path, machine: &str) -> PathBuf {
    root.join(format!("mac-{machine}"))
}
