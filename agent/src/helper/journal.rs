//! Journal of the changes and how to undo them, written to disk before each change. A process killed between
//! the two leaves a change that may not have been applied; the machine's own state decides that when it is
//! undone ([`super::decide::is_applied`]).

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::change::MachineChange;
use super::protocol::MachineRequest;

/// Contents of the journal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JournalRecord {
    /// Boot id at the time of the changes.
    pub boot: String,
    /// The request that the changes serve.
    #[serde(alias = "wanted")]
    pub request: Option<MachineRequest>,
    /// Changes that were applied or were about to be, in order.
    // The names that 0.1 wrote are read as well.
    #[serde(alias = "deeds")]
    pub changes: Vec<MachineChange>,
    /// The request that a user reverted at the machine during this boot; an agent's repetition does not apply
    /// it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reverted: Option<MachineRequest>,
}

impl JournalRecord {
    /// Whether there is nothing to undo.
    pub fn is_empty(&self) -> bool {
        self.request.is_none() && self.changes.is_empty()
    }

    /// The node for which changes are held.
    pub fn holder(&self) -> Option<&str> {
        self.request.as_ref().map(|request| request.node.as_str())
    }
}

/// Why the journal cannot be used.
#[derive(Debug, Error)]
pub enum JournalError {
    /// The file system failed.
    #[error("the journal {0} cannot be read or written: {1}; nothing is changed without it")]
    Io(PathBuf, #[source] io::Error),
    /// The file is not a valid journal.
    #[error(
        "the journal {0} is not this helper's journal: {1}; what it changed is gone after a restart of the machine, but for the order of network services: remove the file then"
    )]
    Damaged(PathBuf, #[source] serde_json::Error),
    /// Another process has locked it.
    #[error("another helper runs with {0}; stop it, or give this one its own --state")]
    Locked(PathBuf),
}

/// The journal file.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    record: JournalRecord,
    _lock: File,
}

impl Journal {
    /// Opens and locks the journal in `folder`, and creates the folder if absent.
    pub fn open(folder: &Path) -> Result<Self, JournalError> {
        let io = |source| JournalError::Io(folder.to_owned(), source);
        fs::create_dir_all(folder).map_err(io)?;
        let lock = File::create(folder.join("lock")).map_err(io)?;
        crate::lock_file(&lock).map_err(|error| match error {
            fs::TryLockError::WouldBlock => JournalError::Locked(folder.to_owned()),
            fs::TryLockError::Error(source) => io(source),
        })?;
        let path = folder.join("journal.json");
        let record = match fs::read(&path) {
            Ok(text) => {
                serde_json::from_slice(&text).map_err(|error| JournalError::Damaged(path.clone(), error))?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => JournalRecord::default(),
            Err(error) => return Err(JournalError::Io(path, error)),
        };
        Ok(Self { path, record, _lock: lock })
    }

    /// Current contents.
    pub fn record(&self) -> &JournalRecord {
        &self.record
    }

    /// Changes the contents; they are on disk when this returns.
    pub fn write(&mut self, change: impl FnOnce(&mut JournalRecord)) -> Result<(), JournalError> {
        let mut next = self.record.clone();
        change(&mut next);
        if next == self.record {
            return Ok(());
        }
        replace(&self.path, &next).map_err(|source| JournalError::Io(self.path.clone(), source))?;
        self.record = next;
        Ok(())
    }
}

/// Replaces a file atomically.
fn replace(path: &Path, record: &JournalRecord) -> io::Result<()> {
    let next = path.with_extension("next");
    let mut file = File::create(&next)?;
    file.write_all(&serde_json::to_vec_pretty(record)?)?;
    file.sync_all()?;
    fs::rename(&next, path)?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_of_the_first_release_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let first = r#"{"boot":"b","wanted":null,"deeds":[{"deed":"raise","interface":"en4"}]}"#;
        fs::write(folder.path().join("journal.json"), first).unwrap();
        let journal = Journal::open(folder.path()).unwrap();
        assert_eq!(journal.record().changes, [MachineChange::Raise { interface: "en4".into() }]);
    }

    #[test]
    fn journal_persists_and_has_one_writer() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path()).unwrap();
        assert!(journal.record().is_empty());
        let change = MachineChange::Raise { interface: "en4".into() };
        journal.write(|record| record.changes.push(change.clone())).unwrap();
        let error = Journal::open(folder.path()).unwrap_err().to_string();
        assert!(error.starts_with("another helper runs with"), "{error}");
        drop(journal);
        // A half-written file of a killed process is ignored.
        fs::write(folder.path().join("journal.next"), "{").unwrap();
        assert_eq!(Journal::open(folder.path()).unwrap().record().changes, [change]);
        for damaged in ["{", "{\"deeds\":[{\"deed\":\"run\"}]}", "[]"] {
            fs::write(folder.path().join("journal.json"), damaged).unwrap();
            let error = Journal::open(folder.path()).unwrap_err().to_string();
            assert!(error.contains("is not this helper's journal"), "{error}");
        }
    }
}
