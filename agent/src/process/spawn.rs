//! Starts an engine: addresses, process, log; its configuration is in [`super::launch`]. The engine leads its
//! own process group and is not killed with the agent, so that it outlives it.

use std::fs::{File, Permissions};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use russet_crds::Rendezvous;
use russet_rpc::ports;
use tokio::net::TcpSocket;
use tokio::process::{Child, Command};

use super::launch::Launch;

/// Directory, beside those of the engines, in which MLX on a CPU caches its compiled kernels. By default MLX
/// uses the system's temporary directory, and would run what another user has put there under the right name.
const KERNEL_CACHE_DIR: &str = ".kernels";

/// How much earlier than others the kernel ends an engine when memory runs out, of at most 1000. An engine holds most of
/// a machine's memory and is disposable; the agent, and a control plane beside it, are not. Below 1000, so that what its
/// owner marked as first goes first.
#[cfg(target_os = "linux")]
const OOM_SCORE_ADJ: i32 = 900;
/// The highest one. In a pod without guaranteed memory the agent itself may have it.
#[cfg(target_os = "linux")]
const MAX_OOM_SCORE_ADJ: i32 = 1000;

/// The score of an engine whose agent has `own`: never below the agent's, and above it where that is possible.
#[cfg(target_os = "linux")]
fn engine_oom_score(own: i32) -> i32 {
    OOM_SCORE_ADJ.max(own + 1).min(MAX_OOM_SCORE_ADJ)
}

/// `oom_score_adj` of a process.
#[cfg(target_os = "linux")]
fn oom_score(process: &str) -> Option<i32> {
    std::fs::read_to_string(format!("/proc/{process}/oom_score_adj")).ok()?.trim().parse().ok()
}

/// Reserved addresses: bound, but not listened on, until the engine binds them.
#[derive(Debug)]
pub struct ReservedAddresses {
    rendezvous: Rendezvous,
    sockets: [TcpSocket; 3],
}

impl ReservedAddresses {
    /// Reserves three free ports of `address`.
    pub fn allocate(address: IpAddr) -> io::Result<Self> {
        Self::from_sockets([
            ports::bind_free(address)?,
            ports::bind_free(address)?,
            ports::bind_free(address)?,
        ])
    }

    /// Reserves the ports that an earlier run of the agent published, if they are still free.
    pub fn rebind(rendezvous: &Rendezvous) -> io::Result<Self> {
        let parse = |text: &str| text.parse::<SocketAddr>().map_err(io::Error::other);
        let bind = |address: SocketAddr| {
            let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            socket.bind(address).map_err(|error| {
                io::Error::new(error.kind(), format!("{address} cannot be taken: {error}"))
            })?;
            Ok::<_, io::Error>(socket)
        };
        let [rpc, ring, tensor] =
            [parse(&rendezvous.rpc)?, parse(&rendezvous.ring)?, parse(&rendezvous.tensor)?];
        Self::from_sockets([bind(rpc)?, bind(ring)?, bind(tensor)?])
    }

    fn from_sockets(sockets: [TcpSocket; 3]) -> io::Result<Self> {
        let rendezvous = Rendezvous {
            rpc: sockets[0].local_addr()?.to_string(),
            ring: sockets[1].local_addr()?.to_string(),
            tensor: sockets[2].local_addr()?.to_string(),
        };
        Ok(Self { rendezvous, sockets })
    }

    /// Addresses at which other ranks reach this one.
    pub fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    /// Frees the ports; the engine binds them immediately afterwards.
    pub fn release(self) {
        drop(self.sockets);
    }
}

/// Starts the engine on a written configuration, with its output appended to `<folder>/engine.log`.
pub fn start(launch: &Launch<'_>, config: &Path, folder: &Path) -> io::Result<Child> {
    // A stale socket of an earlier engine would make the new bind fail.
    std::fs::remove_file(launch.socket).ok();
    let output = russet_telemetry::logfile::open(&log_path(folder))?;
    let kernels = folder.with_file_name(KERNEL_CACHE_DIR);
    std::fs::create_dir_all(&kernels)?;
    std::fs::set_permissions(&kernels, Permissions::from_mode(0o700))?;
    let child = Command::new(launch.binary)
        .arg("--config")
        .arg(config)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .current_dir(folder)
        .env("TMPDIR", kernels)
        // Signals for the agent's terminal must not reach the engine.
        .process_group(0)
        .kill_on_drop(false)
        .spawn()?;
    // No limit of the process besides: MLX does not check for failed allocations, and maps more than it uses.
    #[cfg(target_os = "linux")]
    if let Some(pid) = child.id()
        && let score = engine_oom_score(oom_score("self").unwrap_or_default()).to_string()
        && let Err(error) = std::fs::write(format!("/proc/{pid}/oom_score_adj"), score)
    {
        tracing::warn!(pid, "cannot have the kernel end this engine first when memory runs out: {error}");
    }
    Ok(child)
}

/// The engine's log file.
pub fn log_path(folder: &Path) -> PathBuf {
    folder.join("engine.log")
}

/// The last line that an engine logged, for the message about its exit.
pub fn last_log_line(folder: &Path) -> String {
    use std::io::{Read as _, Seek as _, SeekFrom};
    let Ok(mut file) = File::open(log_path(folder)) else { return String::new() };
    let length = file.metadata().map_or(0, |metadata| metadata.len());
    file.seek(SeekFrom::Start(length.saturating_sub(2048))).ok();
    let mut bytes = Vec::new();
    file.take(2048).read_to_end(&mut bytes).ok();
    let text = String::from_utf8_lossy(&bytes);
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    last.chars().take(400).collect()
}

/// The engine's program: as configured, by `RUSSET_ENGINE`, or beside the running program.
pub fn binary(configured: Option<&Path>) -> PathBuf {
    if let Some(path) = configured {
        return path.to_owned();
    }
    if let Some(path) = std::env::var_os("RUSSET_ENGINE") {
        return path.into();
    }
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join("russet-engine")));
    beside.unwrap_or_else(|| "russet-engine".into())
}

#[cfg(test)]
mod tests {
    use super::super::launch::tests::launched;
    use super::*;

    #[tokio::test]
    async fn kernel_cache_is_private_to_the_user() {
        let engines = tempfile::tempdir().unwrap();
        let program = engines.path().join("engine");
        std::fs::write(&program, "#!/bin/sh\nstat -c '%a %n' \"$TMPDIR\"; echo \"$@\"\n").unwrap();
        std::fs::set_permissions(&program, Permissions::from_mode(0o700)).unwrap();
        let folder = engines.path().join("u");
        std::fs::create_dir(&folder).unwrap();
        let config = folder.join("engine.json");
        let mut child = launched(&program, |launch| start(launch, &config, &folder)).unwrap();
        assert!(child.wait().await.unwrap().success());
        let said = std::fs::read_to_string(log_path(&folder)).unwrap();
        let kernels = engines.path().join(".kernels");
        assert_eq!(said, format!("700 {}\n--config {}\n", kernels.display(), config.display()));
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn engines_are_the_first_that_the_kernel_ends() {
        let engines = tempfile::tempdir().unwrap();
        let program = engines.path().join("engine");
        std::fs::write(&program, "#!/bin/sh\nexec sleep 600\n").unwrap();
        std::fs::set_permissions(&program, Permissions::from_mode(0o700)).unwrap();
        let folder = engines.path().join("u");
        std::fs::create_dir(&folder).unwrap();
        let config = folder.join("engine.json");
        let mut child = launched(&program, |launch| start(launch, &config, &folder)).unwrap();
        let score = oom_score(&child.id().unwrap().to_string());
        child.kill().await.unwrap();
        assert_eq!(score, Some(engine_oom_score(oom_score("self").unwrap())));
        for (own, engine) in [(-999, 900), (0, 900), (899, 900), (900, 901), (999, 1000), (1000, 1000)] {
            assert_eq!(engine_oom_score(own), engine, "of an agent with {own}");
        }
    }

    #[tokio::test]
    async fn reserved_addresses_hold_until_release_and_rebind() {
        let addresses = ReservedAddresses::allocate([127, 0, 0, 1].into()).unwrap();
        let rendezvous = addresses.rendezvous().clone();
        assert_ne!(rendezvous.rpc, rendezvous.ring);
        let error = ReservedAddresses::rebind(&rendezvous).unwrap_err();
        assert!(error.to_string().contains(&rendezvous.rpc), "{error}");
        addresses.release();
        assert_eq!(ReservedAddresses::rebind(&rendezvous).unwrap().rendezvous(), &rendezvous);
    }
}
