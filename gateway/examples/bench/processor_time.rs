//! What a request costs each process in time of the processor: unlike rates and latencies it hardly depends on what else
//! shares the machine's cores.

use std::time::Duration;

/// What this process has had of the processor, in user and kernel mode.
pub fn of(process: u32) -> Duration {
    sum(|number, _| number == process)
}

/// What all processes of a process group have had.
pub fn of_group(leader: u32) -> Duration {
    sum(|_, group| group == leader)
}

/// The sum over processes, by their numbers and their groups'. Linux counts in hundredths of a second.
fn sum(is_counted: impl Fn(u32, u32) -> bool) -> Duration {
    let mut ticks = 0;
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(process) = entry.file_name().to_string_lossy().parse() else { continue };
        // It may have ended meanwhile.
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // The name, in brackets, may have spaces in it.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        if is_counted(process, fields[2].parse().unwrap()) {
            ticks += fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        }
    }
    Duration::from_millis(ticks * 10)
}
