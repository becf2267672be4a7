//! macOS, from `sysctl`, `sw_vers`, `vm_stat` and `ps`, none of which was ever run here. [`crate::macos`]
//! parses their output.

#[cfg(target_os = "macos")]
use std::io;

use super::Hardware;
use crate::macos::{ParseError, system};

/// `sysctl` names, read in one call. An unknown one only costs a line on standard error.
#[cfg(target_os = "macos")]
const NAMES: &[&str] =
    &["hw.memsize", "hw.logicalcpu", "machdep.cpu.brand_string", "hw.model", "kern.bootsessionuuid"];

#[cfg(target_os = "macos")]
fn run(program: &str, arguments: &[&str]) -> io::Result<Vec<u8>> {
    Ok(std::process::Command::new(program).args(arguments).output()?.stdout)
}

/// Runs the machine's own commands.
#[cfg(target_os = "macos")]
pub fn measure() -> io::Result<Hardware> {
    machine(&run("/usr/sbin/sysctl", NAMES)?, &run("/usr/bin/sw_vers", &[])?).map_err(io::Error::other)
}

/// Bytes that are free or can be freed without swapping.
#[cfg(target_os = "macos")]
pub fn available_memory() -> io::Result<u64> {
    crate::macos::memory::available(&run("/usr/bin/vm_stat", &[])?).map_err(io::Error::other)
}

/// Start time of a process as `ps` prints it.
#[cfg(target_os = "macos")]
pub fn process_start(pid: u32) -> Option<String> {
    let printed = run("/bin/ps", &["-o", "stat=,lstart=", "-p", &pid.to_string()]).ok()?;
    start(&String::from_utf8_lossy(&printed))
}

/// Whether a process is stopped by a signal.
#[cfg(target_os = "macos")]
pub fn process_stopped(pid: u32) -> bool {
    let printed = run("/bin/ps", &["-o", "stat=", "-p", &pid.to_string()]);
    printed.is_ok_and(|printed| stopped(&String::from_utf8_lossy(&printed)))
}

/// Always `None`: `ps` counts mapped files and leaves out compressed memory. MLX's own count is used instead.
#[cfg(target_os = "macos")]
pub fn process_memory(_: u32) -> Option<u64> {
    None
}

/// Whether the system reports critical memory pressure: level 4, after 1 and 2.
#[cfg(target_os = "macos")]
pub fn memory_is_critical() -> bool {
    let printed = run("/usr/sbin/sysctl", &["kern.memorystatus_vm_pressure_level"]).unwrap_or_default();
    critical(&printed)
}

/// Whether the level in the output of `sysctl` is the highest.
pub fn critical(sysctl: &[u8]) -> bool {
    let read = system::Sysctls::read(sysctl).ok();
    read.and_then(|read| read.number("kern.memorystatus_vm_pressure_level")) == Some(4)
}

/// A machine from the outputs of `sysctl` and `sw_vers`.
pub fn machine(sysctls: &[u8], sw_vers: &[u8]) -> Result<Hardware, ParseError> {
    let sysctls = system::Sysctls::read(sysctls)?;
    let chip = sysctls.get("machdep.cpu.brand_string").or_else(|| sysctls.get("hw.model"));
    let memory = sysctls.number("hw.memsize");
    let cores = sysctls.number("hw.logicalcpu").and_then(|cores| u32::try_from(cores).ok());
    Ok(Hardware {
        chip: chip.map(str::to_owned),
        cores: cores.unwrap_or(0),
        memory: memory.ok_or(ParseError { tool: "sysctl", what: "no hw.memsize".to_owned() })?,
        os: os(sw_vers),
        boot_id: sysctls.get("kern.bootsessionuuid").unwrap_or("unknown-boot").to_owned(),
    })
}

/// `macOS 26.5 (25F71)`.
pub fn os(sw_vers: &[u8]) -> String {
    system::version(sw_vers)
        .map_or_else(|_| "macOS".to_owned(), |system| format!("macOS {} ({})", system.version, system.build))
}

/// The start time in `stat lstart`; `None` for a zombie or no process.
pub fn start(ps: &str) -> Option<String> {
    let (state, start) = ps.trim().split_once(char::is_whitespace)?;
    (!state.starts_with('Z')).then(|| start.trim().to_owned())
}

/// Whether `stat` is that of a stopped process. `ps` prints `T` for one under a debugger too, followed by
/// `X`.
pub fn stopped(ps: &str) -> bool {
    let state = ps.trim();
    state.starts_with('T') && !state.contains('X')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_hardware_comes_from_tool_output() {
        let sysctls = b"hw.memsize: 68719476736\nhw.logicalcpu: 12\nmachdep.cpu.brand_string: Apple M2 Max\n";
        let versions = b"ProductName:\t\tmacOS\nProductVersion:\t\t26.5\nBuildVersion:\t\t25F71\n";
        let found = machine(sysctls, versions).unwrap();
        assert_eq!((found.chip.as_deref(), found.cores, found.memory), (Some("Apple M2 Max"), 12, 64 << 30));
        assert_eq!((found.os.as_str(), found.boot_id.as_str()), ("macOS 26.5 (25F71)", "unknown-boot"));
        let bare = machine(b"hw.model: Mac17,9\nhw.memsize: 51539607552\n", b"").unwrap();
        assert_eq!((bare.chip.as_deref(), bare.cores, bare.os.as_str()), (Some("Mac17,9"), 0, "macOS"));
        let error = machine(b"hw.ncpu: 8\n", b"").unwrap_err();
        assert_eq!(error.to_string(), "sysctl printed no hw.memsize");
    }

    #[test]
    fn memory_is_critical_only_at_the_highest_level() {
        for (level, is) in [("4", true), ("2", false), ("1", false), ("", false)] {
            let printed = format!("kern.memorystatus_vm_pressure_level: {level}\n");
            assert_eq!(critical(printed.as_bytes()), is, "{level}");
        }
        assert!(!critical(b""));
    }

    #[test]
    fn zombie_process_counts_as_ended() {
        assert_eq!(start("S+   Sat Nov 21 08:00:00 2026\n").as_deref(), Some("Sat Nov 21 08:00:00 2026"));
        assert_eq!(start("Z    Sat Nov 21 08:00:00 2026\n"), None);
        assert_eq!(start(""), None);
        for (state, is) in
            [("T\n", true), ("T+", true), ("TX", false), ("Ss", false), ("U", false), ("", false)]
        {
            assert_eq!(stopped(state), is, "{state:?}");
        }
    }
}
