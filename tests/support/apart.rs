//! A network of its own for a test program: loopback and nothing else, so that its ports are free and nothing reaches the
//! internet.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context, Result};

/// Keeps connections that programs open off the port that Russet has by default, 52415, and those beside it: one that is over
/// keeps its port for a minute. For the shell of a network of its own.
const PORTS_BELOW_OURS: &str = "echo 32768 49151 > /proc/sys/net/ipv4/ip_local_port_range";

/// Set where this program runs in a network of its own.
const APART: &str = "RUSSET_APART";

/// Whether this program runs in a network of its own.
pub fn is_apart() -> bool {
    std::env::var_os(APART).is_some()
}

/// Continues as this program in a network namespace whose loopback is up; returns where it is in one already, or where
/// namespaces are not allowed.
pub fn move_apart() -> Result<()> {
    if is_apart() {
        return Ok(());
    }
    let mut unshare = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        unshare.arg("--map-root-user");
    }
    // Where its settings cannot be written, a connection may take such a port.
    let script = format!("ip link set lo up && {{ {PORTS_BELOW_OURS} || true; }} 2>/dev/null && exec \"$@\"");
    unshare.args(["--net", "sh", "-c", &script, "sh"]);
    let probe = Command::new(unshare.get_program()).args(unshare.get_args()).arg("true").output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        return Ok(());
    }
    let program = std::env::current_exe()?;
    let error = unshare.arg(program).args(std::env::args_os().skip(1)).env(APART, "1").exec();
    Err(error).context("cannot run unshare")
}
