//! The log that is written, and those before it that the tables have not yet. No tables here.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::JournalEntry;
use super::log::LogFile;

/// Time between two looks whether the last lines of a log are written, which takes as long as the disk does.
const WRITE_INTERVAL: Duration = Duration::from_millis(1);

/// The log that is written, and those beside it.
#[derive(Debug)]
pub(super) struct OpenLog {
    pub(super) log: LogFile,
    /// What it has.
    pub(super) entries: Vec<JournalEntry>,
    /// What those before it have that the thread did not take yet, up to that number.
    pub(super) full: Vec<JournalEntry>,
    pub(super) last_full: u64,
    /// The files of these, into which lines may still be written.
    pub(super) ended: Vec<LogFile>,
    /// The one after it, as soon as the ones before it are in the tables.
    pub(super) next: Option<LogFile>,
    /// Whether the thread has ended, and with it the lock on the tables: another gateway may have them now.
    pub(super) has_ended: bool,
}

/// Says that the thread has ended, before what it owns is dropped.
pub(super) struct EndGuard(pub(super) Arc<Mutex<OpenLog>>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.lock().has_ended = true;
        // What is written afterwards would be in no log of the gateway that has the tables next.
        let is_written =
            |open: &mut OpenLog| open.log.is_written() && open.ended.iter_mut().all(LogFile::is_written);
        while !is_written(&mut self.0.lock()) {
            std::thread::sleep(WRITE_INTERVAL);
        }
    }
}

impl OpenLog {
    /// An empty log, all before which are in the tables, and the one after it.
    pub(super) fn new(log: LogFile, next: Option<LogFile>) -> Self {
        let last_full = log.number - 1;
        let (entries, full, ended) = (Vec::new(), Vec::new(), Vec::new());
        Self { log, entries, full, last_full, ended, next, has_ended: false }
    }

    /// Ends the log that is written, and goes on with the next one.
    pub(super) fn end(&mut self, next: LogFile) {
        self.end_entries();
        self.ended.push(std::mem::replace(&mut self.log, next));
    }

    pub(super) fn end_entries(&mut self) {
        self.full.append(&mut self.entries);
        self.last_full = self.log.number;
    }

    /// What full logs have, and the number of the last; `None` while a line of them may still be written: what that reserves is
    /// taken back where it cannot be.
    pub(super) fn take_full(&mut self) -> Option<(Vec<JournalEntry>, u64)> {
        if !self.ended.iter_mut().all(LogFile::is_written) {
            return None;
        }
        self.ended.clear();
        Some((std::mem::take(&mut self.full), self.last_full))
    }

    /// Takes back what a line of entries reserves that could not be written: its request does not begin, and nothing will end
    /// it.
    pub(super) fn take_back(&mut self, line: &[u8]) {
        let entries: Vec<JournalEntry> = serde_json::from_slice(line).unwrap_or_default();
        for entry in entries {
            if !matches!(entry, JournalEntry::Reserved { .. }) {
                continue;
            }
            for list in [&mut self.entries, &mut self.full] {
                if let Some(place) = list.iter().rposition(|one| *one == entry) {
                    list.remove(place);
                    break;
                }
            }
        }
    }
}

/// What full logs have, once all their lines are written.
pub(super) fn take_full(open: &Mutex<OpenLog>) -> (Vec<JournalEntry>, u64) {
    loop {
        if let Some(full) = open.lock().take_full() {
            return full;
        }
        std::thread::sleep(WRITE_INTERVAL);
    }
}
