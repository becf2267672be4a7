//! The folders of the store: partial copies, published ones and what separates them, one rename.
//! A published folder is complete, hashed and never written again.
//!
//! ```text
//! <root>/.partial/<key>/model.safetensors.part   being written
//! <root>/<key>/{model.safetensors, MANIFEST.json}  published
//! <root>/.prefixes/<key>/                          what engines keep of prompts to this model
//! ```

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use russet_wire::shape::ModelShape;
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use super::StoreError;
use super::verify::VerifiedFile;

/// Name of the manifest in a published folder.
pub const MANIFEST: &str = "MANIFEST.json";
const PARTIAL: &str = ".partial";
/// What engines keep of prompts, by model; it goes with the model's files.
const PREFIXES: &str = ".prefixes";

/// What a published folder holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Where it came from.
    pub uri: String,
    /// Commit, for sources that have one.
    pub commit: Option<String>,
    /// Every file, sorted by name.
    pub files: Vec<VerifiedFile>,
    /// What the headers said.
    pub shape: ModelShape,
}

impl Manifest {
    /// SHA-256 of the sorted lines `<sha256>  <file>`.
    pub fn sha256(&self) -> String {
        let mut lines: Vec<String> =
            self.files.iter().map(|file| format!("{}  {}\n", file.sha256, file.name)).collect();
        lines.sort();
        hex::encode(sha2::Sha256::digest(lines.concat()))
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }
}

impl Published {
    /// Where engines keep what prompts to this model have in common.
    pub fn prefixes(&self) -> PathBuf {
        self.path.with_file_name(PREFIXES).join(&self.key)
    }
}

/// A folder an engine may read.
#[derive(Clone, Debug, PartialEq)]
pub struct Published {
    /// What names its bytes in this store.
    pub key: String,
    /// The folder.
    pub path: PathBuf,
    /// What it holds.
    pub manifest: Manifest,
}

/// The name of the folder of these bytes: one commit of one source, or one pinned manifest.
pub fn key(uri: &str, commit: Option<&str>, sha256: Option<&str>) -> String {
    let parts = [uri, commit.unwrap_or_default(), sha256.unwrap_or_default()];
    let mut digest = sha2::Sha256::new();
    for part in parts {
        // Lengths keep `a` + `bc` and `ab` + `c` apart.
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    hex::encode(&digest.finalize()[..16])
}

#[derive(Clone)]
pub(super) struct Shelf {
    root: PathBuf,
}

impl Shelf {
    pub fn open(root: PathBuf) -> Result<Self, StoreError> {
        for name in [PARTIAL, PREFIXES] {
            std::fs::create_dir_all(root.join(name)).map_err(StoreError::io(&root))?;
        }
        Ok(Self { root })
    }

    /// The published folder, if it is there with every file at its size.
    pub fn published(&self, key: &str) -> Option<Published> {
        let path = self.root.join(key);
        let manifest: Manifest = serde_json::from_slice(&std::fs::read(path.join(MANIFEST)).ok()?).ok()?;
        let whole = manifest
            .files
            .iter()
            .all(|file| std::fs::metadata(path.join(&file.name)).is_ok_and(|found| found.len() == file.size));
        whole.then(|| Published { key: key.to_owned(), path, manifest })
    }

    /// The folder a copy grows in.
    pub fn partial(&self, key: &str) -> Result<PathBuf, StoreError> {
        let path = self.root.join(PARTIAL).join(key);
        std::fs::create_dir_all(&path).map_err(StoreError::io(&path))?;
        Ok(path)
    }

    /// Throws a partial copy away.
    pub fn forget(&self, key: &str) -> Result<(), StoreError> {
        remove(&self.root.join(PARTIAL).join(key))
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Total and free bytes of its disk.
    pub fn disk(&self) -> Result<(u64, u64), StoreError> {
        crate::hardware::disk(&self.root).map_err(StoreError::io(&self.root))
    }

    /// Bytes of a partial copy.
    pub fn partial_bytes(&self, key: &str) -> u64 {
        bytes(&self.root.join(PARTIAL).join(key))
    }

    /// Bytes of everything there, whole or not.
    pub fn bytes(&self) -> u64 {
        let folders = [self.root.clone(), self.root.join(PARTIAL)];
        let entries =
            folders.iter().flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten());
        entries.filter(|entry| is_key(&entry.file_name())).map(|entry| bytes(&entry.path())).sum()
    }

    /// Makes a verified partial copy visible in one step.
    pub fn publish(&self, key: &str, manifest: &Manifest) -> Result<Published, StoreError> {
        let partial = self.root.join(PARTIAL).join(key);
        let names: BTreeSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
        let io = || StoreError::io(&partial);
        for entry in std::fs::read_dir(&partial).map_err(io())? {
            let entry = entry.map_err(io())?;
            if !entry.file_name().to_str().is_some_and(|name| names.contains(name)) {
                std::fs::remove_file(entry.path()).map_err(StoreError::io(entry.path()))?;
            }
        }
        for name in names {
            sync(&partial.join(name))?;
        }
        let text = serde_json::to_vec_pretty(manifest)
            .map_err(|error| StoreError::Io { path: partial.join(MANIFEST), source: error.into() })?;
        let mut file = std::fs::File::create(partial.join(MANIFEST)).map_err(io())?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(io())?;
        sync(&partial)?;
        let path = self.root.join(key);
        // What is there already is incomplete, or it would have been used.
        remove(&path)?;
        std::fs::rename(&partial, &path).map_err(io())?;
        sync(&self.root)?;
        Ok(Published { key: key.to_owned(), path, manifest: manifest.clone() })
    }

    /// Removes every folder whose key is not in `keep`; returns the keys of published ones.
    pub fn collect(&self, keep: &BTreeSet<String>) -> Result<Vec<String>, StoreError> {
        let mut removed = Vec::new();
        let beside = [PARTIAL, PREFIXES].map(|name| (self.root.join(name), false));
        for (folder, published) in [(self.root.clone(), true)].into_iter().chain(beside) {
            for entry in std::fs::read_dir(&folder).map_err(StoreError::io(&folder))? {
                let entry = entry.map_err(StoreError::io(&folder))?;
                // Only names this store gives are this store's to remove.
                let ours = is_key(&entry.file_name());
                let Ok(name) = entry.file_name().into_string() else { continue };
                if !ours || keep.contains(&name) {
                    continue;
                }
                // The manifest goes first: a folder half removed must not look complete.
                let manifest = entry.path().join(MANIFEST);
                if manifest.exists() {
                    std::fs::remove_file(&manifest).map_err(StoreError::io(&manifest))?;
                }
                remove(&entry.path())?;
                if published {
                    removed.push(name);
                }
            }
        }
        Ok(removed)
    }
}

fn is_key(name: &std::ffi::OsStr) -> bool {
    name.len() == 32 && name.as_encoded_bytes().iter().all(u8::is_ascii_hexdigit)
}

/// Bytes of a folder's files; what goes in this moment counts as gone.
fn bytes(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).filter(|found| found.is_file()).map(|it| it.len()).sum()
}

fn sync(path: &Path) -> Result<(), StoreError> {
    std::fs::File::open(path).and_then(|file| file.sync_all()).map_err(StoreError::io(path))
}

fn remove(path: &Path) -> Result<(), StoreError> {
    match std::fs::remove_dir_all(path) {
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
        let files = files
            .iter()
            .map(|(name, content)| VerifiedFile {
                name: (*name).into(),
                size: content.len() as u64,
                sha256: hex::encode(sha2::Sha256::digest(content)),
            })
            .collect();
        Manifest { uri: "file:///m".into(), commit: None, files, shape: ModelShape::default() }
    }

    #[test]
    fn a_folder_is_there_only_whole_and_holds_only_what_was_verified() {
        let root = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(root.path().join("models")).unwrap();
        let key = key("file:///m", None, None);
        let partial = shelf.partial(&key).unwrap();
        std::fs::write(partial.join("config.json"), "{}").unwrap();
        std::fs::write(partial.join("left.over.part"), "x").unwrap();
        assert_eq!(shelf.published(&key), None);

        let manifest = manifest(&[("config.json", "{}")]);
        let published = shelf.publish(&key, &manifest).unwrap();
        assert_eq!(shelf.published(&key), Some(published.clone()));
        assert!(!published.path.join("left.over.part").exists() && !partial.exists());

        std::fs::write(published.path.join("config.json"), "{}cut").unwrap();
        assert_eq!(shelf.published(&key), None, "a file of another size is not what was verified");
    }

    #[test]
    fn only_unwanted_folders_of_the_store_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(root.path().join("models")).unwrap();
        let (kept, gone) = (key("a", None, None), key("b", Some("c"), None));
        for key in [&kept, &gone] {
            std::fs::write(shelf.partial(key).unwrap().join("config.json"), "{}").unwrap();
            let published = shelf.publish(key, &manifest(&[("config.json", "{}")])).unwrap();
            std::fs::create_dir_all(published.prefixes().join("0-of-1")).unwrap();
        }
        std::fs::create_dir(root.path().join("models/somebody-elses")).unwrap();
        std::fs::write(root.path().join("models/somebody-elses/file"), "not counted").unwrap();
        let (both, one) = (shelf.bytes(), bytes(&root.path().join("models").join(&kept)));
        assert_eq!(both, 2 * one);
        std::fs::write(shelf.partial(&gone).unwrap().join("a.part"), "12345").unwrap();
        assert_eq!((shelf.partial_bytes(&gone), shelf.bytes()), (5, both + 5));
        assert_eq!(shelf.collect(&BTreeSet::from([kept.clone()])).unwrap(), vec![gone.clone()]);
        assert_eq!(shelf.bytes(), one);
        let prefixes = root.path().join("models").join(PREFIXES);
        assert!(prefixes.join(&kept).exists() && !prefixes.join(&gone).exists(), "they go with the files");
        assert!(shelf.published(&kept).is_some() && shelf.published(&gone).is_none());
        assert!(root.path().join("models/somebody-elses").exists());
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
