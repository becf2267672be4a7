//! Which program holds a TCP port that Russet needs: from `/proc` on Linux, from `lsof` on macOS. Not here:
//! what to do about it.

use std::net::SocketAddr;

/// State of a listening socket in `/proc/net/tcp`.
#[cfg(any(target_os = "linux", test))]
const LISTEN: &str = "0A";

/// What uses the port of `address` on this machine, in words; `None` if nothing is seen.
pub fn describe(address: SocketAddr) -> Option<String> {
    describe_port(address.port())
}

/// The error of a taken port, with what [`describe`] saw.
pub fn with_holder(error: anyhow::Error, holder: Option<String>) -> anyhow::Error {
    match holder {
        Some(holder) => anyhow::anyhow!("{error:#}; {holder}"),
        None => error,
    }
}

#[cfg(target_os = "linux")]
fn describe_port(port: u16) -> Option<String> {
    let tables: String = ["/proc/net/tcp", "/proc/net/tcp6"]
        .into_iter()
        .filter_map(|table| std::fs::read_to_string(table).ok())
        .collect();
    let sockets = sockets_at(&tables, port);
    let listening: Vec<u64> =
        sockets.iter().filter(|socket| socket.listens).map(|socket| socket.inode).collect();
    if listening.is_empty() {
        return sockets.first().map(|_| connection(port));
    }
    Some(process_with(&listening).map_or_else(|| other_user(port), |process| process.words()))
}

#[cfg(target_os = "macos")]
fn describe_port(port: u16) -> Option<String> {
    let mut command = std::process::Command::new("/usr/sbin/lsof");
    command.args(["-nP", &format!("-iTCP:{port}"), "-sTCP:LISTEN", "-Fpc"]);
    let printed = command.stdin(std::process::Stdio::null()).output().ok()?;
    lsof_process(&String::from_utf8_lossy(&printed.stdout)).map(|process| process.words())
}

/// A process by id and name.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Process {
    id: u32,
    name: String,
}

impl Process {
    fn words(&self) -> String {
        let name: String =
            self.name.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect();
        format!("process {} ({name}) listens there", self.id)
    }
}

#[cfg(target_os = "linux")]
fn other_user(port: u16) -> String {
    format!("a process of another user listens there; `sudo ss -ltnp sport = :{port}` names it")
}

/// Ports of outgoing connections are chosen from a range that may contain ours.
#[cfg(any(target_os = "linux", test))]
fn connection(port: u16) -> String {
    format!(
        "a connection of another program uses it for the moment; \
         `sudo sysctl -w net.ipv4.ip_local_reserved_ports={port}` keeps it free"
    )
}

/// A socket at a local port.
#[cfg(any(target_os = "linux", test))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Socket {
    inode: u64,
    listens: bool,
}

/// The sockets of `/proc/net/tcp` at a local port.
#[cfg(any(target_os = "linux", test))]
fn sockets_at(tables: &str, port: u16) -> Vec<Socket> {
    let line = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (_, local) = columns.get(1)?.rsplit_once(':')?;
        let here = u16::from_str_radix(local, 16).ok()? == port;
        let inode = columns.get(9)?.parse().ok()?;
        here.then_some(Socket { inode, listens: *columns.get(3)? == LISTEN })
    };
    tables.lines().filter_map(line).collect()
}

/// The process that has one of these sockets open, if this user may see it.
#[cfg(target_os = "linux")]
fn process_with(inodes: &[u64]) -> Option<Process> {
    let wanted: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    std::fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let id = entry.file_name().to_str()?.parse().ok()?;
        let mut files = std::fs::read_dir(entry.path().join("fd")).ok()?.flatten();
        files.find(|file| {
            std::fs::read_link(file.path())
                .is_ok_and(|target| wanted.iter().any(|want| target.as_os_str() == want.as_str()))
        })?;
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        Some(Process { id, name: name.trim().to_owned() })
    })
}

/// The first process of `lsof -Fpc`.
#[cfg(any(target_os = "macos", test))]
fn lsof_process(printed: &str) -> Option<Process> {
    let field = |letter: char| printed.lines().find_map(|line| line.strip_prefix(letter));
    Some(Process { id: field('p')?.parse().ok()?, name: field('c').unwrap_or("unknown").to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_a_port_are_read_from_the_kernel_s_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: 0100007F:CCBF 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0\n\
             1: 0100007F:CCBF 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 4712 1 0\n\
             2: 0100007F:1F90 0100007F:CCBF 01 00000000:00000000 00:00000000 00000000  1000        0 4713 1 0\n\
             damaged line\n";
        let expected = [Socket { inode: 4711, listens: true }, Socket { inode: 4712, listens: false }];
        assert_eq!(sockets_at(table, 52415), expected);
        assert_eq!(sockets_at(table, 80), []);
        assert!(connection(52415).contains("ip_local_reserved_ports=52415"));
    }

    #[test]
    fn a_process_is_read_from_lsof() {
        let process = lsof_process("p321\ncnode\nf21\np99\ncother\n").unwrap();
        assert_eq!(process.words(), "process 321 (node) listens there");
        assert_eq!(lsof_process(""), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn own_listener_is_named_with_its_process() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let words = describe(listener.local_addr().unwrap()).unwrap();
        assert!(words.starts_with(&format!("process {} (", std::process::id())), "{words}");
    }
}
