//! Hashes bytes on disk by reading them again after the last write. A hash of received bytes proves nothing
//! about the bytes on disk.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use futures::{StreamExt as _, TryStreamExt as _};
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use super::chunks::{self, ChunkHash};
use super::{FileLocation, SourceFile, StoreError};

/// Digest of a file, from its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Digest {
    /// SHA-256, as hubs list for large files.
    Sha256(String),
    /// SHA-1 of a git blob, as hubs list for small files.
    GitBlob(String),
}

/// A file whose bytes were hashed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifiedFile {
    /// Its name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 hash.
    pub sha256: String,
    /// BLAKE3 hash.
    pub blake3: ChunkHash,
    /// Hashes of its chunks.
    pub chunks: Vec<ChunkHash>,
}

impl VerifiedFile {
    fn new(name: String, found: FileHashes) -> Self {
        let values: Vec<chunks::HashBytes> = found.chunks.iter().map(|sum| sum.0).collect();
        let blake3 = ChunkHash(chunks::root(&values));
        Self { name, size: found.size, sha256: found.sha256, blake3, chunks: found.chunks }
    }
}

impl Digest {
    /// The digest in an ETag, recognised by its length; `None` for other tags.
    pub fn from_etag(tag: &str) -> Option<Self> {
        let tag = tag.trim_start_matches("W/").trim_matches('"').to_ascii_lowercase();
        let hex = tag.bytes().all(|byte| byte.is_ascii_hexdigit());
        match (hex, tag.len()) {
            (true, 64) => Some(Self::Sha256(tag)),
            (true, 40) => Some(Self::GitBlob(tag)),
            _ => None,
        }
    }
}

struct FileHashes {
    size: u64,
    sha256: String,
    /// Only where it was asked for.
    git_blob: Option<String>,
    chunks: Vec<ChunkHash>,
}

/// Hashes every file of a partial copy and compares it with its source's digest. A file that differs is
/// removed, so that the next attempt fetches it again.
pub(super) async fn all(folder: &Path, files: &[SourceFile]) -> Result<Vec<VerifiedFile>, StoreError> {
    // Two at once: hashing is CPU-bound, and an engine may be running beside it.
    let hashes: Vec<_> = files.iter().map(|file| verify_file(folder.to_owned(), file.clone())).collect();
    let mut verified: Vec<VerifiedFile> =
        futures::stream::iter(hashes).buffer_unordered(2).try_collect().await?;
    verified.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(verified)
}

/// Whether a verified file has this digest. Its SHA-256 is known; only git's needs its bytes.
pub(super) async fn has_digest(
    folder: &Path,
    file: &VerifiedFile,
    digest: &Digest,
) -> Result<bool, StoreError> {
    match digest {
        Digest::Sha256(sum) => Ok(*sum == file.sha256),
        Digest::GitBlob(sum) => {
            let (path, sum) = (folder.join(&file.name), sum.clone());
            blocking(folder.to_owned(), move || Ok(hash(&path, true)?.git_blob == Some(sum))).await
        }
    }
}

/// The first file whose SHA-256 differs from the manifest's, if any.
pub(super) async fn find_mismatch(
    folder: &Path,
    files: &[VerifiedFile],
) -> Result<Option<String>, StoreError> {
    let hashes = files.iter().map(|file| {
        let (path, file) = (folder.join(&file.name), file.clone());
        let work = move || Ok((hash(&path, false)?.sha256 != file.sha256).then_some(file.name));
        blocking(folder.to_owned(), work)
    });
    let hashes: Vec<_> = hashes.collect();
    let mut wrong: Vec<String> = futures::stream::iter(hashes)
        .buffer_unordered(2)
        .try_filter_map(async |it| Ok(it))
        .try_collect()
        .await?;
    wrong.sort();
    Ok(wrong.into_iter().next())
}

async fn verify_file(folder: PathBuf, file: SourceFile) -> Result<VerifiedFile, StoreError> {
    let path = folder.join(&file.name);
    let work = move || {
        let found = hash(&path, matches!(file.digest, Some(Digest::GitBlob(_))))?;
        let promised = match (&file.digest, &file.location) {
            (Some(digest), _) => Some(digest.clone()),
            (None, FileLocation::Disk(original)) => Some(Digest::Sha256(hash(original, false)?.sha256)),
            (None, FileLocation::BuiltIn(_) | FileLocation::Web(_) | FileLocation::Object(_)) => None,
        };
        let wrong = match promised {
            _ if found.size != file.size => {
                Some((format!("{} bytes", file.size), format!("{} bytes", found.size)))
            }
            Some(Digest::Sha256(sum)) if sum != found.sha256 => Some((sum, found.sha256.clone())),
            Some(Digest::GitBlob(sum)) if found.git_blob.as_ref() != Some(&sum) => {
                Some((sum, found.git_blob.clone().unwrap_or_default()))
            }
            _ => None,
        };
        if let Some((expected, actual)) = wrong {
            std::fs::remove_file(&path).map_err(StoreError::io(&path))?;
            return Err(StoreError::Digest { file: file.name, expected, actual });
        }
        Ok(VerifiedFile::new(file.name, found))
    };
    blocking(folder, work).await
}

async fn blocking<T: Send + 'static>(
    folder: PathBuf,
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(StoreError::Io { path: folder, source: std::io::Error::other(error) }),
    }
}

/// The hashes of a file; git's only where it is asked for, because a source has either and weights take gigabytes.
fn hash(path: &Path, of_git: bool) -> Result<FileHashes, StoreError> {
    let io = || StoreError::io(path);
    let mut file = std::fs::File::open(path).map_err(io())?;
    let size = file.metadata().map_err(io())?.len();
    let mut sha256 = sha2::Sha256::new();
    let mut blake3 = chunks::TreeHasher::new(size);
    let mut git = of_git.then(|| {
        let mut git = ring::digest::Context::new(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY);
        git.update(format!("blob {size}\0").as_bytes());
        git
    });
    let mut buffer = vec![0; 1 << 20];
    let mut read = 0;
    loop {
        let count = file.read(&mut buffer).map_err(io())?;
        if count == 0 {
            break;
        }
        read += count as u64;
        sha256.update(&buffer[..count]);
        blake3.update(&buffer[..count]);
        if let Some(git) = &mut git {
            git.update(&buffer[..count]);
        }
    }
    let chunks = blake3.finish().into_iter().map(ChunkHash).collect();
    let (sha256, git_blob) = (hex::encode(sha256.finalize()), git.map(|git| hex::encode(git.finish())));
    Ok(FileHashes { size: read, sha256, git_blob, chunks })
}

#[cfg(test)]
impl VerifiedFile {
    /// The file of that name with that content.
    pub fn for_content(name: &str, content: &[u8]) -> Self {
        let mut chunks = chunks::TreeHasher::new(content.len() as u64);
        chunks.update(content);
        let found = FileHashes {
            size: content.len() as u64,
            sha256: hex::encode(sha2::Sha256::digest(content)),
            git_blob: None,
            chunks: chunks.finish().into_iter().map(ChunkHash).collect(),
        };
        Self::new(name.to_owned(), found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etag_length_selects_the_digest_kind() {
        let sha = "ab".repeat(32);
        assert_eq!(Digest::from_etag(&format!("\"{sha}\"")), Some(Digest::Sha256(sha)));
        let blob = "CD".repeat(20);
        assert_eq!(Digest::from_etag(&format!("W/\"{blob}\"")), Some(Digest::GitBlob("cd".repeat(20))));
        assert_eq!(Digest::from_etag("\"5f-17\""), None);
    }

    #[test]
    fn both_hashes_are_those_sha256sum_and_git_print() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, "hello\n").unwrap();
        let hashed = hash(&path, true).unwrap();
        assert_eq!(hashed.git_blob.as_deref(), Some("ce013625030ba8dba906f756967f9e9ca394464a"));
        assert_eq!(hashed.sha256, "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03");
    }

    #[tokio::test]
    async fn a_large_file_is_held_to_the_digest_of_git_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.gguf");
        std::fs::File::create(&path).unwrap().set_len(65 << 20).unwrap();
        // As `git hash-object` prints it.
        let sum = "66b30dec94560b99771b2b7817c009e705e577db".to_owned();
        let file = SourceFile {
            name: "weights.gguf".to_owned(),
            size: 65 << 20,
            digest: Some(Digest::GitBlob(sum)),
            location: FileLocation::Disk(path),
        };
        assert_eq!(all(folder.path(), &[file]).await.unwrap().len(), 1);
    }
}
