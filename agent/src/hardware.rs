//! Hardware of this machine: chip, cores, memory, disk, system, addresses. Measured here, evaluated
//! elsewhere. One file per operating system; both parse text with pure functions that are tested on every
//! platform.

pub mod linux;
pub mod macos;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;

#[cfg(target_os = "linux")]
use linux as system;
#[cfg(target_os = "macos")]
use macos as system;

/// Hardware as measured once at start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hardware {
    /// Name of the processor.
    pub chip: Option<String>,
    /// Logical cores.
    pub cores: u32,
    /// Installed bytes of memory, or those that a container or unit may use.
    pub memory: u64,
    /// Operating system and build.
    pub os: String,
    /// Boot id; changes with every restart of the machine.
    pub boot_id: String,
}

impl Hardware {
    /// Measures this machine.
    pub fn measure() -> io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        Ok(Self { cores, ..system::measure()? })
    }
}

/// Private memory of a process in bytes, if the system reports it.
pub fn process_memory(pid: u32) -> Option<u64> {
    system::process_memory(pid)
}

/// Whether the system reports critical memory pressure.
pub fn memory_is_critical() -> bool {
    system::memory_is_critical()
}

/// Bytes of memory that new work could use now.
pub fn available_memory() -> io::Result<u64> {
    system::available_memory()
}

/// Start time of process `pid` in the system's own format; `None` when it has exited or is a zombie. A pid
/// alone may have been reused; a pid with its start time has not.
pub fn process_start(pid: u32) -> Option<String> {
    system::process_start(pid)
}

/// Whether process `pid` is stopped by a signal (SIGSTOP, Ctrl-Z). A process stopped by a debugger does not
/// count: it is being inspected.
pub fn process_stopped(pid: u32) -> bool {
    system::process_stopped(pid)
}

/// Total and free bytes of the file system that holds `path`.
pub fn disk(path: &Path) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::statvfs(path)?;
    Ok((stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize))
}

/// The address at which other machines reach this one: the local end of the route to the API server, or,
/// when that is this machine, the first global IPv4 address of an interface that is up.
pub fn source_address(server: Option<SocketAddr>) -> IpAddr {
    // Connecting a UDP socket sends nothing; it only queries the routing table.
    let routed = server.and_then(|server| {
        let any: SocketAddr =
            if server.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0_u16; 8], 0).into() };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(server).ok()?;
        socket.local_addr().ok().map(|local| local.ip())
    });
    match routed {
        Some(address) if !address.is_loopback() && !address.is_unspecified() => address,
        _ => interface_addresses().first().copied().unwrap_or(Ipv4Addr::LOCALHOST.into()),
    }
}

/// Global IPv4 addresses of interfaces that are up, in the system's order.
pub fn interface_addresses() -> Vec<IpAddr> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let addresses =
        interfaces.iter().filter(|interface| interface.is_oper_up()).filter_map(|interface| match interface
            .ip()
        {
            IpAddr::V4(address) if !address.is_loopback() && !address.is_link_local() => {
                Some(IpAddr::V4(address))
            }
            _ => None,
        });
    addresses.collect()
}

/// The interface of this machine that has an address.
pub fn interface_of(address: IpAddr) -> Option<String> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    interfaces.into_iter().find(|interface| interface.ip() == address).map(|interface| interface.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_of_this_machine_is_readable() {
        let machine = Hardware::measure().unwrap();
        assert!(machine.memory > 1 << 20 && machine.cores > 0, "{machine:?}");
        assert!(!machine.boot_id.is_empty() && !machine.os.is_empty(), "{machine:?}");
        assert!(available_memory().unwrap() <= machine.memory);
        let (total, free) = disk(Path::new("/")).unwrap();
        assert!(total >= free && total > 0);
        let own = std::process::id();
        assert!(process_start(own).is_some() && process_start(own) == process_start(own));
        assert_eq!(process_start(u32::MAX - 1), None);
        assert!(!process_stopped(own) && !process_stopped(u32::MAX - 1));
    }

    #[test]
    fn loopback_server_still_yields_a_routable_address() {
        let address = source_address(Some(([127, 0, 0, 1], 6443).into()));
        assert!(!address.is_unspecified());
        assert!(!address.is_loopback() || interface_addresses().is_empty());
    }
}
