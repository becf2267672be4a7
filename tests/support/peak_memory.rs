//! Peak memory of a piece of work, measured in a process of its own: other tests run beside this one, and a peak never
//! falls.

use std::process::Command;

/// Set in the process that does the work.
const CHILD: &str = "RUSSET_PEAK_MEMORY";

/// By how many bytes the peak of memory grows with the work of `test`, the path of the calling test, its code aside: pages
/// of a program are read when they first run. Only Linux shows it; elsewhere the work is done and 0 returned.
pub fn growth(test: &str, work: impl FnOnce()) -> u64 {
    if cfg!(not(target_os = "linux")) {
        work();
        return 0;
    }
    if std::env::var_os(CHILD).is_some() {
        let (before, files_before) = (memory("VmHWM:"), memory("RssFile:"));
        work();
        let code = memory("RssFile:").saturating_sub(files_before);
        let grown = (memory("VmHWM:") - before).saturating_sub(code);
        println!("\n{CHILD} {grown}");
        return grown;
    }
    let program = std::env::current_exe().expect("this program has a path");
    let output = Command::new(program)
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("this program runs");
    let (shown, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{shown}\n{errors}");
    let grown = shown.lines().find_map(|line| line.strip_prefix(CHILD)?.trim().parse().ok());
    let grown = grown.unwrap_or_else(|| panic!("the test {test} measured nothing:\n{shown}"));
    println!("{grown} bytes more");
    grown
}

/// Bytes of a line of this process' status.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux says it");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a line of the field");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number of kB") << 10
}
