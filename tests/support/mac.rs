//! A machine that plays a Mac with one Thunderbolt port, by programs that are asked in place of macOS's.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cluster::repository;

/// The tools of one machine.
#[derive(Clone, Debug)]
pub struct Mac {
    folder: PathBuf,
    domain: String,
    address: IpAddr,
}

impl Mac {
    /// Of a machine that has nothing plugged in; its port has this address.
    pub fn new(root: &Path, machine: &str, address: IpAddr) -> Result<Self> {
        let mac = Self { folder: folder(root, machine), domain: format!("DOMAIN-{machine}"), address };
        mac.play(&[])?;
        Ok(mac)
    }

    /// Plugs in a cable whose other end is in that one.
    pub fn plug(&self, other: &Mac) -> Result<()> {
        self.play(&[&other.domain])
    }

    /// Takes the cable out.
    pub fn unplug(&self) -> Result<()> {
        self.play(&[])
    }

    fn play(&self, peer: &[&str]) -> Result<()> {
        let mut mac = Command::new(repository().join("tests/played/mac"));
        let played = mac.arg(&self.folder).args([&self.domain, &self.address.to_string()]).args(peer);
        ensure!(
            played.status().context("tests/played/mac does not run")?.success(),
            "tests/played/mac failed"
        );
        Ok(())
    }
}

/// Where the tools of a machine are, if it plays a Mac.
pub fn folder(root: &Path, machine: &str) -> PathBuf {
    root.join(format!("mac-{machine}"))
}
