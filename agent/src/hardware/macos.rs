//! macOS, from `sysctl`, `sw_vers`, `vm_stat` and `ps`. The parsers are pure and tested on outputs
//! people posted; the commands themselves were never run here.

use std::io;

use super::Machine;

/// Names asked of `sysctl` in one call. An unknown one costs a line on standard error, no more.
#[cfg(target_os = "macos")]
const NAMES: &[&str] =
    &["hw.memsize", "hw.logicalcpu", "machdep.cpu.brand_string", "hw.model", "kern.bootsessionuuid"];

#[cfg(target_os = "macos")]
fn run(program: &str, arguments: &[&str]) -> io::Result<String> {
    let output = std::process::Command::new(program).args(arguments).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Asks the machine's own commands.
#[cfg(target_os = "macos")]
pub fn measure() -> io::Result<Machine> {
    machine(&run("/usr/sbin/sysctl", NAMES)?, &run("/usr/bin/sw_vers", &[])?)
}

/// Bytes that are free or can be freed without swapping.
#[cfg(target_os = "macos")]
pub fn available_memory() -> io::Result<u64> {
    available(&run("/usr/bin/vm_stat", &[])?)
        .ok_or_else(|| io::Error::other("vm_stat printed no page counts"))
}

/// Start time of a process as `ps` prints it.
#[cfg(target_os = "macos")]
pub fn process_start(pid: u32) -> Option<String> {
    start(&run("/bin/ps", &["-o", "stat=,lstart=", "-p", &pid.to_string()]).ok()?)
}

/// The value of a sysctl name in `name: value` lines.
pub fn sysctl<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = text.lines().filter_map(|line| line.trim().split_once(": "));
    lines.find(|(key, _)| *key == name).map(|(_, value)| value.trim())
}

/// A machine from the outputs of `sysctl` and `sw_vers`.
pub fn machine(sysctls: &str, sw_vers: &str) -> io::Result<Machine> {
    let memory = sysctl(sysctls, "hw.memsize").and_then(|bytes| bytes.parse().ok());
    let chip = sysctl(sysctls, "machdep.cpu.brand_string").or_else(|| sysctl(sysctls, "hw.model"));
    Ok(Machine {
        chip: chip.map(str::to_owned),
        cores: sysctl(sysctls, "hw.logicalcpu").and_then(|cores| cores.parse().ok()).unwrap_or(0),
        memory: memory.ok_or_else(|| io::Error::other("sysctl printed no hw.memsize"))?,
        os: os(sw_vers),
        boot_id: sysctl(sysctls, "kern.bootsessionuuid").unwrap_or("unknown-boot").to_owned(),
    })
}

/// `macOS 26.5 (25F71)`.
pub fn os(sw_vers: &str) -> String {
    let value = |name: &str| {
        let mut lines = sw_vers.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.trim() == name).map_or("?", |(_, value)| value.trim())
    };
    format!("{} {} ({})", value("ProductName"), value("ProductVersion"), value("BuildVersion"))
}

/// Bytes free, inactive, speculative or purgeable in the output of `vm_stat`.
pub fn available(vm_stat: &str) -> Option<u64> {
    let (_, size) = vm_stat.split_once("page size of ")?;
    let size: u64 = size.split_ascii_whitespace().next()?.parse().ok()?;
    let pages = |name: &str| {
        let mut lines = vm_stat.lines().filter_map(|line| line.split_once(':'));
        let (_, count) = lines.find(|(key, _)| *key == name)?;
        count.trim().trim_end_matches('.').parse::<u64>().ok()
    };
    let free = pages("Pages free")?;
    let rest = ["Pages inactive", "Pages speculative", "Pages purgeable"];
    Some((free + rest.iter().filter_map(|name| pages(name)).sum::<u64>()) * size)
}

/// The start time in `stat lstart`; `None` for a zombie or no process.
pub fn start(ps: &str) -> Option<String> {
    let (state, start) = ps.trim().split_once(char::is_whitespace)?;
    (!state.starts_with('Z')).then(|| start.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Outputs of real Macs; CI has them, a plain checkout may not.
    fn recorded(name: &str) -> Option<String> {
        let Ok(folder) = std::env::var("RUSSET_MACOS_DATA") else {
            assert!(std::env::var("CI").is_err(), "CI must set RUSSET_MACOS_DATA");
            eprintln!("RUSSET_MACOS_DATA is not set: the parser was not shown {name}");
            return None;
        };
        Some(std::fs::read_to_string(std::path::Path::new(&folder).join(name)).unwrap())
    }

    #[test]
    fn machines_are_read_from_posted_sysctls() {
        for (file, chip, cores, gib) in [
            ("sysctl-m2-max-macos-26.6.2.txt", "Apple M2 Max", 12, 64),
            ("sysctl-m5-macbook.txt", "Apple M5", 10, 16),
            ("sysctl-m2-pro-with-swap-and-unknown-oid.txt", "Apple M2 Pro", 12, 16),
            ("sysctl-m5-pro-mac17-9.txt", "Mac17,9", 0, 48),
        ] {
            let Some(text) = recorded(file) else { return };
            let machine = machine(&text, "").unwrap();
            assert_eq!(
                (machine.chip.as_deref(), machine.cores, machine.memory),
                (Some(chip), cores, gib << 30),
                "{file}"
            );
        }
    }

    #[test]
    fn systems_are_read_from_posted_versions() {
        for (file, os_name) in [
            ("sw_vers-macos-14.2.1.txt", "macOS 14.2.1 (23C71)"),
            ("sw_vers-macos-26.5.txt", "macOS 26.5 (25F71)"),
        ] {
            let Some(text) = recorded(file) else { return };
            assert_eq!(os(&text), os_name, "{file}");
        }
    }

    #[test]
    fn available_memory_is_read_from_posted_page_counts() {
        for (file, pages) in [
            ("vm_stat-mini-32gb.txt", 100_509 + 840_387 + 25_780 + 26_929),
            ("vm_stat-m3-ultra-512gb-excerpt.txt", 9_563_156_u64 + 11_287_075 + 133_882 + 89_568),
        ] {
            let Some(text) = recorded(file) else { return };
            assert_eq!(available(&text), Some(pages * 16384), "{file}");
        }
    }

    #[test]
    fn outputs_that_lack_something_are_no_machine() {
        assert!(machine("hw.ncpu: 8\n", "").is_err());
        assert_eq!(available("Pages free: 7."), None);
        assert_eq!(start("S+   Sat Nov 21 08:00:00 2026\n").as_deref(), Some("Sat Nov 21 08:00:00 2026"));
        assert_eq!(start("Z    Sat Nov 21 08:00:00 2026\n"), None);
        assert_eq!(start(""), None);
    }
}
