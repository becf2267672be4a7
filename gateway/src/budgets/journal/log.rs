//! Logs of the journal: files with a line of JSON for each write. The first line is the name of the gateway, so that the logs of
//! another one, whose tables are gone, count for nothing. Each line is written at a place of its own, so that nobody waits for
//! the write of another: a place that was not written to its end has zeros behind what it has, or is the last. Nobody was told
//! that such a line is written, and it counts for nothing.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::JournalEntry;

/// A log that is written.
#[derive(Debug)]
pub(super) struct LogFile {
    file: Arc<File>,
    /// Those with higher numbers come later.
    pub(super) number: u64,
    /// Its length, with all places that lines have.
    pub(super) bytes: u64,
}

/// Where a line goes. As long as it is there, the line may still be written.
pub(super) struct LinePlace {
    file: Arc<File>,
    offset: u64,
}

impl LogFile {
    /// Creates the log of that number beside the tables at `path`.
    pub(super) fn create(path: &Path, number: u64, gateway: &str) -> io::Result<Self> {
        let mut log = Self::of(File::create(log_path(path, number))?, number, 0);
        let name = line(gateway)?;
        log.place(&name).write(&name)?;
        Ok(log)
    }

    /// The log of that number in a file, of which so many bytes have places.
    pub(super) fn of(file: File, number: u64, bytes: u64) -> Self {
        Self { file: Arc::new(file), number, bytes }
    }

    /// Whether every line that has a place is written, or could not be.
    pub(super) fn is_written(&mut self) -> bool {
        Arc::get_mut(&mut self.file).is_some()
    }

    /// The place of a line, which no other line gets.
    pub(super) fn place(&mut self, line: &[u8]) -> LinePlace {
        let offset = self.bytes;
        self.bytes += line.len() as u64;
        LinePlace { file: self.file.clone(), offset }
    }
}

impl LinePlace {
    /// Writes the line that it is the place of.
    pub(super) fn write(&self, line: &[u8]) -> io::Result<()> {
        self.file.write_all_at(line, self.offset)
    }
}

/// A value as a line of a log.
pub(super) fn line<T: serde::Serialize + ?Sized>(value: &T) -> io::Result<Vec<u8>> {
    let mut line = Vec::with_capacity(512);
    serde_json::to_writer(&mut line, value)?;
    line.push(b'\n');
    Ok(line)
}

fn log_path(path: &Path, number: u64) -> PathBuf {
    path.with_extension(format!("log{number}"))
}

/// The numbers of the logs beside the tables at `path`, the oldest first.
pub(super) fn numbers(path: &Path) -> io::Result<Vec<u64>> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut numbers = Vec::new();
    for file in fs::read_dir(folder)? {
        let name = file?.path();
        if name.file_stem() == path.file_stem()
            && let Some(extension) = name.extension().and_then(|extension| extension.to_str())
            && let Some(number) = extension.strip_prefix("log").and_then(|number| number.parse().ok())
        {
            numbers.push(number);
        }
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Removes the logs up to this one, as many as can be.
pub(super) fn remove_through(path: &Path, last: u64) -> io::Result<()> {
    let old = numbers(path)?.into_iter().filter(|number| *number <= last);
    let removed: Vec<_> = old.map(|number| fs::remove_file(log_path(path, number))).collect();
    removed.into_iter().collect()
}

/// Renames all logs, which belong to tables that are kept aside with this suffix.
pub(super) fn set_aside(path: &Path, suffix: &str) -> io::Result<()> {
    for number in numbers(path)? {
        fs::rename(log_path(path, number), path.with_extension(format!("{suffix}-log{number}")))?;
    }
    Ok(())
}

/// Gives the entries of a log to `add`, write by write; none if it is another gateway's. An error of the kind `InvalidData` or
/// `UnexpectedEof` where a line in it is not one of a log.
pub(super) fn read(
    path: &Path,
    number: u64,
    gateway: &str,
    mut add: impl FnMut(Vec<JournalEntry>),
) -> io::Result<()> {
    let mut lines = BufReader::new(File::open(log_path(path, number))?);
    let mut line = Vec::new();
    let mut is_head = true;
    while lines.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
        if std::mem::take(&mut is_head) {
            if serde_json::from_slice::<String>(&line)? != gateway {
                return Ok(());
            }
        } else {
            // JSON has no zeros: before them is what was written of other lines, maybe all but the end.
            let mut parts = line.rsplit(|byte| *byte == 0);
            let last = serde_json::from_slice(parts.next().unwrap_or_default())?;
            parts.rev().filter_map(|part| serde_json::from_slice(part).ok()).for_each(&mut add);
            add(last);
        }
        line.clear();
    }
    Ok(())
}
