//! Linux, from `/proc` and `/etc/os-release`, within the limits of this process's cgroups. The parsers are pure; only the functions at the top
//! read files.

use std::io;
#[cfg(target_os = "linux")]
use std::path::Path;

#[cfg(target_os = "linux")]
use super::Hardware;
#[cfg(target_os = "linux")]
use crate::linux::cgroup::{self, CgroupMemory};

/// Reads the machine's own files.
#[cfg(target_os = "linux")]
pub fn measure() -> io::Result<Hardware> {
    let read = std::fs::read_to_string;
    let release = read("/etc/os-release").unwrap_or_default();
    let kernel = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    Ok(Hardware {
        chip: chip(&read("/proc/cpuinfo")?),
        cores: 0,
        memory: within_cgroup(field(&read("/proc/meminfo")?, "MemTotal")?, |cgroup| cgroup.limit),
        os: os(&release, &kernel),
        boot_id: read("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
    })
}

/// Bytes that the kernel could allocate for this process without swapping.
#[cfg(target_os = "linux")]
pub fn available_memory() -> io::Result<u64> {
    let machine = field(&std::fs::read_to_string("/proc/meminfo")?, "MemAvailable")?;
    Ok(within_cgroup(machine, |cgroup| cgroup.available))
}

/// Bytes of the machine, or fewer if a cgroup allows no more: engines are in the agent's.
#[cfg(target_os = "linux")]
fn within_cgroup(machine: u64, bound: fn(CgroupMemory) -> u64) -> u64 {
    cgroup::memory(Path::new("/")).map_or(machine, |cgroup| bound(cgroup).min(machine))
}

/// Start time of a process in clock ticks since boot.
#[cfg(target_os = "linux")]
pub fn process_start(pid: u32) -> Option<String> {
    start_ticks(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Whether a process is stopped by a signal.
#[cfg(target_os = "linux")]
pub fn process_stopped(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| state(&stat) == Some("T"))
}

/// Private memory of a process in bytes: anonymous memory, resident or swapped out. Mapped files do not
/// count.
#[cfg(target_os = "linux")]
pub fn process_memory(pid: u32) -> Option<u64> {
    private_memory(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// Whether all work stalled on memory during a good part of the last ten seconds.
#[cfg(target_os = "linux")]
pub fn memory_is_critical() -> bool {
    let text = std::fs::read_to_string("/proc/pressure/memory").unwrap_or_default();
    let found = [crate::linux::pressure::memory(&text), cgroup::pressure(Path::new("/"))];
    found.into_iter().flatten().any(|pressure| pressure.full >= CRITICAL_PRESSURE_PERCENT)
}

/// Memory pressure (`full`, in percent) beyond which a machine only swaps.
#[cfg(target_os = "linux")]
const CRITICAL_PRESSURE_PERCENT: f64 = 40.0;

/// Private memory of a process, from `/proc/PID/status`.
pub fn private_memory(status: &str) -> Option<u64> {
    let bytes = |name| field(status, name).ok();
    let own = bytes("RssAnon")?;
    Some(["RssShmem", "VmSwap"].into_iter().filter_map(bytes).fold(own, u64::saturating_add))
}

/// Name of the processor; ARM kernels report none.
pub fn chip(cpuinfo: &str) -> Option<String> {
    let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    lines
        .find(|(key, _)| matches!(key.trim(), "model name" | "Model"))
        .map(|(_, name)| name.trim().to_owned())
}

/// Bytes of a field of `/proc/meminfo`, which counts in kibibytes.
pub fn field(meminfo: &str, name: &str) -> io::Result<u64> {
    let mut lines = meminfo.lines().filter_map(|line| line.split_once(':'));
    let value = lines.find(|(key, _)| *key == name).and_then(|(_, rest)| {
        rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    value.ok_or_else(|| io::Error::other(format!("/proc/meminfo has no {name}")))
}

/// Name of the distribution and the kernel.
pub fn os(release: &str, kernel: &str) -> String {
    let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let name = name.map_or("Linux", |name| name.trim_matches('"'));
    format!("{name}, Linux {}", kernel.trim())
}

/// The fields of `/proc/PID/stat` from the third on. The second is the program's name and may contain any
/// character, so counting begins after its last bracket.
fn fields(stat: &str) -> Option<std::str::SplitAsciiWhitespace<'_>> {
    Some(stat.rsplit_once(") ")?.1.split_ascii_whitespace())
}

/// The state in `/proc/PID/stat`, field 3: `T` is stopped by a signal, `t` by a debugger.
pub fn state(stat: &str) -> Option<&str> {
    fields(stat)?.next()
}

/// Start time in `/proc/PID/stat`, field 22; `None` for a zombie.
pub fn start_ticks(stat: &str) -> Option<String> {
    let start = fields(stat)?.nth(19)?;
    (!matches!(state(stat)?, "Z" | "X")).then(|| start.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_start_time_is_parsed_despite_odd_names() {
        let rest = "1 7 7 0 -1 4194304 100 0 0 0 1 2 0 0 20 0 1 0 987654 1000 200";
        assert_eq!(start_ticks(&format!("42 (a) Z (b)) S {rest}")).as_deref(), Some("987654"));
        assert_eq!(start_ticks(&format!("42 (gone) Z {rest}")), None);
        assert_eq!(start_ticks("nonsense"), None);
        for (line, found) in
            [("42 (a) T (b)) S 1 7", Some("S")), ("42 (a) T 1 7", Some("T")), ("nonsense", None)]
        {
            assert_eq!(state(line), found, "{line}");
        }
    }

    #[test]
    fn memory_and_names_are_read() {
        let meminfo = "MemTotal:       24576 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(field(meminfo, "MemAvailable").unwrap(), 1 << 20);
        assert!(field(meminfo, "Mem").is_err());
        let status = "Name:\tengine\nVmRSS:\t 900 kB\nRssAnon:\t 512 kB\nRssFile:\t 300 kB\nRssShmem:\t 8 kB\nVmSwap:\t 4 kB\n";
        assert_eq!(private_memory(status), Some(524 << 10), "files that it maps are not its own");
        assert_eq!(private_memory("Name:\tgone\n"), None);
        assert_eq!(chip("processor: 0\nmodel name\t: Quick 9000\n").as_deref(), Some("Quick 9000"));
        assert_eq!(os("NAME=x\nPRETTY_NAME=\"Debian 12\"\n", "6.1\n"), "Debian 12, Linux 6.1");
    }
}
