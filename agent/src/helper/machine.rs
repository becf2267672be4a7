//! The machine itself: reads its state from tools and has them apply changes. The only place where the helper
//! runs programs: fixed names in fixed directories, without a shell and without an environment.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use thiserror::Error;
use tokio::process::Command;

use super::change::{self, MachineChange, System};
use super::current_state::{self, CurrentState};
use crate::linux;
use crate::macos::{ParseError, network, ports, services, system};

/// Directories of the tools.
const TOOL_DIRS: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
/// Timeout: tools hang at times.
const TOOL_TIMEOUT: Duration = Duration::from_secs(20);

/// Why the machine could not be read or changed.
#[derive(Debug, Error)]
pub enum ToolError {
    /// A tool is missing.
    #[error("{0} could not be run: {1}")]
    NotRun(&'static str, #[source] io::Error),
    /// A tool hangs.
    #[error("{tool} did not end within {} s and was killed", TOOL_TIMEOUT.as_secs(), tool = .0)]
    Timeout(&'static str),
    /// A tool reports failure.
    #[error("`{command}` failed: {said}")]
    Failed {
        /// The whole command.
        command: String,
        /// Its output.
        said: String,
    },
    /// A tool's output cannot be parsed.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// Output of Linux's tool is not the expected JSON.
    #[error("ip -json address printed unexpected output: {0}")]
    Json(#[from] serde_json::Error),
}

/// This machine, or a simulated one.
#[derive(Clone, Debug)]
pub struct HostController {
    system: System,
    tools: Option<PathBuf>,
    sys: PathBuf,
    /// Interfaces with this name prefix count as Thunderbolt too.
    prefix: Option<String>,
}

impl HostController {
    /// This machine. With `tools`, a Mac that the programs in that directory simulate; with `prefix`, a
    /// machine some of whose interfaces simulate Thunderbolt.
    pub fn new(tools: Option<PathBuf>, prefix: Option<String>) -> Self {
        let is_mac = tools.is_some() || cfg!(target_os = "macos");
        let system = if is_mac { System::MacOs } else { System::Linux };
        Self { system, tools, sys: "/sys".into(), prefix: prefix.filter(|prefix| !prefix.is_empty()) }
    }

    /// Its current state.
    pub(super) async fn current_state(&self) -> Result<CurrentState, ToolError> {
        let mut present = match self.system {
            System::MacOs => self.current_mac_state().await?,
            System::Linux => {
                let hosts = linux::thunderbolt::hosts(&self.sys);
                let is_cable = |name: &str| hosts.iter().any(|host| host.interface.as_deref() == Some(name));
                let printed = self.run_tool("ip", &["-json", "-details", "address", "show"]).await?;
                let interfaces = current_state::linux_interfaces(&printed, is_cable)?;
                CurrentState { interfaces, services: Vec::new(), wired: None }
            }
        };
        if let Some(prefix) = &self.prefix {
            let played = present.interfaces.iter_mut().filter(|one| one.name.starts_with(prefix));
            played.for_each(|one| one.is_cable = true);
        }
        Ok(present)
    }

    async fn current_mac_state(&self) -> Result<CurrentState, ToolError> {
        let listed = self.run_tool("networksetup", &["-listallhardwareports"]).await?;
        let interfaces = network::interfaces(&self.run_tool("ifconfig", &[]).await?)?;
        let order = self.run_tool("networksetup", &["-listnetworkserviceorder"]).await?;
        let wired = match self.run_tool("sysctl", &["iogpu.wired_limit_mb"]).await {
            Ok(printed) => system::Sysctls::read(&printed).ok(),
            // Macs with Intel processors have no such sysctl.
            Err(ToolError::Failed { said, .. }) if said.contains("unknown oid") => None,
            // An error must not look like "no limit" while a limit is being undone.
            Err(trouble) => return Err(trouble),
        };
        Ok(CurrentState {
            interfaces: current_state::mac_interfaces(&ports::hardware_ports(&listed)?, interfaces),
            services: services::service_order(&order)?,
            wired: wired.and_then(|read| read.number("iogpu.wired_limit_mb")),
        })
    }

    /// Applies a change.
    pub(super) async fn apply(&self, change: &MachineChange) -> Result<(), ToolError> {
        self.execute(change.apply_command(self.system)).await
    }

    /// Undoes a change.
    pub(super) async fn undo(&self, change: &MachineChange) -> Result<(), ToolError> {
        self.execute(change.undo_command(self.system)).await
    }

    async fn execute(&self, (program, words): change::ToolCommand) -> Result<(), ToolError> {
        tracing::info!(program, words = words.join(" "), "the machine is changed");
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.run_tool(program, &words).await.map(drop)
    }

    /// Output of a tool that succeeds.
    async fn run_tool(&self, tool: &'static str, arguments: &[&str]) -> Result<Vec<u8>, ToolError> {
        let not_there = || ToolError::NotRun(tool, io::ErrorKind::NotFound.into());
        let program = match &self.tools {
            Some(folder) => folder.join(tool),
            None => {
                let mut all = TOOL_DIRS.iter().map(|folder| Path::new(folder).join(tool));
                all.find(|path| path.exists()).ok_or_else(not_there)?
            }
        };
        let mut command = Command::new(program);
        command.args(arguments).env_clear().stdin(Stdio::null()).kill_on_drop(true);
        let output = match tokio::time::timeout(TOOL_TIMEOUT, command.output()).await {
            Ok(output) => output.map_err(|source| ToolError::NotRun(tool, source))?,
            Err(_) => return Err(ToolError::Timeout(tool)),
        };
        if output.status.success() {
            return Ok(output.stdout);
        }
        let said = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
        let said = String::from_utf8_lossy(said).trim().chars().take(300).collect();
        Err(ToolError::Failed { command: format!("{tool} {}", arguments.join(" ")), said })
    }
}
