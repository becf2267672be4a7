//! Rotation of a service's own log where the service manager does not do it: launchd opens a file for the
//! output and lets it grow. Not here: logs of children and engines, which their parents rotate.

use std::path::PathBuf;
use std::time::Duration;

use russet_telemetry::logfile;

/// Environment variable that names this process's log file.
pub const LOG_FILE_VARIABLE: &str = "RUSSET_LOG_FILE";

/// Interval between two checks; at full speed a process writes some megabytes in it.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Rotates the log for as long as the process runs, if the variable is set.
pub fn start() {
    let Some(path) = std::env::var_os(LOG_FILE_VARIABLE).map(PathBuf::from) else { return };
    logfile::rotate(&path, logfile::MAX_LOG_BYTES);
    // A separate thread: it sleeps and writes files, and ends with the process.
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(CHECK_INTERVAL);
            logfile::rotate(&path, logfile::MAX_LOG_BYTES);
        }
    });
}
