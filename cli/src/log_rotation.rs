//! A service's own log where nobody else keeps it short: launchd opens a file for the process's words and leaves it to
//! grow. Not the logs of children and engines, which their parents keep short.

use std::path::PathBuf;
use std::time::Duration;

use russet_telemetry::logfile;

/// The variable that names the file this process's words go to.
pub const LOG_FILE_VARIABLE: &str = "RUSSET_LOG_FILE";

/// Between two looks; at full speed a process writes some megabytes in it.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Keeps the file short for as long as the process runs, if one is named.
pub fn start() {
    let Some(path) = std::env::var_os(LOG_FILE_VARIABLE).map(PathBuf::from) else { return };
    logfile::rotate(&path, logfile::MAX_LOG_BYTES);
    // A thread of its own: it sleeps and writes files, and ends with the process.
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(CHECK_INTERVAL);
            logfile::rotate(&path, logfile::MAX_LOG_BYTES);
        }
    });
}
