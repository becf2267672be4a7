//! Directories of the store: partial copies and published models, one rename apart. A published directory
//! is complete, hashed and never written again.
//!
//! ```text
//! <root>/.partial/<key>/model.safetensors.part     being fetched from a source
//! <root>/.partial/<id>/{model.safetensors, JOURNAL, RECEIVED}  being received from other machines
//! <root>/<id>/{model.safetensors, MANIFEST.json}     published; the id is the content id
//! <root>/.names/<key>                                content id of a source, and its account
//! <root>/.going/<id>/                                being removed
//! <root>/.prefixes/<id>/                             prefix caches of engines for this model
//! ```

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use russet_model::shape::ModelShape;
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use super::verify::VerifiedFile;
use super::{SourceScope, SourceSpec, StoreError, chunks};

/// Name of the manifest in a published directory.
pub const MANIFEST: &str = "MANIFEST.json";
const PARTIAL: &str = ".partial";
/// The account for which a partial copy is fetched; no file of a model may have the name.
const ACCOUNT: &str = "ACCOUNT";
/// Manifest of what other machines send, in a partial directory; no file of a model may have the name.
pub(super) const RECEIVED: &str = "RECEIVED";
/// Content ids of the fetched sources, by [`key`].
const SOURCE_IDS: &str = ".names";
/// Directories being removed: invisible at once, deleted later.
const TRASH: &str = ".going";
/// Engines' prefix caches, by model; removed together with the model's files.
const PREFIX_CACHES: &str = ".prefixes";

/// Contents of a published directory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// URI of its source.
    pub uri: String,
    /// Commit, for sources that have one.
    pub commit: Option<String>,
    /// Every file, sorted by name.
    pub files: Vec<VerifiedFile>,
    /// Shape according to the headers.
    pub shape: ModelShape,
    /// Whether this machine computed the SHA-256 of the files itself. Received files are verified against
    /// BLAKE3; their SHA-256 is the fetching node's statement, except for models with a pinned manifest.
    #[serde(default)]
    pub own_sha256: bool,
}

impl Manifest {
    /// SHA-256 of the sorted lines `<sha256>  <file>`.
    pub fn sha256(&self) -> String {
        let mut lines: Vec<String> =
            self.files.iter().map(|file| format!("{}  {}\n", file.sha256, file.name)).collect();
        lines.sort();
        hex::encode(sha2::Sha256::digest(lines.concat()))
    }

    /// Checks the manifest against the pinned SHA-256, if there is one.
    pub(super) fn check_pin(&self, source: &SourceSpec) -> Result<(), StoreError> {
        let actual = self.sha256();
        match &source.sha256 {
            Some(expected) if *expected != actual => {
                Err(StoreError::Digest { file: "the manifest".into(), expected: expected.clone(), actual })
            }
            _ => Ok(()),
        }
    }

    /// Content id, independent of the source: the BLAKE3 of the sorted lines
    /// `<sha256> <blake3> <size> <file>`.
    pub fn id(&self) -> String {
        let line = |file: &VerifiedFile| {
            let VerifiedFile { name, size, sha256, blake3, .. } = file;
            format!("{sha256} {} {size} {name}\n", hex::encode(blake3.0))
        };
        let mut lines: Vec<String> = self.files.iter().map(line).collect();
        lines.sort();
        blake3::hash(lines.concat().as_bytes()).to_hex().to_string()
    }

    /// Whether this manifest has the id `id` and is one that a store would write. Used to verify another
    /// machine's manifest.
    pub fn matches_id(&self, id: &str) -> bool {
        let mut names = BTreeSet::new();
        let fits = |file: &VerifiedFile| {
            let values: Vec<chunks::HashBytes> = file.chunks.iter().map(|sum| sum.0).collect();
            // On a case-insensitive file system these would be one file.
            names.insert(file.name.to_ascii_lowercase())
                && super::is_allowed_file(&file.name)
                && values.len() == chunks::count(file.size)
                && chunks::root(&values) == file.blake3.0
        };
        self.files.iter().all(fits) && self.id() == id
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }
}

impl Published {
    /// Directory of engines' prefix caches for this model.
    pub fn prefix_cache_dir(&self) -> PathBuf {
        self.path.with_file_name(PREFIX_CACHES).join(&self.id)
    }
}

/// A published directory that an engine may read.
#[derive(Clone, Debug, PartialEq)]
pub struct Published {
    /// Content id.
    pub id: String,
    /// The directory.
    pub path: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
}

/// A recorded source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SourceRecord {
    /// Content id of its bytes.
    pub id: String,
    /// Digest of the endpoint and the account that listed them; unknown where another node sent them.
    pub account: Option<String>,
}

/// Key of a source: one commit or one pinned manifest, as one namespace and Secret have it.
pub fn key(scope: &SourceScope, uri: &str, commit: Option<&str>, sha256: Option<&str>) -> String {
    let SourceScope { namespace, secret } = scope;
    let (secret, commit) = (secret.as_deref().unwrap_or_default(), commit.unwrap_or_default());
    digest(&["scoped", namespace, secret, uri, commit, sha256.unwrap_or_default()])
}

/// Key that releases up to 0.1 gave a source, whoever asked for it.
pub fn unscoped_key(uri: &str, commit: Option<&str>, sha256: Option<&str>) -> String {
    digest(&[uri, commit.unwrap_or_default(), sha256.unwrap_or_default()])
}

/// The first half of the SHA-256 of some texts.
pub(super) fn digest(parts: &[&str]) -> String {
    let mut digest = sha2::Sha256::new();
    for part in parts {
        // Lengths keep `a` + `bc` and `ab` + `c` apart.
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    hex::encode(&digest.finalize()[..16])
}

#[derive(Clone)]
pub(super) struct ModelDirs {
    root: PathBuf,
}

impl ModelDirs {
    pub fn open(root: PathBuf) -> Result<Self, StoreError> {
        for name in [PARTIAL, PREFIX_CACHES, SOURCE_IDS, TRASH] {
            std::fs::create_dir_all(root.join(name)).map_err(StoreError::io(&root))?;
        }
        let dirs = Self { root };
        dirs.empty_trash()?;
        Ok(dirs)
    }

    /// The published directory, if it exists with every file at its size.
    pub fn published(&self, id: &str) -> Option<Published> {
        if !is_id(id) {
            return None;
        }
        let path = self.root.join(id);
        let manifest: Manifest = serde_json::from_slice(&std::fs::read(path.join(MANIFEST)).ok()?).ok()?;
        let whole = manifest
            .files
            .iter()
            .all(|file| std::fs::metadata(path.join(&file.name)).is_ok_and(|found| found.len() == file.size));
        whole.then(|| Published { id: id.to_owned(), path, manifest })
    }

    /// Content id of a source, if it was fetched.
    pub fn id_of(&self, key: &str) -> Option<String> {
        self.record_of(key).map(|record| record.id)
    }

    /// The record of a source, if it was fetched.
    pub fn record_of(&self, key: &str) -> Option<SourceRecord> {
        let text = std::fs::read_to_string(self.root.join(SOURCE_IDS).join(key)).ok()?;
        let (id, account) = match text.split_once('\n') {
            Some((id, account)) => (id, Some(account.to_owned())),
            None => (text.as_str(), None),
        };
        is_id(id).then(|| SourceRecord { id: id.to_owned(), account })
    }

    /// Records the content id of a source.
    pub fn record(&self, key: &str, record: &SourceRecord) -> Result<(), StoreError> {
        let SourceRecord { id, account } = record;
        let folder = self.root.join(SOURCE_IDS);
        let (path, written) = (folder.join(key), folder.join(format!("{key}.new")));
        let text = account.iter().fold(id.clone(), |id, account| format!("{id}\n{account}"));
        std::fs::write(&written, text).map_err(StoreError::io(&written))?;
        sync(&written)?;
        fail::fail_point!("name-rename");
        std::fs::rename(&written, &path).map_err(StoreError::io(&path))?;
        sync(&folder)
    }

    /// The directory of a partial copy.
    pub fn partial(&self, key: &str) -> Result<PathBuf, StoreError> {
        let path = self.root.join(PARTIAL).join(key);
        std::fs::create_dir_all(&path).map_err(StoreError::io(&path))?;
        Ok(path)
    }

    /// The directory of a partial copy from a source. What was fetched for another account is removed, because bytes of
    /// two sources are never mixed.
    pub fn partial_of(&self, key: &str, account: Option<&str>) -> Result<PathBuf, StoreError> {
        let path = self.root.join(PARTIAL).join(key).join(ACCOUNT);
        let account = account.unwrap_or_default();
        if std::fs::read_to_string(&path).is_ok_and(|known| known == account) {
            return self.partial(key);
        }
        self.remove_partial(key)?;
        let folder = self.partial(key)?;
        std::fs::write(&path, account).map_err(StoreError::io(&path))?;
        Ok(folder)
    }

    /// The manifest of what other machines sent in part.
    pub fn received_manifest(&self, id: &str) -> Option<Manifest> {
        let path = self.root.join(PARTIAL).join(Some(id).filter(|id| is_id(id))?).join(RECEIVED);
        let manifest: Manifest = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
        manifest.matches_id(id).then_some(manifest)
    }

    /// Content ids of all published directories.
    pub fn ids(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.root).into_iter().flatten().flatten();
        let mut ids: Vec<String> = entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| is_id(name))
            .collect();
        ids.sort();
        ids
    }

    /// Removes a partial copy.
    pub fn remove_partial(&self, key: &str) -> Result<(), StoreError> {
        remove(&self.root.join(PARTIAL).join(key))
    }

    /// The root directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Total and free bytes of its disk.
    pub fn disk(&self) -> Result<(u64, u64), StoreError> {
        crate::hardware::disk(&self.root).map_err(StoreError::io(&self.root))
    }

    /// Bytes of a partial copy.
    pub fn partial_bytes(&self, key: &str) -> u64 {
        bytes(&self.root.join(PARTIAL).join(key), allocated)
    }

    /// Bytes of all models, complete or partial.
    pub fn bytes(&self) -> u64 {
        let folders = [self.root.clone(), self.root.join(PARTIAL)];
        let entries =
            folders.iter().flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten());
        entries
            .filter(|entry| is_store_name(&entry.file_name()))
            .map(|entry| bytes(&entry.path(), allocated))
            .sum()
    }

    /// Makes a verified partial copy visible in one step. An existing directory with the same bytes stays.
    pub fn publish(&self, partial: &str, manifest: &Manifest) -> Result<Published, StoreError> {
        let id = manifest.id();
        if let Some(published) = self.published(&id) {
            self.remove_partial(partial)?;
            return Ok(published);
        }
        let partial = self.root.join(PARTIAL).join(partial);
        let names: BTreeSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
        let io = || StoreError::io(&partial);
        for name in &names {
            sync(&partial.join(name))?;
        }
        fail::fail_point!("manifest-write");
        let text = serde_json::to_vec(manifest)
            .map_err(|error| StoreError::Io { path: partial.join(MANIFEST), source: error.into() })?;
        let mut file = std::fs::File::create(partial.join(MANIFEST)).map_err(io())?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(io())?;
        for entry in std::fs::read_dir(&partial).map_err(io())? {
            let entry = entry.map_err(io())?;
            let is_model_file = |name: &str| names.contains(name) || name == MANIFEST;
            if !entry.file_name().to_str().is_some_and(is_model_file) {
                std::fs::remove_file(entry.path()).map_err(StoreError::io(entry.path()))?;
            }
        }
        sync(&partial)?;
        let path = self.root.join(&id);
        // The existing directory is incomplete, or it would have been used.
        remove(&path)?;
        fail::fail_point!("publish-rename");
        std::fs::rename(&partial, &path).map_err(io())?;
        sync(&self.root)?;
        fail::fail_point!("published");
        Ok(Published { id, path, manifest: manifest.clone() })
    }

    /// Removes every directory whose key and content id are not in `keep`; returns the ids of the published
    /// ones. In two steps: each is first moved out of sight, then deleted.
    pub fn collect(&self, keep: &BTreeSet<String>) -> Result<Vec<String>, StoreError> {
        let mut retained = keep.clone();
        retained.extend(keep.iter().filter_map(|key| self.id_of(key)));
        let mut removed = Vec::new();
        let beside = [PARTIAL, PREFIX_CACHES, SOURCE_IDS].map(|name| self.root.join(name));
        for folder in [self.root.clone()].iter().chain(&beside) {
            for entry in std::fs::read_dir(folder).map_err(StoreError::io(folder))? {
                let entry = entry.map_err(StoreError::io(folder))?;
                // Only names that this store creates may be removed.
                let ours = is_store_name(&entry.file_name());
                let Ok(name) = entry.file_name().into_string() else { continue };
                if !ours || retained.contains(&name) {
                    continue;
                }
                fail::fail_point!("going-rename");
                let going = self.root.join(TRASH).join(&name);
                remove(&going)?;
                std::fs::rename(entry.path(), &going).map_err(StoreError::io(entry.path()))?;
                if *folder == self.root {
                    removed.push(name);
                }
                fail::fail_point!("going-unlink");
                self.empty_trash()?;
            }
        }
        Ok(removed)
    }

    /// Deletes the directories that are being removed.
    fn empty_trash(&self) -> Result<(), StoreError> {
        let folder = self.root.join(TRASH);
        for entry in std::fs::read_dir(&folder).map_err(StoreError::io(&folder))?.flatten() {
            remove(&entry.path())?;
        }
        Ok(())
    }
}

/// Whether a name is a content id.
fn is_id(name: &str) -> bool {
    name.len() == 64 && is_store_name(std::ffi::OsStr::new(name))
}

/// Whether this store creates such names: a key or a content id.
fn is_store_name(name: &std::ffi::OsStr) -> bool {
    matches!(name.len(), 32 | 64) && name.as_encoded_bytes().iter().all(u8::is_ascii_hexdigit)
}

/// Bytes of a directory's files as counted by `of`; files deleted meanwhile count as 0.
fn bytes(folder: &Path, of: fn(&Metadata) -> u64) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).filter(Metadata::is_file).map(|it| of(&it)).sum()
}

/// Bytes that a file occupies, without holes that were never written.
fn allocated(file: &Metadata) -> u64 {
    file.len().min(file.blocks() * 512)
}

fn sync(path: &Path) -> Result<(), StoreError> {
    std::fs::File::open(path).and_then(|file| file.sync_all()).map_err(StoreError::io(path))
}

fn remove(path: &Path) -> Result<(), StoreError> {
    let removed = match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(StoreError::Io { path: path.to_owned(), source: error })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(files: &[(&str, &str)]) -> Manifest {
        let files =
            files.iter().map(|(name, content)| VerifiedFile::for_content(name, content.as_bytes())).collect();
        Manifest {
            uri: "file:///m".into(),
            commit: None,
            files,
            shape: ModelShape::default(),
            own_sha256: true,
        }
    }

    fn key_of(uri: &str) -> String {
        key(&SourceScope::default(), uri, None, None)
    }

    #[test]
    fn keys_of_a_source_differ_by_namespace_secret_and_commit() {
        let scope = |namespace: &str, secret: Option<&str>| SourceScope {
            namespace: namespace.into(),
            secret: secret.map(str::to_owned),
        };
        let keys = BTreeSet::from([
            key(&scope("a", None), "az://m/x", None, None),
            key(&scope("b", None), "az://m/x", None, None),
            key(&scope("a", Some("one")), "az://m/x", None, None),
            key(&scope("a", Some("two")), "az://m/x", None, None),
            key(&scope("aone", None), "az://m/x", None, None),
            key(&scope("a", None), "az://m/x", Some("c"), None),
            key(&scope("a", None), "az://m/x", None, Some("c")),
            unscoped_key("az://m/x", None, None),
        ]);
        assert_eq!(keys.len(), 8);
    }

    #[test]
    fn part_of_another_account_is_never_resumed() {
        let root = tempfile::tempdir().unwrap();
        let dirs = ModelDirs::open(root.path().join("models")).unwrap();
        for (account, kept) in
            [(Some("one"), false), (Some("one"), true), (Some("two"), false), (None, false)]
        {
            let part = dirs.partial_of("key", account).unwrap().join("model.safetensors.part");
            assert_eq!(part.exists(), kept, "{account:?}");
            std::fs::write(part, "x").unwrap();
        }
    }

    /// Publishes one file with this content for a source.
    fn published(dirs: &ModelDirs, key: &str, content: &str) -> Published {
        std::fs::write(dirs.partial(key).unwrap().join("config.json"), content).unwrap();
        let published = dirs.publish(key, &manifest(&[("config.json", content)])).unwrap();
        dirs.record(key, &SourceRecord { id: published.id.clone(), account: None }).unwrap();
        published
    }

    #[test]
    fn model_folder_is_published_atomically_and_verified() {
        let root = tempfile::tempdir().unwrap();
        let dirs = ModelDirs::open(root.path().join("models")).unwrap();
        let key = key_of("file:///m");
        let partial = dirs.partial(&key).unwrap();
        std::fs::write(partial.join("config.json"), "{}").unwrap();
        std::fs::write(partial.join("left.over.part"), "x").unwrap();
        assert_eq!(dirs.id_of(&key), None);

        let manifest = manifest(&[("config.json", "{}")]);
        let published = dirs.publish(&key, &manifest).unwrap();
        assert_eq!(dirs.published(&manifest.id()), Some(published.clone()));
        assert!(!published.path.join("left.over.part").exists() && !partial.exists());

        std::fs::write(published.path.join("config.json"), "{}cut").unwrap();
        assert_eq!(dirs.published(&published.id), None, "a file of another size is not what was verified");
    }

    #[test]
    fn sources_with_equal_bytes_share_one_folder() {
        let root = tempfile::tempdir().unwrap();
        let dirs = ModelDirs::open(root.path().join("models")).unwrap();
        let (one, other) = (key_of("a"), key_of("b"));
        let first = published(&dirs, &one, "{}");
        assert_eq!(published(&dirs, &other, "{}"), first);
        assert_eq!(dirs.bytes(), bytes(&first.path, allocated));
        // Either name keeps the directory.
        assert!(dirs.collect(&BTreeSet::from([other.clone()])).unwrap().is_empty());
        assert_eq!((dirs.id_of(&one), dirs.id_of(&other)), (None, Some(first.id.clone())));
        assert_eq!(dirs.collect(&BTreeSet::new()).unwrap(), [first.id]);
    }

    #[test]
    fn only_unwanted_folders_of_the_store_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let models = root.path().join("models");
        let dirs = ModelDirs::open(models.clone()).unwrap();
        let (retained, gone) = (key_of("a"), key_of("b"));
        let [stays, goes] =
            [(&retained, "{}"), (&gone, "[]")].map(|(key, content)| published(&dirs, key, content));
        for published in [&stays, &goes] {
            std::fs::create_dir_all(published.prefix_cache_dir().join("0-of-1")).unwrap();
        }
        std::fs::create_dir(models.join("somebody-elses")).unwrap();
        std::fs::write(models.join("somebody-elses/file"), "not counted").unwrap();
        let (both, one) = (dirs.bytes(), bytes(&stays.path, allocated));
        assert_eq!(both, 2 * one);
        let part = std::fs::File::create(dirs.partial(&gone).unwrap().join("a.part")).unwrap();
        part.set_len(1 << 30).unwrap();
        assert_eq!((dirs.partial_bytes(&gone), dirs.bytes()), (0, both), "holes are no bytes");
        (&part).write_all(b"12345").unwrap();
        assert_eq!((dirs.partial_bytes(&gone), dirs.bytes()), (4096, both + 4096));
        assert_eq!(dirs.collect(&BTreeSet::from([retained.clone()])).unwrap(), [goes.id.as_str()]);
        assert_eq!(dirs.bytes(), one);
        assert!(
            stays.prefix_cache_dir().exists() && !goes.prefix_cache_dir().exists(),
            "they go with the files"
        );
        assert!(dirs.published(&stays.id).is_some() && dirs.published(&goes.id).is_none());
        assert!(models.join("somebody-elses").exists());
        assert_eq!(std::fs::read_dir(models.join(TRASH)).unwrap().count(), 0);

        // The next agent removes what an ended agent did not.
        std::fs::rename(&stays.path, models.join(TRASH).join(&stays.id)).unwrap();
        ModelDirs::open(models.clone()).unwrap();
        assert_eq!(std::fs::read_dir(models.join(TRASH)).unwrap().count(), 0);
    }

    #[test]
    fn peer_manifest_is_checked_against_its_id() {
        let good = manifest(&[("config.json", "{}"), ("a.json", "[]")]);
        assert!(good.matches_id(&good.id()));
        let changed = |change: fn(&mut Vec<VerifiedFile>)| {
            let mut bad = good.clone();
            change(&mut bad.files);
            (bad.matches_id(&good.id()), bad.matches_id(&bad.id()))
        };
        assert_eq!(changed(|files| files[0].chunks[0].0[0] ^= 1), (false, false), "a chunk of another file");
        assert_eq!(changed(|files| files[0].chunks.clear()), (false, false));
        assert_eq!(changed(|files| files[0].size = 1 << 40), (false, false), "more chunks than there are");
        assert_eq!(changed(|files| files[0].name = "../../etc/passwd.txt".into()), (false, false));
        assert_eq!(changed(|files| files[1].name = "CONFIG.json".into()), (false, false), "twins");
        assert_eq!(changed(|files| drop(files.pop())), (false, true), "another model");
    }

    #[test]
    fn the_digest_of_a_manifest_is_that_of_sha256sums_output() {
        let manifest = manifest(&[("b.json", "2"), ("a.json", "1")]);
        let mut lines = [
            format!("{:x}  a.json\n", sha2::Sha256::digest("1")),
            format!("{:x}  b.json\n", sha2::Sha256::digest("2")),
        ];
        lines.sort();
        assert_eq!(manifest.sha256(), format!("{:x}", sha2::Sha256::digest(lines.concat())));
    }
}
