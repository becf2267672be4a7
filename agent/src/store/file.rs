//! `file:///folder`, or `file:///folder/x.gguf`: a directory or a GGUF file of this machine, copied like any other source so that verified bytes cannot
//! be changed. Only directories that the agent's owner allowed are read.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Component, Path, PathBuf};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use russet_model::config::CONFIG;
use russet_model::gguf::files::{SUFFIX, parts};
use russet_model::tokenizer_files::chat_templates::ADDITIONAL;

use super::{Context, FileLocation, Scheme, SourceFile, SourceListing, SourceSpec, StoreError};

pub(super) const SCHEME: Scheme = Scheme { prefix: "file://", pinned: false, keys: &[], account: &[], list };

fn list<'a>(context: &'a Context, spec: &'a SourceSpec) -> BoxFuture<'a, Result<SourceListing, StoreError>> {
    async move {
        let (roots, closed) = (context.allow_file_roots.clone(), context.closed_dirs.clone());
        let uri = spec.uri.clone();
        blocking(move || list_folder(&uri, &FileRoots { roots: &roots, closed: &closed })).await
    }
    .boxed()
}

/// Whether a source is no folder outside of those that may be read. A folder that is gone may have been one of them.
pub(super) fn is_allowed(context: &Context, uri: &str) -> bool {
    let roots = FileRoots { roots: &context.allow_file_roots, closed: &context.closed_dirs };
    let path = uri.strip_prefix(SCHEME.prefix);
    !path.is_some_and(|path| matches!(roots.allowed(Path::new(path)), Err(StoreError::NotAllowed { .. })))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(StoreError::Io { path: PathBuf::new(), source: std::io::Error::other(error) }),
    }
}

/// The folders that may be read.
struct FileRoots<'a> {
    roots: &'a [PathBuf],
    /// Never, also below a root.
    closed: &'a [PathBuf],
}

fn list_folder(uri: &str, roots: &FileRoots<'_>) -> Result<SourceListing, StoreError> {
    let path = uri.strip_prefix(SCHEME.prefix).filter(|path| path.starts_with('/')).ok_or_else(|| {
        StoreError::BadUri {
            uri: uri.to_owned(),
            problem: "write an absolute path after three slashes, such as file:///models/smoke".into(),
        }
    })?;
    let mut folder = folder(uri, Path::new(path), roots)?;
    // A file in GGUF is a model by itself, or one of its parts.
    let mut named = None;
    if folder.is_file() {
        let name = folder.file_name().and_then(|name| name.to_str()).filter(|name| name.ends_with(SUFFIX));
        let Some((name, above)) = name.zip(folder.parent()) else {
            return Err(StoreError::BadUri {
                uri: uri.to_owned(),
                problem:
                    "it is a file; name the folder that holds the model's files (config.json, *.safetensors), or a file *.gguf"
                        .into(),
            });
        };
        named = Some(parts(name));
        folder = above.to_owned();
    }
    let mut files = Vec::new();
    let entries = |folder: &Path| -> Result<Vec<PathBuf>, StoreError> {
        let entries = std::fs::read_dir(folder).map_err(StoreError::io(folder))?;
        entries.map(|entry| Ok(entry.map_err(StoreError::io(folder))?.path())).collect()
    };
    for path in entries(&folder)? {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if named.is_none() && is_kept_folder(name) && path.is_dir() {
            for inner in entries(&path)? {
                let file = inner.file_name().and_then(|file| file.to_str());
                let stored = file.and_then(|file| super::stored_name(&format!("{name}/{file}")));
                files.extend(stored.map(|stored| source_file(stored, &inner, roots)).transpose()?.flatten());
            }
        }
        let is_named = named.as_ref().is_none_or(|names| names.iter().any(|known| known == name));
        let stored = super::stored_name(name).filter(|_| is_named);
        files.extend(stored.map(|stored| source_file(stored, &path, roots)).transpose()?.flatten());
    }
    Ok(SourceListing { commit: None, files, web: None })
}

/// Whether files of a folder in the model's folder are fetched.
fn is_kept_folder(name: &str) -> bool {
    name == ADDITIONAL || super::stored_name(&format!("{name}/{CONFIG}")).is_some()
}

/// A file under the name that it gets; `None` for what is no file.
fn source_file(name: String, path: &Path, roots: &FileRoots<'_>) -> Result<Option<SourceFile>, StoreError> {
    // Caches of other tools contain links to blobs; the target of a link must be allowed as well.
    let path = roots.allowed(path)?;
    let metadata = std::fs::metadata(&path).map_err(StoreError::io(&path))?;
    let (size, location) = (metadata.len(), FileLocation::Disk(path));
    Ok(metadata.is_file().then_some(SourceFile { name, size, digest: None, location }))
}

/// The folder that a URI names: as it is written, and where there is none, with `%20` and the like as RFC 8089 has them.
/// Written comes first, since a folder may have such a name.
fn folder(uri: &str, written: &Path, roots: &FileRoots<'_>) -> Result<PathBuf, StoreError> {
    let decoded = || reqwest::Url::parse(uri).ok()?.to_file_path().ok().filter(|path| path != written);
    roots.allowed(written).or_else(|error| decoded().and_then(|path| roots.allowed(&path).ok()).ok_or(error))
}

impl FileRoots<'_> {
    /// The canonical form of `path`, if it is below an allowed directory and below no closed one. A missing path is
    /// reported as missing only where it would be allowed, so that the machine cannot be probed.
    fn allowed(&self, path: &Path) -> Result<PathBuf, StoreError> {
        let refused = || StoreError::NotAllowed {
            path: path.to_owned(),
            roots: match self.roots {
                [] => "none".into(),
                roots => roots.iter().map(|root| root.display().to_string()).collect::<Vec<_>>().join(", "),
            },
        };
        let (found, missing) = match path.canonicalize() {
            Ok(found) => (found, None),
            Err(error) => (existing_part(path).ok_or_else(refused)?, Some(error)),
        };
        let canonical = |folders: &[PathBuf]| -> Vec<PathBuf> {
            folders.iter().filter_map(|folder| folder.canonicalize().ok()).collect()
        };
        let within = |folders: &[PathBuf]| folders.iter().any(|folder| found.starts_with(folder));
        match missing {
            _ if !within(&canonical(self.roots)) || within(&canonical(self.closed)) => Err(refused()),
            None => Ok(found),
            Some(error) => {
                Err(StoreError::NotFound { what: path.display().to_string(), detail: error.to_string() })
            }
        }
    }
}

/// The canonical form of the part of a missing path that exists; `None` where that cannot be told: for links to what does
/// not exist, and for steps upwards.
fn existing_part(path: &Path) -> Option<PathBuf> {
    if path.components().any(|part| part == Component::ParentDir) {
        return None;
    }
    let mut missing = path;
    let found = path.ancestors().skip(1).find_map(|ancestor| match ancestor.canonicalize() {
        Ok(found) => Some(found),
        Err(_) => {
            missing = ancestor;
            None
        }
    });
    found.filter(|_| missing.symlink_metadata().is_err())
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
        let data = base.join("inside/data");
        std::fs::create_dir_all(data.join("agent/models/id")).unwrap();
        std::fs::write(data.join("agent/models/id/config.json"), "{}").unwrap();
        let roots = [base.join("inside")];
        let closed = [data.clone()];
        let uri = |path: &Path| format!("file://{}", path.display());
        let list = |uri: &str, roots: &[PathBuf]| list_folder(uri, &FileRoots { roots, closed: &closed });

        let source = list(&uri(&inside), &roots).unwrap();
        assert_eq!(source.files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>(), ["config.json"]);

        let reason = |uri: &str, roots: &[PathBuf]| list(uri, roots).err().map(|error| error.reason());
        assert_eq!(reason(&uri(&inside), &[]), Some(Reason::SourceNotAllowed));
        assert_eq!(reason(&uri(&base.join("inside/nothing")), &roots), Some(Reason::SourceNotFound));
        assert_eq!(reason("file://relative", &roots), Some(Reason::InvalidSpec));
        assert_eq!(reason(&uri(&inside.join("config.json")), &roots), Some(Reason::InvalidSpec), "a file");

        let link = |to: &Path, at: PathBuf| std::os::unix::fs::symlink(to, at);
        link(&data, base.join("inside/door")).unwrap();
        link(&base.join("outside"), base.join("inside/out")).unwrap();
        link(Path::new("/nowhere/at/all"), base.join("inside/dangling")).unwrap();
        // One message, whatever is there.
        for (what, roots) in [
            (outside.clone(), &roots[..]),
            (inside.join("../../outside"), &roots),
            (inside.join("../../nothing"), &roots),
            (base.join("nothing"), &roots),
            ("/etc".into(), &roots),
            ("/nowhere".into(), &roots),
            ("/etc/passwd".into(), &roots),
            (base.join("inside/out"), &roots),
            (base.join("inside/out/secret.json"), &roots),
            (base.join("inside/out/nothing"), &roots),
            (base.join("inside/dangling"), &roots),
            (base.join("inside/dangling/x"), &roots),
            // The data folder, whichever way.
            (data.join("agent/models/id"), &roots),
            (data.join("agent/models/nothing"), &roots),
            (base.join("inside/door/agent/models/id"), &roots),
            (base.join("inside/door/agent/models/nothing"), &roots),
            (data.join("agent/models/id"), &["/".into()]),
            (data.join("agent/models/id"), std::slice::from_ref(&data)),
        ] {
            let error = list(&uri(&what), roots).err().map(|error| error.to_string());
            let lexical = what.display().to_string();
            let error = error.unwrap_or_default();
            assert!(
                error.starts_with(&format!(
                    "this agent may not read {lexical}: it is outside the allowed folders"
                )),
                "{lexical}: {error}"
            );
        }

        link(&outside.join("secret.json"), inside.join("link.json")).unwrap();
        assert_eq!(reason(&uri(&inside), &roots), Some(Reason::SourceNotAllowed));
    }

    #[test]
    fn folders_of_modules_are_listed_by_flat_names() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        for (folder, file) in [
            ("1_Pooling", "config.json"),
            ("2_Dense", "model.safetensors"),
            ("2_Dense", "pytorch_model.bin"),
            ("onnx", "config.json"),
            ("additional_chat_templates", "rag.jinja"),
            ("additional_chat_templates", "rag.py"),
        ] {
            std::fs::create_dir_all(base.join(folder)).unwrap();
            std::fs::write(base.join(folder).join(file), "x").unwrap();
        }
        std::fs::write(base.join("config.json"), "{}").unwrap();
        let roots = FileRoots { roots: std::slice::from_ref(&base), closed: &[] };
        let listing = list_folder(&format!("file://{}", base.display()), &roots).unwrap();
        let mut names: Vec<&str> = listing.files.iter().map(|file| file.name.as_str()).collect();
        names.sort_unstable();
        let expected = [
            "1_Pooling.config.json",
            "2_Dense.model.safetensors",
            "additional_chat_templates.rag.jinja",
            "config.json",
        ];
        assert_eq!(names, expected);
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
            let written = Path::new(uri.strip_prefix(SCHEME.prefix).unwrap());
            folder(&uri, written, &FileRoots { roots: &roots, closed: &[] })
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
