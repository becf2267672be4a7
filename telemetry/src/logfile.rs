//! Size-limited log files: the current file and one older one. Not here: what processes write to them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// A log file longer than this, in bytes, is rotated.
pub const MAX_LOG_BYTES: u64 = 10 << 20;

/// Opens the log at `path` for appending, readable by its owner only, after limiting its size.
pub fn open(path: &Path) -> io::Result<File> {
    rotate(path, MAX_LOG_BYTES);
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// The path of the older log: `engine.log.1` for `engine.log`.
pub fn rotated_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// Rotates a log longer than `longest` bytes: copies it over the older one and truncates it. Processes may
/// write to it meanwhile: they all append, so the next line comes first. A line written between copy and
/// truncation may be lost, and so is the older log when the disk is full; neither is worth an error.
pub fn rotate(path: &Path, max_bytes: u64) {
    if !std::fs::metadata(path).is_ok_and(|metadata| metadata.len() > max_bytes) {
        return;
    }
    if let Err(error) = std::fs::copy(path, rotated_path(path)) {
        tracing::warn!(path = %path.display(), %error, "the log could not be copied before it is truncated");
    }
    if let Err(error) = OpenOptions::new().write(true).open(path).and_then(|file| file.set_len(0)) {
        tracing::warn!(path = %path.display(), %error, "the log file could not be truncated and keeps growing");
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn log_is_rotated_while_written_keeping_one_old_file() {
        let folder = std::env::temp_dir().join(format!("russet-logfile-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("engine.log");
        let mut writer = open(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for (line, current, old) in [
            ("first line\n", "first line\n", None),
            ("second\n", "", Some("first line\nsecond\n")),
            ("third\n", "third\n", Some("first line\nsecond\n")),
            ("and a fourth\n", "", Some("third\nand a fourth\n")),
        ] {
            writer.write_all(line.as_bytes()).unwrap();
            rotate(&path, 15);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), current, "after {line:?}");
            assert_eq!(std::fs::read_to_string(rotated_path(&path)).ok().as_deref(), old, "after {line:?}");
        }
        assert_eq!(rotated_path(&path), folder.join("engine.log.1"));
        rotate(&folder.join("absent.log"), 0);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
