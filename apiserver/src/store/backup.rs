//! A backup of all objects: JSON, one object a line, at one revision. It is written while the server runs, from the
//! watch cache, and restored into a new file while it does not. Not here: keys and certificates, which are files
//! beside the store.
//!
//! ```text
//! {"russetBackup":1,"revision":1800000000000123}
//! {"key":"/registry/…","createRevision":…,"revision":…,"value":{…}}
//! {"objects":1}
//! ```

use std::fs::File;
use std::io::{self, BufRead};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::{BufMut as _, Bytes, BytesMut};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Snapshot, StoredObject, embedded};

/// The format; raised when an older reader would misread it.
const FORMAT: u32 = 1;
/// Maximum bytes of a line: twice the body that the server takes for one object, for its escapes.
const MAX_LINE_BYTES: u64 = 8 << 20;

/// Why a backup cannot be restored. Nothing was changed, unless the error says so.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The backup cannot be read, or the store cannot be written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It is none, or of another release.
    #[error("line {line} is not that of a backup: {why}; make the backup with `russet backup`")]
    Line {
        /// The line, from 1.
        line: u64,
        /// The cause.
        why: String,
    },
    /// It ends early.
    #[error("the backup is cut off after {objects} objects: its last line is missing; take an earlier one")]
    CutOff {
        /// Objects before the end.
        objects: u64,
    },
    /// The store is in use, or cannot be written.
    #[error("{path}: {why}; stop `russet serve` or `russet up` first, and look for free space")]
    Store {
        /// The store's file.
        path: PathBuf,
        /// The database's error.
        why: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct BackupHeader {
    russet_backup: u32,
    revision: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct BackupObject<'a> {
    key: String,
    create_revision: u64,
    revision: u64,
    #[serde(borrow)]
    value: &'a RawValue,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BackupTrailer {
    objects: u64,
}

/// A restored store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredStore {
    /// Objects in it.
    pub objects: u64,
    /// The revision of the backup.
    pub revision: u64,
    /// Where the store that was there before is now.
    pub replaced: Option<PathBuf>,
}

/// The lines of a backup.
pub fn lines(snapshot: Snapshot) -> impl Iterator<Item = Bytes> + Send {
    let Snapshot { records, revision } = snapshot;
    let objects = records.len();
    let header = Bytes::from(format!("{{\"russetBackup\":{FORMAT},\"revision\":{revision}}}\n"));
    let trailer = Bytes::from(format!("{{\"objects\":{objects}}}\n"));
    std::iter::once(header)
        .chain(records.into_iter().map(|record| line(&record)))
        .chain(std::iter::once(trailer))
}

fn line(record: &Arc<StoredObject>) -> Bytes {
    let mut line = BytesMut::with_capacity(record.value.len() + record.key.len() + 80);
    let key = serde_json::Value::from(record.key.as_ref());
    let (created, revision) = (record.create_revision, record.revision);
    let head = format!("{{\"key\":{key},\"createRevision\":{created},\"revision\":{revision},\"value\":");
    line.put_slice(head.as_bytes());
    line.put_slice(&record.value);
    line.put_slice(b"}\n");
    line.freeze()
}

/// Writes a backup into the store file at `path`, which may not be in use. A store that is there is kept beside it.
/// The restored one is a history of its own: at its next start every earlier resourceVersion has expired.
pub fn restore(mut backup: impl BufRead, path: &Path) -> Result<RestoredStore, BackupError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| BackupError::Io { path, source }
    };
    let store = |why: String| BackupError::Store { path: path.to_owned(), why };
    let (records, revision) = read(&mut backup)?;
    let objects = u64::try_from(records.len()).unwrap_or(u64::MAX);
    if path.exists() {
        embedded::check_unused(path).map_err(store)?;
    }
    let new = path.with_extension("restoring");
    if new.exists() {
        std::fs::remove_file(&new).map_err(io(&new))?;
    }
    embedded::create(&new, &records, revision).map_err(store)?;
    let replaced = if path.exists() {
        let old = unused_name(path);
        std::fs::rename(path, &old).map_err(io(path))?;
        Some(old)
    } else {
        None
    };
    std::fs::rename(&new, path).map_err(io(&new))?;
    if let Some(folder) = path.parent() {
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(io(folder))?;
    }
    Ok(RestoredStore { objects, revision, replaced })
}

/// A name beside the store that no file has.
fn unused_name(path: &Path) -> PathBuf {
    let mut names = (1..u32::MAX).map(|number| path.with_extension(format!("before-restore-{number}")));
    names.find(|name| !name.exists()).unwrap_or_else(|| path.with_extension("before-restore"))
}

/// The objects of a backup, and its revision.
fn read(backup: &mut impl BufRead) -> Result<(Vec<StoredObject>, u64), BackupError> {
    let mut number: u64 = 0;
    let mut text = String::new();
    let wrong = |line: u64, why: String| BackupError::Line { line, why };
    let mut next = |text: &mut String| -> Result<u64, BackupError> {
        text.clear();
        number += 1;
        let limited = &mut io::Read::take(&mut *backup, MAX_LINE_BYTES);
        limited.read_line(text).map_err(|error| wrong(number, error.to_string()))?;
        Ok(number)
    };
    let line = next(&mut text)?;
    let header: BackupHeader = serde_json::from_str(&text).map_err(|error| wrong(line, error.to_string()))?;
    if header.russet_backup != FORMAT {
        let why = format!("it has format {}, this release reads {FORMAT}", header.russet_backup);
        return Err(wrong(line, why));
    }
    let mut records = Vec::new();
    loop {
        let line = next(&mut text)?;
        let objects = u64::try_from(records.len()).unwrap_or(u64::MAX);
        if !text.ends_with('\n') {
            return Err(BackupError::CutOff { objects });
        }
        if let Ok(trailer) = serde_json::from_str::<BackupTrailer>(&text) {
            if trailer.objects != objects {
                return Err(wrong(line, format!("it counts {} objects of {objects}", trailer.objects)));
            }
            return Ok((records, header.revision));
        }
        let object: BackupObject<'_> =
            serde_json::from_str(&text).map_err(|error| wrong(line, error.to_string()))?;
        if !object.key.starts_with('/') || object.revision > header.revision {
            return Err(wrong(line, format!("key {} at revision {}", object.key, object.revision)));
        }
        let value = Bytes::copy_from_slice(object.value.get().as_bytes());
        records.push(StoredObject::new(object.key.into(), object.create_revision, object.revision, value));
    }
}

#[cfg(test)]
mod tests {
    use super::super::embedded::Embedded;
    use super::super::{Expect, Store as _, Txn, TxnChange};
    use super::*;

    fn written(snapshot: Snapshot) -> Vec<u8> {
        lines(snapshot).flat_map(|line| line.to_vec()).collect()
    }

    async fn put(store: &Embedded, key: &str, value: &str) {
        let change = TxnChange::Put(Bytes::from(value.to_owned()));
        store.txn(Txn { key: key.to_owned(), expect: Expect::Absent, change }).await.unwrap();
    }

    #[tokio::test]
    async fn a_restored_store_has_the_objects_and_no_version() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store.redb");
        let store = Embedded::open(&path).unwrap();
        let deep = format!("{{\"metadata\":{}1{}}}", "[".repeat(500), "]".repeat(500));
        for (key, value) in [("/a/x", r#"{"é\"":"line\nend"}"#), ("/a/y", "{}"), ("/b", deep.as_str())] {
            put(&store, key, value).await;
        }
        let before = store.range("/", None, None).unwrap();
        let revision = before.revision;
        let backup = written(before);
        put(&store, "/lost", "{}").await;
        let (lost, in_use) = (store.revision(), restore(backup.as_slice(), &path));
        assert!(matches!(in_use, Err(BackupError::Store { .. })), "{in_use:?}");
        drop(store);
        let restored = restore(backup.as_slice(), &path).unwrap();
        let replaced = folder.path().join("store.before-restore-1");
        assert_eq!(restored, RestoredStore { objects: 3, revision, replaced: Some(replaced.clone()) });
        let store = Embedded::open(&path).unwrap();
        let after = store.range("/", None, None).unwrap();
        assert_eq!(
            after.records.iter().map(|record| record.key.as_ref()).collect::<Vec<_>>(),
            ["/a/x", "/a/y", "/b"]
        );
        assert_eq!(after.records[2].value, deep);
        assert!(after.revision > lost && store.watch("/", lost).is_err());
        assert!(Embedded::open(&replaced).unwrap().get("/lost").is_some(), "the former store is kept");
    }

    #[test]
    fn a_damaged_backup_changes_nothing() {
        let record = Arc::new(StoredObject::new("/a".into(), 1, 2, Bytes::from_static(b"{}")));
        let whole = String::from_utf8(written(Snapshot { records: vec![record], revision: 2 })).unwrap();
        for (story, text) in [
            ("nothing", String::new()),
            ("another file", "apiVersion: v1\n".to_owned()),
            ("another release", whole.replace("Backup\":1", "Backup\":2")),
            ("without its end", whole.replace("{\"objects\":1}\n", "")),
            ("cut off", whole[..whole.len() - 3].to_owned()),
            (
                "without an object",
                whole.lines().filter(|line| !line.contains("key")).map(|line| format!("{line}\n")).collect(),
            ),
            ("a version of the future", whole.replace("\"revision\":2,", "\"revision\":3,")),
            ("a key that is none", whole.replace("\"/a\"", "\"a\"")),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("store.redb");
            assert!(restore(text.as_bytes(), &path).is_err(), "{story}");
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{story}");
        }
    }
}
