//! `file:///folder`: a directory of this machine, copied like any other source so that verified bytes cannot
//! be changed. Only directories that the agent's owner allowed are read.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::{Context, FileLocation, Scheme, SourceFile, SourceListing, SourceSpec, StoreError};

pub(super) const SCHEME: Scheme = Scheme { prefix: "file://", pinned: false, keys: &[], list };

fn list<'a>(context: &'a Context, spec: &'a SourceSpec) -> BoxFuture<'a, Result<SourceListing, StoreError>> {
    async move {
        let roots = context.allow_file_roots.clone();
        let uri = spec.uri.clone();
        blocking(move || list_folder(&uri, &roots)).await
    }
    .boxed()
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(StoreError::Io { path: PathBuf::new(), source: std::io::Error::other(error) }),
    }
}

fn list_folder(uri: &str, roots: &[PathBuf]) -> Result<SourceListing, StoreError> {
    let path = uri.strip_prefix(SCHEME.prefix).filter(|path| path.starts_with('/')).ok_or_else(|| {
        StoreError::BadUri {
            uri: uri.to_owned(),
            problem: "write an absolute path after three slashes, such as file:///models/smoke".into(),
        }
    })?;
    let folder = folder(uri, Path::new(path), roots)?;
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(StoreError::io(&folder))? {
        let entry = entry.map_err(StoreError::io(&folder))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if !super::is_allowed_file(&name) {
            continue;
        }
        // Caches of other tools contain links to blobs; the target of a link must be allowed as well.
        let path = allowed(&entry.path(), roots)?;
        let metadata = std::fs::metadata(&path).map_err(StoreError::io(&path))?;
        if metadata.is_file() {
            files.push(SourceFile {
                name,
                size: metadata.len(),
                digest: None,
                location: FileLocation::Disk(path),
            });
        }
    }
    Ok(SourceListing { commit: None, files, web: None })
}

/// The folder that a URI names: as it is written, and where there is none, with `%20` and the like as RFC 8089 has them.
/// Written comes first, since a folder may have such a name.
fn folder(uri: &str, written: &Path, roots: &[PathBuf]) -> Result<PathBuf, StoreError> {
    let decoded = || reqwest::Url::parse(uri).ok()?.to_file_path().ok().filter(|path| path != written);
    allowed(written, roots)
        .or_else(|error| decoded().and_then(|path| allowed(&path, roots).ok()).ok_or(error))
}

/// The canonical form of `path`, if it is below an allowed directory. A missing path is reported as missing
/// only inside the allowed directories, so that the machine cannot be probed.
fn allowed(path: &Path, roots: &[PathBuf]) -> Result<PathBuf, StoreError> {
    let refused = || StoreError::NotAllowed {
        path: path.to_owned(),
        roots: match roots {
            [] => "none".into(),
            roots => roots.iter().map(|root| root.display().to_string()).collect::<Vec<_>>().join(", "),
        },
    };
    let roots: Vec<PathBuf> = roots.iter().filter_map(|root| root.canonicalize().ok()).collect();
    match path.canonicalize() {
        Ok(canonical) if roots.iter().any(|root| canonical.starts_with(root)) => Ok(canonical),
        Ok(_) => Err(refused()),
        Err(error) => {
            let parts_up = path.components().any(|part| part == std::path::Component::ParentDir);
            match !parts_up && roots.iter().any(|root| path.starts_with(root)) {
                true => {
                    Err(StoreError::NotFound { what: path.display().to_string(), detail: error.to_string() })
                }
                false => Err(refused()),
            }
        }
    }
}

/// `length` bytes of a local file from `offset` on.
pub(super) async fn read(path: &Path, offset: u64, length: u64) -> Result<Vec<u8>, StoreError> {
    let path = path.to_owned();
    blocking(move || {
        let mut file = std::fs::File::open(&path).map_err(StoreError::io(&path))?;
        file.seek(SeekFrom::Start(offset)).map_err(StoreError::io(&path))?;
        let mut bytes = Vec::new();
        file.take(length).read_to_end(&mut bytes).map_err(StoreError::io(&path))?;
        if (bytes.len() as u64) < length {
            return Err(StoreError::Truncated {
                file: path.display().to_string(),
                got: offset + bytes.len() as u64,
                expected: offset + length,
            });
        }
        Ok(bytes)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use russet_crds::conditions::Reason;

    #[test]
    fn only_allowed_folders_are_read_and_links_do_not_lead_out() {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().canonicalize().unwrap();
        let (inside, outside) = (base.join("inside/model"), base.join("outside"));
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::create_dir_all(&outside).unwrap();
        std::fs::write(inside.join("config.json"), "{}").unwrap();
        std::fs::write(inside.join("run.py"), "").unwrap();
        std::fs::write(outside.join("secret.json"), "{}").unwrap();
        let roots = [base.join("inside")];
        let uri = |path: &Path| format!("file://{}", path.display());

        let source = list_folder(&uri(&inside), &roots).unwrap();
        assert_eq!(source.files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>(), ["config.json"]);

        let reason = |uri: &str, roots: &[PathBuf]| list_folder(uri, roots).err().map(|error| error.reason());
        assert_eq!(reason(&uri(&inside), &[]), Some(Reason::SourceNotAllowed));
        assert_eq!(reason(&uri(&outside), &roots), Some(Reason::SourceNotAllowed));
        assert_eq!(reason(&uri(&inside.join("../../outside")), &roots), Some(Reason::SourceNotAllowed));
        assert_eq!(reason(&uri(&base.join("nothing")), &roots), Some(Reason::SourceNotAllowed));
        assert_eq!(reason(&uri(&base.join("inside/nothing")), &roots), Some(Reason::SourceNotFound));
        assert_eq!(reason("file://relative", &roots), Some(Reason::InvalidSpec));

        std::os::unix::fs::symlink(outside.join("secret.json"), inside.join("link.json")).unwrap();
        assert_eq!(reason(&uri(&inside), &roots), Some(Reason::SourceNotAllowed));
    }

    #[test]
    fn percent_escapes_are_decoded_where_no_folder_has_them() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        for name in ["with space", "%41", "A", "é#b"] {
            std::fs::create_dir(base.join(name)).unwrap();
        }
        let roots = [base.clone(), base.join("with space")];
        let found = |name: &str| {
            let uri = format!("file://{}/{name}", base.display());
            folder(&uri, Path::new(uri.strip_prefix(SCHEME.prefix).unwrap()), &roots)
        };
        for (name, expected) in [
            ("with space", "with space"),
            ("with%20space", "with space"),
            ("%41", "%41"),
            ("A", "A"),
            ("%C3%A9%23b", "é#b"),
            ("é#b", "é#b"),
        ] {
            assert_eq!(found(name).unwrap(), base.join(expected), "{name}");
        }
        assert_eq!(found("no%20such").unwrap_err().reason(), Reason::SourceNotFound);
        assert_eq!(found("%2e%2e").unwrap_err().reason(), Reason::SourceNotFound, "nothing above is told of");
    }
}
