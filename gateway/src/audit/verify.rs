//! Verifies an audit log: that its chain is whole and signed, and how far requests went.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use russet_crds::Zone;

use super::AuditError;
use super::entry::{AuditEntry, AuditEvent, CompletedRequest, DepartedRequest, Hash, is_signed};
use super::writer::files;

/// The entries that count.
#[derive(Clone, Copy, Debug, Default)]
pub struct AuditPeriod {
    /// From then on.
    pub since: Option<Timestamp>,
    /// Before then.
    pub until: Option<Timestamp>,
}

impl AuditPeriod {
    fn has(&self, at: Timestamp) -> bool {
        self.since.is_none_or(|since| since <= at) && self.until.is_none_or(|until| at < until)
    }
}

/// What an intact log says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditReport {
    /// Entries of the whole log.
    pub entries: u64,
    /// The number of the first: 1, unless earlier files were removed.
    pub first_number: u64,
    /// When the first and the last entry were written.
    pub span: Option<(Timestamp, Timestamp)>,
    /// The hash of the last entry, in hexadecimal.
    pub head: String,
    /// The keys that signed it, in hexadecimal, in order.
    pub public_keys: Vec<String>,
    /// Of the period: requests that ended, by the farthest zone that they went to.
    pub requests: BTreeMap<String, u64>,
    /// Of the period: times that a request left, by provider and its zone.
    pub departures: BTreeMap<(String, String), u64>,
    /// Of the period: entries that could not be written.
    pub lost: u64,
}

impl AuditReport {
    /// Whether it has all of the period.
    pub fn is_whole(&self) -> bool {
        self.lost == 0
    }

    /// Whether no request of the period went beyond a zone.
    pub fn stayed_in(&self, zone: Zone) -> bool {
        let zones = self.departures.keys().map(|(_, zone)| zone).chain(self.requests.keys());
        let beyond = |name: &String| !is_within(name, zone);
        self.is_whole() && !zones.into_iter().any(beyond)
    }
}

/// Whether a zone that an entry names is within another one; a name that nobody knows is beyond all.
fn is_within(name: &str, limit: Zone) -> bool {
    let zones = [Zone::Local, Zone::Lan, Zone::Cloud];
    zones.into_iter().find(|zone| zone.as_str() == name).is_some_and(|zone| zone <= limit)
}

/// Reads all of a log. An error names the first line that is not what a gateway wrote. The keys are those that the entries name,
/// unless one is given: whoever can write to the folder can begin another log with another key.
pub fn verify(
    folder: &Path,
    period: &AuditPeriod,
    public_key: Option<&str>,
) -> Result<AuditReport, AuditError> {
    verify_each(folder, period, public_key, |_, _| {})
}

/// The same, with every event of the period passed on.
pub(super) fn verify_each(
    folder: &Path,
    period: &AuditPeriod,
    public_key: Option<&str>,
    mut each: impl FnMut(Timestamp, &AuditEvent),
) -> Result<AuditReport, AuditError> {
    let mut report = AuditReport::default();
    let mut chain: Option<(u64, Hash)> = None;
    let mut key: Option<Vec<u8>> = None;
    // The first of the lines that no signature has followed yet.
    let mut unsigned: Option<(PathBuf, usize)> = None;
    for (_, path) in files(folder)? {
        let file = File::open(&path).map_err(AuditError::io(&path))?;
        for (number, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(AuditError::io(&path))?;
            let damaged = |what: String| AuditError::Damaged { path: path.clone(), line: number + 1, what };
            let (entry, hash, signature) = AuditEntry::read(&line).map_err(damaged)?;
            if let Some((last, previous)) = chain {
                if entry.number != last + 1 {
                    return Err(damaged(format!("it is number {}, after number {last}", entry.number)));
                }
                if entry.previous != hex::encode(previous) {
                    return Err(damaged("it does not name the hash of the line before it".to_owned()));
                }
            } else {
                report.first_number = entry.number;
            }
            if let AuditEvent::Opened { public_key: named, .. } = &entry.event {
                if public_key.is_some_and(|known| known != named) {
                    return Err(damaged(format!("it is signed by another key, {named}")));
                }
                // A gateway that begins takes nothing over that is not signed.
                if let Some((path, line)) = unsigned.take() {
                    return Err(unsigned_line(path, line));
                }
                key = Some(hex::decode(named).map_err(|_| damaged("its key is not hexadecimal".to_owned()))?);
                if !report.public_keys.contains(named) {
                    report.public_keys.push(named.clone());
                }
            }
            let by = match (&key, public_key) {
                (Some(key), _) => key.clone(),
                // The file that named the key is gone.
                (None, Some(known)) => hex::decode(known).unwrap_or_default(),
                (None, None) => {
                    return Err(damaged(
                        "the log names no key before it; give the key with --public-key".to_owned(),
                    ));
                }
            };
            match signature {
                None => drop(unsigned.get_or_insert_with(|| (path.clone(), number + 1))),
                Some(signature) if is_signed(&hash, &signature, &by) => unsigned = None,
                Some(_) => return Err(damaged("its signature is not of this log's key".to_owned())),
            }
            let at: Timestamp =
                entry.at.parse().map_err(|_| damaged(format!("{:?} is no time", shortened(&entry.at))))?;
            report.count(&entry.event, period.has(at));
            if period.has(at) {
                each(at, &entry.event);
            }
            report.span = Some((report.span.map_or(at, |(first, _)| first), at));
            report.entries += 1;
            report.head = hex::encode(hash);
            chain = Some((entry.number, hash));
        }
    }
    if report.entries == 0 {
        return Err(AuditError::Empty(folder.to_owned()));
    }
    match unsigned {
        Some((path, line)) => Err(unsigned_line(path, line)),
        None => Ok(report),
    }
}

/// A line after which its key signed nothing.
fn unsigned_line(path: PathBuf, line: usize) -> AuditError {
    let what = "it is not signed, and no line that was written with it is; if its gateway was killed a moment ago, it takes \
                such lines back when it starts again";
    AuditError::Damaged { path, line, what: what.to_owned() }
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

impl AuditReport {
    fn count(&mut self, event: &AuditEvent, counts: bool) {
        if !counts {
            return;
        }
        match event {
            AuditEvent::Opened { .. } => {}
            AuditEvent::Left(DepartedRequest { provider, zone, .. }) => {
                *self.departures.entry((provider.clone(), zone.clone())).or_default() += 1;
            }
            AuditEvent::Completed(CompletedRequest { zone, .. }) => {
                *self.requests.entry(zone.clone()).or_default() += 1
            }
            AuditEvent::Lost { entries } => self.lost = self.lost.saturating_add(*entries),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::super::AuditLog;
    use super::super::writer::AuditWriter;
    use super::*;

    /// A log of a request that stayed and of one that left.
    async fn written(folder: &Path) -> String {
        let log = AuditLog::open(folder).unwrap();
        let ended = |request: &str, zone: &str| CompletedRequest {
            request: request.into(),
            zone: zone.into(),
            outcome: "finished".into(),
            ..CompletedRequest::default()
        };
        log.completed(ended("a", "Local"));
        let left = DepartedRequest {
            request: "b".into(),
            provider: "default/p".into(),
            zone: "Cloud".into(),
            ..DepartedRequest::default()
        };
        log.departed(left).await.unwrap();
        log.completed(ended("b", "Cloud"));
        // Whoever waits for this one has all before it.
        let near = DepartedRequest {
            request: "c".into(),
            provider: "default/q".into(),
            zone: "Lan".into(),
            ..DepartedRequest::default()
        };
        log.departed(near).await.unwrap();
        fs::read_to_string(folder.join("audit-00000001.log")).unwrap()
    }

    fn check(folder: &Path, text: &str) -> Result<AuditReport, String> {
        fs::write(folder.join("audit-00000001.log"), text).unwrap();
        verify(folder, &AuditPeriod::default(), None).map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn a_log_says_how_far_requests_went() {
        let folder = tempfile::tempdir().unwrap();
        let text = written(folder.path()).await;
        let report = check(folder.path(), &text).unwrap();
        assert_eq!((report.entries, report.first_number, report.public_keys.len()), (5, 1, 1));
        let requests = [("Cloud".to_owned(), 1), ("Local".to_owned(), 1)];
        assert_eq!(report.requests, BTreeMap::from(requests));
        assert_eq!(report.departures[&("default/p".to_owned(), "Cloud".to_owned())], 1);
        assert!(
            report.stayed_in(Zone::Cloud) && !report.stayed_in(Zone::Lan) && !report.stayed_in(Zone::Local)
        );
        // Before it began nothing happened.
        let (since, until) = (None, report.span.map(|(first, _)| first));
        let before = verify(folder.path(), &AuditPeriod { since, until }, None).unwrap();
        assert!(before.stayed_in(Zone::Local) && before.requests.is_empty() && before.entries == 5);
        let other = "00".repeat(32);
        let error = verify(folder.path(), &AuditPeriod::default(), Some(&other)).unwrap_err().to_string();
        assert!(error.contains("signed by another key"), "{error}");
    }

    #[test]
    fn one_signature_is_of_all_lines_before_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = AuditWriter::open(folder.path(), Arc::default()).unwrap();
        let ended = |zone: &str| {
            AuditEvent::Completed(CompletedRequest { zone: zone.into(), ..CompletedRequest::default() })
        };
        writer.append(vec![ended("Cloud"), ended("Local"), ended("Local")]).unwrap();
        let text = fs::read_to_string(folder.path().join("audit-00000001.log")).unwrap();
        let signed = |text: &str| text.lines().filter(|line| !line.ends_with('\t')).count();
        assert_eq!(signed(&text), 2);
        assert_eq!(check(folder.path(), &text).unwrap().requests["Cloud"], 1);
        // Whoever changes a line without a signature, and all hashes after it, comes to one that has a signature.
        let mut previous: Option<Hash> = None;
        let mut forged = String::new();
        for line in text.lines() {
            let (mut entry, _, signature) = AuditEntry::read(line).unwrap();
            if let AuditEvent::Completed(completed) = &mut entry.event {
                completed.zone = "Local".into();
                entry.previous = hex::encode(previous.unwrap());
            }
            let (line, hash) = entry.line(None);
            let signature = signature.map(|bytes| STANDARD.encode(bytes)).unwrap_or_default();
            forged.push_str(&format!("{}{signature}\n", line.trim_end_matches('\n')));
            previous = Some(hash);
        }
        let error = check(folder.path(), &forged).unwrap_err();
        assert!(error.contains("line 4: its signature is not of this log's key"), "{error}");
    }

    #[tokio::test]
    async fn whatever_is_changed_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let text = written(folder.path()).await;
        let lines: Vec<&str> = text.lines().collect();
        let with = |change: &dyn Fn(&mut Vec<String>)| {
            let mut lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
            change(&mut lines);
            lines.iter().map(|line| format!("{line}\n")).collect::<String>()
        };
        for (case, changed, expected) in [
            (
                "a word",
                with(&|lines| lines[2] = lines[2].replace("Cloud", "Local")),
                "its hash is not that of its text",
            ),
            ("left out", with(&|lines| drop(lines.remove(2))), "it is number 4, after number 2"),
            ("twice", with(&|lines| lines.insert(2, lines[2].clone())), "it is number 3, after number 3"),
            ("swapped", with(&|lines| lines.swap(1, 2)), "it is number 3, after number 1"),
            ("no key", with(&|lines| drop(lines.remove(0))), "the log names no key before it"),
            ("no line", with(&|lines| lines[3] = "x".into()), "it is no entry, its hash and its signature"),
        ] {
            let error = check(folder.path(), &changed).unwrap_err();
            assert!(error.contains(expected), "{case}: {error}");
        }
        // Whoever writes a text with its hash has no key to sign it.
        let forged = with(&|lines| {
            use sha2::{Digest as _, Sha256};
            let json = lines[4].split('\t').next().unwrap().replace("Lan", "Local");
            let signature = lines[4].split('\t').next_back().unwrap().to_owned();
            lines[4] = format!("{json}\t{}\t{signature}", hex::encode(Sha256::digest(&json)));
        });
        let error = check(folder.path(), &forged).unwrap_err();
        assert!(error.contains("line 5: its signature is not of this log's key"), "{error}");
        // One signature is of the lines before it, too.
        let unsigned = with(&|lines| {
            let place = lines[4].rfind('\t').unwrap() + 1;
            lines[4].truncate(place);
        });
        let error = check(folder.path(), &unsigned).unwrap_err();
        assert!(error.contains("it is not signed, and no line that was written with it is"), "{error}");
        // Every byte counts.
        let bytes = text.as_bytes();
        for place in (0..bytes.len()).step_by(7) {
            let mut other = bytes.to_vec();
            other[place] ^= 1;
            fs::write(folder.path().join("audit-00000001.log"), &other).unwrap();
            assert!(verify(folder.path(), &AuditPeriod::default(), None).is_err(), "byte {place}");
        }
        // A gateway that starts again signs nothing that it did not write: it takes it back.
        let forged = with(&|lines| {
            let (mut entry, ..) = AuditEntry::read(&lines[4]).unwrap();
            if let AuditEvent::Left(departed) = &mut entry.event {
                departed.zone = "Local".into();
            }
            lines[4] = entry.line(None).0.trim_end_matches('\n').to_owned();
        });
        for unsigned in [&unsigned, &forged] {
            fs::write(folder.path().join("audit-00000001.log"), unsigned).unwrap();
            drop(AuditLog::open(folder.path()).unwrap());
            let report = verify(folder.path(), &AuditPeriod::default(), None).unwrap();
            assert!(
                report.entries <= 5 && !report.departures.contains_key(&("default/q".into(), "Local".into()))
            );
        }
        // Whoever writes an opening of their own behind it has another key.
        let mine = {
            let other = tempfile::tempdir().unwrap();
            drop(AuditLog::open(other.path()).unwrap());
            fs::read_to_string(other.path().join("audit-00000001.log")).unwrap()
        };
        let (mut opening, ..) = AuditEntry::read(mine.trim_end()).unwrap();
        let (last, hash, _) = AuditEntry::read(forged.lines().last().unwrap()).unwrap();
        (opening.number, opening.previous) = (last.number + 1, hex::encode(hash));
        let error = check(folder.path(), &format!("{forged}{}", opening.line(None).0)).unwrap_err();
        assert!(error.contains("it is not signed"), "{error}");
        // One who goes on writing has a chain that goes on.
        fs::write(folder.path().join("audit-00000001.log"), &text).unwrap();
        let log = AuditLog::open(folder.path()).unwrap();
        log.departed(DepartedRequest::default()).await.unwrap();
        assert_eq!(verify(folder.path(), &AuditPeriod::default(), None).unwrap().entries, 7);
        let empty = tempfile::tempdir().unwrap();
        assert!(verify(empty.path(), &AuditPeriod::default(), None).is_err());
    }
}
