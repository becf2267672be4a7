//! Process metrics, under the names of Prometheus' own client libraries. Values that the platform does not
//! provide are absent, never 0.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Gauge, Opts};

/// Start time, resident memory and open files, read at collection.
pub(crate) struct ProcessMetrics {
    start: Gauge,
    resident: Gauge,
    files: Gauge,
}

impl ProcessMetrics {
    /// Takes now as the start time: a process registers its metrics within its first moments.
    pub(crate) fn new() -> Self {
        let gauge = |name: &str, help: &str| {
            Gauge::with_opts(Opts::new(name, help)).expect("the names below are valid metric names")
        };
        let start = gauge("process_start_time_seconds", "When the process started, in seconds since 1970.");
        start.set(
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64().floor()),
        );
        Self {
            start,
            resident: gauge("process_resident_memory_bytes", "Memory held by the process, in bytes."),
            files: gauge("process_open_fds", "Files and sockets the process has open."),
        }
    }
}

impl Collector for ProcessMetrics {
    fn desc(&self) -> Vec<&Desc> {
        [&self.start, &self.resident, &self.files].into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut families = self.start.collect();
        if let Some(bytes) = resident_bytes() {
            self.resident.set(bytes);
            families.extend(self.resident.collect());
        }
        if let Some(count) = open_files() {
            self.files.set(count);
            families.extend(self.files.collect());
        }
        families
    }
}

fn resident_bytes() -> Option<f64> {
    parse_resident(&std::fs::read_to_string("/proc/self/status").ok()?)
}

fn parse_resident(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024.0)
}

fn open_files() -> Option<f64> {
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_parsed_from_proc_status() {
        assert_eq!(parse_resident("Name:\tx\nVmRSS:\t   12 kB\nThreads:\t1\n"), Some(12288.0));
        assert_eq!(parse_resident("Name:\tx\n"), None);
        assert_eq!(parse_resident("VmRSS:\tmuch\n"), None);
    }
}
