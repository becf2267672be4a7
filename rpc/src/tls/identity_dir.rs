//! Identity directory: stores the files of one identity so that a new version is never read half-written.
//! Every version has a directory of its own, and one rename of a symbolic link makes it the current one.
//!
//! ```text
//! agent/tls.crt ─▶ current/tls.crt      agent/current ─▶ identity-18c1…/     agent/tls.key ─▶ current/tls.key
//! ```
//!
//! Writers are serialised: each holds a lock on the directory while it works. So files carried over are never
//! older than those of another writer, and an unfinished version is never removed.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Certificate chain.
pub const CERTIFICATE: &str = "tls.crt";
/// Private key of the certificate.
pub const KEY: &str = "tls.key";
/// Certificate of the data-plane CA.
pub const CA: &str = "ca.crt";
/// Certificate of the API server's CA; the same as [`CA`] on the embedded server.
pub const SERVER_CA: &str = "server-ca.crt";
/// ServiceAccount token, where the API server does not accept the certificate as a credential.
pub const TOKEN: &str = "token";
/// Addresses of the API servers, one per line, if there are several.
pub const SERVERS: &str = "servers";
/// Kubeconfig of the API server.
pub const KUBECONFIG: &str = "kubeconfig";

/// All files of an identity; a new version carries over those it does not replace.
const FILE_NAMES: [&str; 7] = [CERTIFICATE, KEY, CA, SERVER_CA, TOKEN, SERVERS, KUBECONFIG];
const CURRENT_LINK: &str = "current";
const VERSION_PREFIX: &str = "identity-";

/// Replaces the named files of the identity in `dir` in one step; the others stay.
pub fn publish(dir: &Path, files: &[(&str, &[u8])]) -> io::Result<()> {
    create_private(dir)?;
    let folder = lock(dir)?;
    let stamp = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let version = format!("{VERSION_PREFIX}{stamp:x}-{}", std::process::id());
    let fresh = dir.join(&version);
    create_private(&fresh)?;
    for name in FILE_NAMES {
        let given = files.iter().find(|(given, _)| *given == name).map(|(_, bytes)| bytes.to_vec());
        let bytes = match given {
            Some(bytes) => bytes,
            None => match fs::read(dir.join(name)) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            },
        };
        write(&fresh.join(name), &bytes)?;
    }
    fs::File::open(&fresh)?.sync_all()?;
    link(dir, Path::new(&version), CURRENT_LINK)?;
    for name in FILE_NAMES.into_iter().filter(|name| fresh.join(name).exists()) {
        let target = Path::new(CURRENT_LINK).join(name);
        if fs::read_link(dir.join(name)).ok().as_ref() != Some(&target) {
            link(dir, &target, name)?;
        }
    }
    folder.sync_all()?;
    for old in versions(dir)?.into_iter().filter(|old| *old != fresh) {
        // A reader that is opening a file there gets the new one at its next attempt.
        fs::remove_dir_all(old)?;
    }
    Ok(())
}

/// Removes the identity in `dir`; other files there stay.
pub fn remove(dir: &Path) -> io::Result<()> {
    let _turn = match lock(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    // Without a kubeconfig there is no identity, so it is removed first.
    for name in FILE_NAMES.into_iter().rev().chain([CURRENT_LINK]) {
        ignore_not_found(fs::remove_file(dir.join(name)))?;
    }
    versions(dir)?.into_iter().try_for_each(fs::remove_dir_all)
}

/// Writes a file atomically, readable by its owner alone.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let draft = path.with_extension(format!("fresh{}", std::process::id()));
    ignore_not_found(fs::remove_file(&draft))?;
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&draft, path)
}

/// Waits for the write lock of `dir`; it is held until the returned file is dropped.
fn lock(dir: &Path) -> io::Result<fs::File> {
    let folder = fs::File::open(dir)?;
    folder.lock()?;
    Ok(folder)
}

fn ignore_not_found(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn create_private(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Points the link `dir/name` to `target`, replacing an existing file or link.
fn link(dir: &Path, target: &Path, name: &str) -> io::Result<()> {
    let draft = dir.join(format!("{name}.fresh"));
    ignore_not_found(fs::remove_file(&draft))?;
    symlink(target, &draft)?;
    fs::rename(&draft, dir.join(name))
}

fn versions(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(VERSION_PREFIX) && entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn new_identity_version_is_atomic_and_keeps_other_files() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("agent");
        let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
        publish(&dir, &[(CERTIFICATE, b"c1"), (KEY, b"k1"), (CA, b"ca"), (KUBECONFIG, b"{}")]).unwrap();
        publish(&dir, &[(CERTIFICATE, b"c2"), (KEY, b"k2")]).unwrap();
        assert_eq!([read(CERTIFICATE), read(KEY), read(CA), read(KUBECONFIG)], ["c2", "k2", "ca", "{}"]);
        assert_eq!(versions(&dir).unwrap().len(), 1, "older versions are removed");
        let mode = fs::metadata(dir.join(KEY)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::write(dir.join("models"), "stay").unwrap();
        remove(&dir).unwrap();
        let left: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["models"]);
    }

    #[test]
    fn concurrent_identity_writers_lose_no_files() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        publish(dir, &[(CERTIFICATE, b"0"), (KEY, b"0"), (TOKEN, b"0")]).unwrap();
        std::thread::scope(|scope| {
            for names in [[CERTIFICATE, KEY].as_slice(), &[TOKEN]] {
                scope.spawn(move || {
                    for round in 1..=50 {
                        let text = round.to_string();
                        let files: Vec<_> = names.iter().map(|name| (*name, text.as_bytes())).collect();
                        publish(dir, &files).unwrap();
                    }
                });
            }
        });
        for name in [CERTIFICATE, KEY, TOKEN] {
            assert_eq!(fs::read_to_string(dir.join(name)).unwrap(), "50", "{name}");
        }
        assert_eq!(versions(dir).unwrap().len(), 1);
    }

    #[test]
    fn plain_files_of_an_older_release_become_links() {
        let folder = tempfile::tempdir().unwrap();
        for name in [CERTIFICATE, KEY, CA] {
            fs::write(folder.path().join(name), "old").unwrap();
        }
        publish(folder.path(), &[(CERTIFICATE, b"new"), (KEY, b"new")]).unwrap();
        for (name, expected) in [(CERTIFICATE, "new"), (KEY, "new"), (CA, "old")] {
            let path = folder.path().join(name);
            assert!(fs::symlink_metadata(&path).unwrap().is_symlink(), "{name}");
            assert_eq!(fs::read_to_string(path).unwrap(), expected, "{name}");
        }
    }
}
