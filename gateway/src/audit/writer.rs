//! Writes the audit log: a chain of lines over files that are begun anew when they are large.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use tokio::sync::oneshot;

use super::AuditError;
use super::entry::{AuditEntry, AuditEvent, Hash};

/// Bytes after which a file is left and the next one begun.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Entries that are written together, under one signature.
const MAX_BATCH: usize = 512;
/// Time between two such writes, so that a busy gateway signs hundreds of times a second and not thousands.
const MIN_WRITE_INTERVAL: Duration = Duration::from_millis(5);
/// How long another gateway may take to end, and how often it is looked whether it has.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const LOCK_INTERVAL: Duration = Duration::from_millis(20);
/// Bytes of the end of a file in which its last signature is looked for first: those of some hundred lines.
const FIRST_TAIL_BYTES: u64 = 128 * 1024;
/// The file with the key.
const KEY_FILE: &str = "key.pk8";

/// An entry that is to be written.
#[derive(Debug)]
pub(super) struct AuditCommand {
    pub(super) event: AuditEvent,
    /// Who waits until it is on the disk.
    pub(super) done: Option<oneshot::Sender<Result<(), String>>>,
}

/// The end of the chain, and the file that it is in.
#[derive(Debug)]
pub(super) struct AuditWriter {
    folder: PathBuf,
    file: File,
    file_number: u32,
    file_bytes: u64,
    key: Ed25519KeyPair,
    next: u64,
    previous: Hash,
    lost: Arc<AtomicU64>,
    /// Locked: two gateways would break one chain.
    _lock: File,
}

/// The path of the file with this number.
fn path(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("audit-{number:08}.log"))
}

/// The files of a folder, by their numbers.
pub(super) fn files(folder: &Path) -> Result<Vec<(u32, PathBuf)>, AuditError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(AuditError::io(folder))? {
        let path = entry.map_err(AuditError::io(folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let number = name.strip_prefix("audit-").and_then(|name| name.strip_suffix(".log"));
        if let Some(number) = number.and_then(|number| number.parse().ok()) {
            files.push((number, path));
        }
    }
    files.sort();
    Ok(files)
}

impl AuditWriter {
    /// Goes on with the log in a folder, and writes that it does.
    pub(super) fn open(folder: &Path, lost: Arc<AtomicU64>) -> Result<Self, AuditError> {
        create_private(folder)?;
        let key_file = folder.join(KEY_FILE);
        let key = key(&key_file)?;
        let lock = lock(&key_file)?;
        let file_number = files(folder)?.last().map_or(1, |(number, _)| *number);
        let at = path(folder, file_number);
        let mut file =
            OpenOptions::new().read(true).append(true).create(true).open(&at).map_err(AuditError::io(&at))?;
        let (next, previous) = match last_signed_line(&mut file).map_err(AuditError::io(&at))? {
            None => (1, Hash::default()),
            Some(line) => {
                let damaged = |what| AuditError::Damaged { path: at.clone(), line: 0, what };
                let (entry, hash, _) = AuditEntry::read(&line).map_err(damaged)?;
                (entry.number.saturating_add(1), hash)
            }
        };
        let file_bytes = file.metadata().map_err(AuditError::io(&at))?.len();
        let mut writer = Self {
            folder: folder.to_owned(),
            file,
            file_number,
            file_bytes,
            key,
            next,
            previous,
            lost,
            _lock: lock,
        };
        let opened = AuditEvent::Opened {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            public_key: hex::encode(writer.key.public_key().as_ref()),
        };
        writer.append(vec![opened]).and_then(|()| writer.file.sync_data()).map_err(AuditError::io(&at))?;
        Ok(writer)
    }

    /// Writes what comes until nobody is left who could send more.
    pub(super) fn run(mut self, commands: &Receiver<AuditCommand>) {
        let mut is_broken = false;
        let mut next_write = Instant::now();
        while let Ok(first) = commands.recv() {
            std::thread::sleep(next_write.saturating_duration_since(Instant::now()));
            next_write = Instant::now() + MIN_WRITE_INTERVAL;
            let more = std::iter::from_fn(|| commands.try_recv().ok());
            let batch: Vec<AuditCommand> = std::iter::once(first).chain(more).take(MAX_BATCH).collect();
            let (mut events, mut waiting) = (Vec::with_capacity(batch.len() + 1), Vec::new());
            let lost = self.lost.swap(0, Ordering::Relaxed);
            if lost > 0 {
                events.push(AuditEvent::Lost { entries: lost });
            }
            for AuditCommand { event, done } in batch {
                events.push(event);
                waiting.extend(done);
            }
            let count = events.len() as u64;
            let mut written = self.append(events);
            if !waiting.is_empty() {
                written = written.and_then(|()| self.file.sync_data());
            }
            if let Err(error) = &written {
                self.lost.fetch_add(count.max(lost), Ordering::Relaxed);
                if !is_broken {
                    let folder = self.folder.display();
                    tracing::error!(
                        "the audit log in {folder} cannot be written, so no request leaves the cluster: {error}"
                    );
                }
            }
            is_broken = written.is_err();
            let result = written.map_err(|error| format!("the audit log cannot be written: {error}"));
            for done in waiting {
                let _ = done.send(result.clone());
            }
        }
    }

    /// Appends entries: all of them, or on an error none.
    pub(super) fn append(&mut self, events: Vec<AuditEvent>) -> io::Result<()> {
        self.file_bytes = self.file.metadata()?.len();
        if self.file_bytes >= MAX_FILE_BYTES {
            self.file.sync_data()?;
            let at = path(&self.folder, self.file_number + 1);
            self.file = OpenOptions::new().append(true).create_new(true).open(at)?;
            (self.file_number, self.file_bytes) = (self.file_number + 1, 0);
        }
        let (mut text, mut next, mut previous) = (String::new(), self.next, self.previous);
        let count = events.len();
        for (place, event) in events.into_iter().enumerate() {
            let at = Timestamp::now().to_string();
            let entry = AuditEntry { number: next, at, previous: hex::encode(previous), event };
            let (line, hash) = entry.line((place + 1 == count).then_some(&self.key));
            text.push_str(&line);
            (next, previous) = (next + 1, hash);
        }
        if let Err(error) = self.file.write_all(text.as_bytes()) {
            // What half a write has left is no line.
            let _ = self.file.set_len(self.file_bytes);
            return Err(error);
        }
        self.file_bytes += text.len() as u64;
        (self.next, self.previous) = (next, previous);
        Ok(())
    }
}

/// Locks the log for this process, once the one before has ended.
fn lock(path: &Path) -> Result<File, AuditError> {
    let file = File::open(path).map_err(AuditError::io(path))?;
    let until = Instant::now() + LOCK_TIMEOUT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(LOCK_INTERVAL),
            Err(TryLockError::WouldBlock) => return Err(AuditError::Locked(path.to_owned())),
            Err(TryLockError::Error(source)) => return Err(AuditError::io(path)(source)),
        }
    }
}

/// Makes a folder that only its owner reads.
fn create_private(folder: &Path) -> Result<(), AuditError> {
    use std::os::unix::fs::DirBuilderExt as _;
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(folder).map_err(AuditError::io(folder))
}

/// The key of this log, made where there is none.
fn key(path: &Path) -> Result<Ed25519KeyPair, AuditError> {
    use std::os::unix::fs::OpenOptionsExt as _;
    if !path.exists() {
        let made = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new());
        let made = made.map_err(|_| AuditError::Key(path.to_owned()))?;
        let new = path.with_extension("new");
        let _ = fs::remove_file(&new);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let written = options.open(&new).and_then(|mut file| {
            file.write_all(made.as_ref())?;
            file.sync_all()
        });
        written.and_then(|()| fs::rename(&new, path)).map_err(AuditError::io(path))?;
    }
    let bytes = fs::read(path).map_err(AuditError::io(path))?;
    Ed25519KeyPair::from_pkcs8(&bytes).map_err(|_| AuditError::Key(path.to_owned()))
}

/// The last signed line of a file, from which what follows is cut off: a crash left that, and nobody was told that it is
/// written. To sign it now would be to sign what somebody else may have put there.
fn last_signed_line(file: &mut File) -> io::Result<Option<String>> {
    let length = file.metadata()?.len();
    let mut window = FIRST_TAIL_BYTES;
    loop {
        let start = length.saturating_sub(window);
        file.seek(SeekFrom::Start(start))?;
        let mut tail = Vec::new();
        file.read_to_end(&mut tail)?;
        // Behind the beginning of the file the first line may be a part of one.
        let first = tail.iter().position(|byte| *byte == b'\n').map_or(tail.len(), |at| at + 1);
        let mut at = if start == 0 { 0 } else { first };
        let mut signed = None;
        for line in tail.get(at..).unwrap_or_default().split_inclusive(|byte| *byte == b'\n') {
            at += line.len();
            // The line is read as one, and its signature verified, by whoever verifies the log.
            if line.ends_with(b"\n") && !line.ends_with(b"\t\n") {
                signed = Some((start + at as u64, line));
            }
        }
        match signed {
            Some((end, line)) => {
                file.set_len(end)?;
                return Ok(Some(String::from_utf8_lossy(line).trim_end_matches('\n').to_owned()));
            }
            None if start == 0 => {
                file.set_len(0)?;
                return Ok(None);
            }
            None => window *= 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AuditPeriod, CompletedRequest, verify};
    use super::*;

    fn ended(request: &str) -> AuditEvent {
        AuditEvent::Completed(CompletedRequest {
            request: request.into(),
            zone: "Local".into(),
            ..CompletedRequest::default()
        })
    }

    #[test]
    fn a_torn_file_goes_on_after_its_last_signed_line() {
        let (whole, key) = {
            let folder = tempfile::tempdir().unwrap();
            let mut writer = AuditWriter::open(folder.path(), Arc::default()).unwrap();
            writer.append(vec![ended("a"), ended("b")]).unwrap();
            (fs::read(path(folder.path(), 1)).unwrap(), fs::read(folder.path().join(KEY_FILE)).unwrap())
        };
        let lines = |bytes: &[u8]| bytes.iter().filter(|byte| **byte == b'\n').count();
        // The first line, that of the opening, is signed, and of those that were written together the last.
        let kept = |torn: &[u8]| match lines(torn) {
            2 => 1,
            other => other,
        };
        for cut in 0..=whole.len() {
            let folder = tempfile::tempdir().unwrap();
            // The same key: what was signed stays valid.
            fs::write(folder.path().join(KEY_FILE), &key).unwrap();
            let torn = whole.get(..cut).unwrap();
            fs::write(path(folder.path(), 1), torn).unwrap();
            let writer = AuditWriter::open(folder.path(), Arc::default()).unwrap();
            assert_eq!(writer.next, kept(torn) as u64 + 2, "cut at {cut}");
            let text = fs::read(path(folder.path(), 1)).unwrap();
            assert_eq!(lines(&text), kept(torn) + 1, "cut at {cut}");
            let report = verify(folder.path(), &AuditPeriod::default(), None).unwrap();
            assert_eq!(report.entries, lines(&text) as u64);
        }
    }

    #[test]
    fn the_last_signature_is_found_however_far_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = AuditWriter::open(folder.path(), Arc::default()).unwrap();
        let long = "x".repeat(5000);
        for count in [1, 40, 400] {
            writer.append((0..count).map(|_| ended(&long)).collect()).unwrap();
            let (file, whole) = (path(folder.path(), 1), fs::read(path(folder.path(), 1)).unwrap());
            // As if the batch behind it had not got its signature.
            let next = writer.next;
            writer.append((0..count).map(|_| ended(&long)).collect()).unwrap();
            let unsigned = fs::read(&file).unwrap();
            let end = unsigned.iter().rposition(|byte| *byte == b'\t').unwrap();
            fs::write(&file, [&unsigned[..=end], b"\n".as_slice()].concat()).unwrap();
            drop(writer);
            writer = AuditWriter::open(folder.path(), Arc::default()).unwrap();
            assert_eq!(writer.next, next + 1, "behind {count}");
            assert!(fs::read(&file).unwrap().starts_with(&whole));
        }
    }

    #[test]
    fn a_full_disk_loses_no_line_and_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let lost = Arc::<AtomicU64>::default();
        let mut writer = AuditWriter::open(folder.path(), lost).unwrap();
        let good =
            std::mem::replace(&mut writer.file, OpenOptions::new().write(true).open("/dev/full").unwrap());
        assert!(writer.append(vec![ended("a")]).is_err());
        writer.file = good;
        writer.append(vec![AuditEvent::Lost { entries: 1 }, ended("b")]).unwrap();
        let report = verify(folder.path(), &AuditPeriod::default(), None).unwrap();
        assert_eq!((report.entries, report.lost), (3, 1));
        assert!(!report.is_whole());
    }
}
