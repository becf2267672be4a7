//! Service files, written atomically and removed only if this program wrote them.

use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

/// A file to write.
pub struct ServiceFile {
    /// Path from the root of the file system.
    pub path: PathBuf,
    /// Content.
    pub text: String,
    /// File mode: world-readable, as there is no secret in it.
    pub mode: u32,
    is_own: Box<dyn Fn(&str) -> bool>,
}

/// Outcome of writing a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The file existed with the same content.
    Unchanged,
    /// It was written.
    Written,
}

impl ServiceFile {
    /// A file that may replace an existing one for which `own` holds.
    pub fn new(path: PathBuf, text: String, own: impl Fn(&str) -> bool + 'static) -> Self {
        Self { path, text, mode: 0o644, is_own: Box::new(own) }
    }
}

/// A path under another root folder.
pub fn under_root(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Content of a file; `None` if there is none.
pub fn read(path: &Path) -> Result<Option<String>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("{} cannot be read", path.display())),
    }
}

/// Writes a file atomically, unless it has the same content or belongs to another program.
pub fn write(root: &Path, file: &ServiceFile) -> Result<WriteOutcome> {
    let path = under_root(root, &file.path);
    match read(&path)? {
        Some(found) if found == file.text => return Ok(WriteOutcome::Unchanged),
        Some(found) if !(file.is_own)(&found) => bail!(
            "{} was not written by russet, so it is left alone; move it away and install again",
            path.display()
        ),
        _ => {}
    }
    let folder = path.parent().context("the root is no file")?;
    let name = path.file_name().context("the root is no file")?.to_string_lossy();
    // A temporary name: service managers read every file with their suffix.
    let part = folder.join(format!(".{name}.{}", std::process::id()));
    let writing = || {
        std::fs::create_dir_all(folder)?;
        let mut made = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(file.mode)
            .open(&part)?;
        made.set_permissions(std::fs::Permissions::from_mode(file.mode))?;
        made.write_all(file.text.as_bytes())?;
        made.sync_all()?;
        std::fs::rename(&part, &path)
    };
    let written = writing();
    if written.is_err() {
        // A partial file is useless; a failure to remove it adds no information.
        std::fs::remove_file(&part).ok();
    }
    written.map_err(|error| write_error(error, &path))?;
    Ok(WriteOutcome::Written)
}

/// Removes a file of ours, or any with `force`; returns whether there was one.
pub fn remove(root: &Path, path: &Path, own: impl Fn(&str) -> bool, force: bool) -> Result<bool> {
    let path = under_root(root, path);
    let Some(found) = read(&path)? else { return Ok(false) };
    ensure!(
        force || own(&found),
        "{} was not written by russet, so it is left alone; --force removes it",
        path.display()
    );
    std::fs::remove_file(&path).map_err(|error| write_error(error, &path))?;
    Ok(true)
}

fn write_error(error: std::io::Error, path: &Path) -> anyhow::Error {
    let remedy = match error.kind() {
        std::io::ErrorKind::PermissionDenied => "; changing services needs root: use sudo",
        _ => "",
    };
    anyhow::anyhow!("{} cannot be changed: {error}{remedy}", path.display())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]
    use super::*;

    fn file(text: &str) -> ServiceFile {
        ServiceFile::new("/etc/a/b.conf".into(), format!("ours {text}"), |text| text.starts_with("ours"))
    }

    #[test]
    fn a_file_is_written_once_and_what_is_not_ours_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (root, path) = (folder.path(), Path::new("/etc/a/b.conf"));
        assert_eq!(write(root, &file("one")).unwrap(), WriteOutcome::Written);
        assert_eq!(write(root, &file("one")).unwrap(), WriteOutcome::Unchanged);
        assert_eq!(write(root, &file("two")).unwrap(), WriteOutcome::Written);
        let there = root.join("etc/a/b.conf");
        assert_eq!(std::fs::metadata(&there).unwrap().permissions().mode() & 0o777, 0o644);
        let all: Vec<_> = std::fs::read_dir(there.parent().unwrap()).unwrap().collect();
        assert_eq!(all.len(), 1, "nothing is left beside it");

        std::fs::write(&there, "somebody's").unwrap();
        assert!(write(root, &file("two")).unwrap_err().to_string().contains("left alone"));
        let own = |text: &str| text.starts_with("ours");
        assert!(remove(root, path, own, false).unwrap_err().to_string().contains("--force"));
        assert!(remove(root, path, own, true).unwrap());
        assert!(!remove(root, path, own, false).unwrap(), "there is none");
    }
}
