//! Scans this machine's ports: runs the tools of macOS and parses their output, or reads Linux's `/sys`.
//! Every half minute, and sooner when a network interface appeared, vanished or changed its address, as with
//! a cable.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use russet_crds::{FabricPort, InferenceNodeStatus};
use thiserror::Error;
use tokio::process::Command;
use tokio::sync::watch;

use super::{PortFacts, connections, ports};
use crate::linux;
use crate::macos::network::{self, Address};
use crate::macos::{ParseError, overview, ports as hardware, rdma, thunderbolt};

/// Scan interval while nothing seems to change. `system_profiler` takes a second or more of one core.
const SCAN_INTERVAL: Duration = Duration::from_secs(30);
/// Poll interval for the interface list; its cost is not measurable.
const INTERFACE_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Minimum time between two scans: VPNs and radios come and go, and engines need their cores.
const MIN_SCAN_INTERVAL: Duration = Duration::from_secs(5);
/// Timeout of a tool: some hang at times, as `system_profiler` does after sleep.
const TOOL_TIMEOUT: Duration = Duration::from_secs(30);
/// Directories of macOS's tools; a daemon has no useful `PATH`.
const TOOL_DIRS: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Why the ports are not known.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// The tool is missing or must not be executed.
    #[error("{tool} could not be run: {source}")]
    NotRun {
        /// The tool.
        tool: &'static str,
        /// System error.
        source: io::Error,
    },
    /// The tool hangs.
    #[error("{tool} did not end within {} s and was killed", TOOL_TIMEOUT.as_secs(), tool = .0)]
    Timeout(&'static str),
    /// The output cannot be parsed.
    #[error(transparent)]
    Parse(#[from] ParseError),
}

/// Result of a scan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PortScan {
    /// The ports, from the last successful scan.
    pub ports: Vec<FabricPort>,
    /// Whether RDMA is enabled.
    pub rdma: bool,
    /// Error of the last scan.
    pub error: Option<String>,
    /// Whether a scan has completed since the agent started; before that, the ports are those last reported.
    pub scanned: bool,
}

impl PortScan {
    /// The node's status from before the restart, so that a restarted agent removes no link.
    pub(crate) fn from_status(status: &InferenceNodeStatus) -> Self {
        let rdma = status.backends.iter().any(|backend| backend == "jaccl");
        Self { ports: status.ports.clone(), rdma, ..Self::default() }
    }
}

/// Scans ports.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Directory of stub programs that replace the system's tools, to simulate a Mac.
    tools: Option<PathBuf>,
}

impl Probe {
    /// A probe of this machine, or of the Mac that the programs in `tools` simulate.
    pub fn new(tools: Option<PathBuf>) -> Self {
        Self { tools }
    }

    /// The ports, and whether RDMA is enabled.
    pub async fn scan(&self) -> Result<(Vec<FabricPort>, bool), ProbeError> {
        if self.tools.is_none() && !cfg!(target_os = "macos") {
            let hosts = linux::thunderbolt::hosts(Path::new("/sys"));
            return Ok((connections(&hosts, &addresses()), false));
        }
        let facts = self.scan_mac().await?;
        Ok((ports(&facts), facts.rdma_enabled == Some(true)))
    }

    async fn scan_mac(&self) -> Result<PortFacts, ProbeError> {
        let profile = ["SPHardwareDataType", "SPThunderboltDataType", "-json"];
        let profile = self.run_tool("system_profiler", &profile).await?;
        let machine = overview::overview(&profile)?.name.unwrap_or_default();
        let buses = thunderbolt::buses(&profile)?;
        let listed = self.run_tool("networksetup", &["-listallhardwareports"]).await?;
        let interfaces = self.run_tool("ifconfig", &[]).await?;
        let rdma_enabled = match self.run_tool("rdma_ctl", &["status"]).await {
            Ok(output) => Some(rdma::is_enabled(&output)?),
            // `rdma_ctl` came with macOS 26.2.
            Err(ProbeError::NotRun { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok(PortFacts {
            machine,
            buses,
            hardware_ports: hardware::hardware_ports(&listed)?,
            interfaces: network::interfaces(&interfaces)?,
            // Without any default route, none goes over a cable.
            default_routes: network::default_routes(
                &self.run_tool("netstat", &["-rn", "-f", "inet"]).await?,
            )?,
            devices: if rdma_enabled == Some(true) { self.devices().await? } else { Vec::new() },
            rdma_enabled,
        })
    }

    /// The RDMA devices. `ibv_devinfo` fails where there are none, so `ibv_devices` runs first.
    async fn devices(&self) -> Result<Vec<rdma::RdmaDevice>, ProbeError> {
        if rdma::devices(&self.run_tool("ibv_devices", &[]).await?)?.is_empty() {
            return Ok(Vec::new());
        }
        Ok(rdma::device_infos(&self.run_tool("ibv_devinfo", &["-v"]).await?)?)
    }

    /// Output of a tool. Its exit status is ignored: some tools fail when there is nothing to list.
    async fn run_tool(&self, tool: &'static str, arguments: &[&str]) -> Result<Vec<u8>, ProbeError> {
        let program = match &self.tools {
            Some(folder) => folder.join(tool),
            None => TOOL_DIRS
                .iter()
                .map(|folder| Path::new(folder).join(tool))
                .find(|path| path.exists())
                .ok_or_else(|| ProbeError::NotRun { tool, source: io::ErrorKind::NotFound.into() })?,
        };
        let mut command = Command::new(program);
        command.args(arguments).stdin(std::process::Stdio::null()).kill_on_drop(true);
        match tokio::time::timeout(TOOL_TIMEOUT, command.output()).await {
            Ok(Ok(output)) => Ok(output.stdout),
            Ok(Err(source)) => Err(ProbeError::NotRun { tool, source }),
            Err(_) => Err(ProbeError::Timeout(tool)),
        }
    }
}

/// Scans until the agent exits, and publishes the results.
pub(crate) async fn run(probe: Probe, scans: watch::Sender<PortScan>) {
    loop {
        let before = interface_snapshot();
        match probe.scan().await {
            Ok((ports, rdma)) => publish(&scans, PortScan { ports, rdma, error: None, scanned: true }),
            Err(error) => {
                // Keep the last result: one failure of a tool says nothing about the cables.
                let now =
                    PortScan { error: Some(error.to_string()), scanned: true, ..scans.borrow().clone() };
                if *scans.borrow() != now {
                    tracing::warn!(%error, "this machine's ports could not be read; the last known ones are kept");
                }
                publish(&scans, now);
            }
        }
        // A simulated machine changes its tools' output, but no interface.
        let period = if probe.tools.is_some() { INTERFACE_POLL_INTERVAL } else { SCAN_INTERVAL };
        let changed = async {
            tokio::time::sleep(MIN_SCAN_INTERVAL.min(period)).await;
            while interface_snapshot() == before {
                tokio::time::sleep(INTERFACE_POLL_INTERVAL).await;
            }
        };
        tokio::time::timeout(period, changed).await.ok();
    }
}

fn publish(seen: &watch::Sender<PortScan>, now: PortScan) {
    seen.send_if_modified(|seen| {
        let differs = *seen != now;
        *seen = now;
        differs
    });
}

/// The interfaces that are up, and their addresses.
fn interface_snapshot() -> Vec<(String, IpAddr)> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let up = interfaces.iter().filter(|interface| interface.is_oper_up());
    let mut seen: Vec<_> = up.map(|interface| (interface.name.clone(), interface.ip())).collect();
    seen.sort();
    seen
}

/// IPv4 addresses of the interfaces that are up.
fn addresses() -> Vec<(String, Address)> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let of = |interface: if_addrs::Interface| match &interface.addr {
        if_addrs::IfAddr::V4(own) if interface.is_oper_up() => {
            Some((interface.name.clone(), Address { ip: own.ip, prefix: Some(u32::from(own.prefixlen)) }))
        }
        _ => None,
    };
    interfaces.into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets the output of a stub tool.
    fn tool(folder: &Path, name: &str, printed: &str) {
        let (path, next) = (folder.join(format!("{name}.out")), folder.join(format!("{name}.next")));
        std::fs::write(&next, printed).unwrap();
        std::fs::rename(next, path).unwrap();
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/mac_stub/tool");
        std::os::unix::fs::symlink(program, folder.join(name)).ok();
    }

    /// A Mac before 26.2, with one idle port.
    fn mac(folder: &Path) {
        tool(
            folder,
            "system_profiler",
            r#"{"SPHardwareDataType":[{"machine_name":"Mac mini"}],"SPThunderboltDataType":[{"_name":"b","receptacle_1_tag":{"receptacle_id_key":"1","receptacle_status_key":"receptacle_no_devices_connected"}}]}"#,
        );
        tool(folder, "networksetup", "Hardware Port: Thunderbolt 1\nDevice: en2\n");
        tool(folder, "netstat", "Destination Gateway Flags Netif Expire\ndefault 192.0.2.1 UGScg en0\n");
        tool(folder, "ifconfig", "en2: flags=8863<UP> mtu 1500\n\tstatus: inactive\n");
    }

    #[tokio::test]
    async fn mac_ports_come_from_tool_output() {
        let folder = tempfile::tempdir().unwrap();
        mac(folder.path());
        let probe = Probe::new(Some(folder.path().to_owned()));
        let (ports, rdma) = probe.scan().await.unwrap();
        assert_eq!((ports.len(), ports[0].interface.as_str(), rdma), (1, "en2", false));
        assert_eq!(ports[0].reason.as_deref(), Some("NothingPlugged"));

        tool(folder.path(), "rdma_ctl", "enabled\n");
        tool(folder.path(), "ibv_devices", "device node GUID\n------ ----\n");
        assert!(probe.scan().await.unwrap().1, "RDMA is enabled, and there is no device");
    }

    #[tokio::test]
    async fn failed_tools_are_reported_and_the_last_scan_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        mac(folder.path());
        let (sender, mut seen) = watch::channel(PortScan::default());
        let probe = Probe::new(Some(folder.path().to_owned()));
        let looking = tokio::spawn(run(probe, sender));
        let until = async |seen: &mut watch::Receiver<PortScan>, words: Option<&str>| {
            let facts = |seen: &PortScan| match (&seen.error, words) {
                (Some(error), Some(words)) => error.contains(words),
                (None, None) => !seen.ports.is_empty(),
                _ => false,
            };
            let found = tokio::time::timeout(TOOL_TIMEOUT, seen.wait_for(facts)).await;
            assert_eq!(found.map(|seen| seen.unwrap().ports.len()), Ok(1), "{words:?}");
        };
        until(&mut seen, None).await;
        tool(folder.path(), "ifconfig", "damaged\n");
        until(&mut seen, Some("ifconfig printed no interface")).await;
        std::fs::remove_file(folder.path().join("networksetup")).unwrap();
        until(&mut seen, Some("networksetup could not be run: No such file")).await;
        mac(folder.path());
        until(&mut seen, None).await;
        looking.abort();
    }
}
