//! The machine itself: asks its tools how it is, and has them carry out deeds. The one place where the helper runs
//! programs: of fixed names in fixed folders, without a shell and without an environment.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use thiserror::Error;
use tokio::process::Command;

use super::deed::{self, Deed, System};
use super::present::{self, Present};
use crate::linux;
use crate::macos::{Unreadable, network, ports, services, system};

/// Where the tools are.
const FOLDERS: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
/// Tools hang at times.
const LONGEST: Duration = Duration::from_secs(20);

/// Why the machine could not be asked or changed.
#[derive(Debug, Error)]
pub enum Trouble {
    /// A tool is not there.
    #[error("{0} could not be run: {1}")]
    NotRun(&'static str, #[source] io::Error),
    /// It hangs.
    #[error("{tool} did not end within {} s and was killed", LONGEST.as_secs(), tool = .0)]
    TooLong(&'static str),
    /// It says that it did not do it.
    #[error("`{command}` failed: {said}")]
    Failed {
        /// The whole command.
        command: String,
        /// What it said.
        said: String,
    },
    /// Nobody understands it.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    /// The same, of Linux's.
    #[error("ip -json address printed what nobody understands: {0}")]
    NoJson(#[from] serde_json::Error),
}

/// This machine, or one that is played.
#[derive(Clone, Debug)]
pub struct Machine {
    system: System,
    tools: Option<PathBuf>,
    sys: PathBuf,
    /// Interfaces whose names begin so count as Thunderbolt too.
    prefix: Option<String>,
}

impl Machine {
    /// This machine; with `tools`, a Mac that the programs of that folder play; with `prefix`, one some of whose
    /// interfaces play Thunderbolt.
    pub fn new(tools: Option<PathBuf>, prefix: Option<String>) -> Self {
        let is_mac = tools.is_some() || cfg!(target_os = "macos");
        let system = if is_mac { System::MacOs } else { System::Linux };
        Self { system, tools, sys: "/sys".into(), prefix: prefix.filter(|prefix| !prefix.is_empty()) }
    }

    /// How it is now.
    pub(super) async fn present(&self) -> Result<Present, Trouble> {
        let mut present = match self.system {
            System::MacOs => self.mac().await?,
            System::Linux => {
                let hosts = linux::thunderbolt::hosts(&self.sys);
                let is_cable = |name: &str| hosts.iter().any(|host| host.interface.as_deref() == Some(name));
                let printed = self.run("ip", &["-json", "-details", "address", "show"]).await?;
                let interfaces = present::of_linux(&printed, is_cable)?;
                Present { interfaces, services: Vec::new(), wired: None }
            }
        };
        if let Some(prefix) = &self.prefix {
            let played = present.interfaces.iter_mut().filter(|one| one.name.starts_with(prefix));
            played.for_each(|one| one.is_cable = true);
        }
        Ok(present)
    }

    async fn mac(&self) -> Result<Present, Trouble> {
        let listed = self.run("networksetup", &["-listallhardwareports"]).await?;
        let interfaces = network::interfaces(&self.run("ifconfig", &[]).await?)?;
        let order = self.run("networksetup", &["-listnetworkserviceorder"]).await?;
        let wired = match self.run("sysctl", &["iogpu.wired_limit_mb"]).await {
            Ok(printed) => system::Sysctls::read(&printed).ok(),
            // Macs with Intel's processors have no such name.
            Err(Trouble::Failed { said, .. }) if said.contains("unknown oid") => None,
            // Whoever takes a limit back must not hear that there is none.
            Err(trouble) => return Err(trouble),
        };
        Ok(Present {
            interfaces: present::of_mac(&ports::hardware_ports(&listed)?, interfaces),
            services: services::service_order(&order)?,
            wired: wired.and_then(|read| read.number("iogpu.wired_limit_mb")),
        })
    }

    /// Makes a deed.
    pub(super) async fn make(&self, deed: &Deed) -> Result<(), Trouble> {
        self.carry_out(deed.make(self.system)).await
    }

    /// Takes a deed back.
    pub(super) async fn undo(&self, deed: &Deed) -> Result<(), Trouble> {
        self.carry_out(deed.undo(self.system)).await
    }

    async fn carry_out(&self, (program, words): deed::Command) -> Result<(), Trouble> {
        tracing::info!(program, words = words.join(" "), "the machine is changed");
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.run(program, &words).await.map(drop)
    }

    /// What a tool prints when it succeeds.
    async fn run(&self, tool: &'static str, arguments: &[&str]) -> Result<Vec<u8>, Trouble> {
        let not_there = || Trouble::NotRun(tool, io::ErrorKind::NotFound.into());
        let program = match &self.tools {
            Some(folder) => folder.join(tool),
            None => {
                let mut all = FOLDERS.iter().map(|folder| Path::new(folder).join(tool));
                all.find(|path| path.exists()).ok_or_else(not_there)?
            }
        };
        let mut command = Command::new(program);
        command.args(arguments).env_clear().stdin(Stdio::null()).kill_on_drop(true);
        let output = match tokio::time::timeout(LONGEST, command.output()).await {
            Ok(output) => output.map_err(|source| Trouble::NotRun(tool, source))?,
            Err(_) => return Err(Trouble::TooLong(tool)),
        };
        if output.status.success() {
            return Ok(output.stdout);
        }
        let said = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
        let said = String::from_utf8_lossy(said).trim().chars().take(300).collect();
        Err(Trouble::Failed { command: format!("{tool} {}", arguments.join(" ")), said })
    }
}
