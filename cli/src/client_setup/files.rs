//! `--apply`: a client's own files, read, merged and replaced at once. The earlier file is kept beside it, once. Not
//! here: what is merged.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use super::merge;
use super::setup::ConfigPatch;

/// Largest settings that are read; those of people have kilobytes.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// What the name of the earlier file ends in.
const BACKUP_SUFFIX: &str = ".before-russet";
/// Mode of a file with a key.
const PRIVATE_MODE: u32 = 0o600;
/// Mode of a new file without one.
const PUBLIC_MODE: u32 = 0o644;

/// What became of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApplyOutcome {
    /// It had the settings already.
    Unchanged,
    /// It was written; the earlier one is kept here, if there was one.
    Written(Option<PathBuf>),
}

/// The path of the file in a home folder: the first of the possible ones that exists, else the first.
pub fn path(home: &Path, patch: &ConfigPatch) -> PathBuf {
    let paths = || patch.paths.iter().map(|path| home.join(path));
    paths().find(|path| path.exists()).or_else(|| paths().next()).unwrap_or_else(|| home.to_owned())
}

/// Merges the settings into the file. A file that has, or gets, `key` is its owner's alone.
pub fn apply(home: &Path, patch: &ConfigPatch, key: Option<&str>) -> Result<ApplyOutcome> {
    let path = path(home, patch);
    // Settings may be links into a folder of dotfiles: the file behind the link changes, and the link stays.
    let path = std::fs::canonicalize(&path).unwrap_or(path);
    let earlier = read(&path)?;
    let text = earlier.as_deref().unwrap_or_default();
    let parsed = merge::parse(patch.format, text);
    if let (Some((foreign, why)), Ok(settings)) = (patch.foreign_key, &parsed) {
        ensure!(settings.get(foreign).is_none(), "{} is left alone: {why}", path.display());
    }
    let merged = match text.trim().is_empty() {
        true => merge::render(patch.format, &merge::with_defaults(&patch.defaults, &patch.setting)),
        false => merge::merge(patch.format, text, &patch.defaults, &patch.setting).with_context(|| {
            format!("{} is left alone; merge what is shown without --apply by hand", path.display())
        })?,
    };
    let has_key = key.is_some_and(|key| merged.contains(key));
    let mode = mode_of(&path)?;
    let wanted = match (has_key, mode) {
        (true, _) => PRIVATE_MODE,
        (false, mode) => mode.unwrap_or(PUBLIC_MODE),
    };
    if earlier.as_deref() == Some(merged.as_str()) && mode == Some(wanted) {
        return Ok(ApplyOutcome::Unchanged);
    }
    let backup = match earlier {
        Some(_) => Some(back_up(&path)?),
        None => None,
    };
    replace(&path, &merged, wanted)?;
    Ok(ApplyOutcome::Written(backup))
}

/// The text of a file; `None` if there is none.
fn read(path: &Path) -> Result<Option<String>> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => bail!("{} cannot be read: {error}", path.display()),
    };
    let mut text = String::new();
    let limit = MAX_FILE_BYTES + 1;
    match file.take(limit).read_to_string(&mut text) {
        Ok(_) => {}
        Err(error) => bail!("{} cannot be read, and is left alone: {error}", path.display()),
    }
    ensure!(
        text.len() as u64 <= MAX_FILE_BYTES,
        "{} is left alone: it has more than {MAX_FILE_BYTES} bytes",
        path.display()
    );
    Ok(Some(text))
}

fn mode_of(path: &Path) -> Result<Option<u32>> {
    match std::fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata.permissions().mode() & 0o777)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => bail!("{} cannot be read: {error}", path.display()),
    }
}

/// Keeps the file beside itself, unless an earlier one is kept already; returns where.
fn back_up(path: &Path) -> Result<PathBuf> {
    let mut name = path.as_os_str().to_owned();
    name.push(BACKUP_SUFFIX);
    let backup = PathBuf::from(name);
    if !backup.exists() {
        let part = part_of(path)?;
        let keeping = || {
            // With the permissions of the file.
            std::fs::copy(path, &part)?;
            std::fs::rename(&part, &backup)
        };
        let kept = keeping();
        if kept.is_err() {
            std::fs::remove_file(&part).ok();
        }
        kept.with_context(|| format!("{} cannot be kept as {}", path.display(), backup.display()))?;
    }
    Ok(backup)
}

fn replace(path: &Path, text: &str, mode: u32) -> Result<()> {
    let part = part_of(path)?;
    let writing = || {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut file =
            std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&part)?;
        file.set_permissions(std::fs::Permissions::from_mode(mode))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&part, path)
    };
    let written = writing();
    if written.is_err() {
        // A partial file is useless; a failure to remove it adds no information.
        std::fs::remove_file(&part).ok();
    }
    written.with_context(|| format!("{} cannot be written", path.display()))
}

fn part_of(path: &Path) -> Result<PathBuf> {
    let name = path.file_name().with_context(|| format!("{} is no file", path.display()))?;
    Ok(path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

    use serde_json::json;

    use super::*;
    use crate::client_setup::merge::FileFormat;

    fn patch(key: &str) -> ConfigPatch {
        ConfigPatch {
            paths: &[".client/settings.json", ".client/settings.jsonc"],
            format: FileFormat::Json,
            defaults: json!({"$schema": "s"}),
            setting: json!({"env": {"KEY": key}}),
            foreign_key: Some(("providers", "it has another form")),
        }
    }

    fn mode(path: &Path) -> u32 {
        mode_of(path).unwrap().unwrap()
    }

    #[test]
    fn a_new_file_has_the_setting_and_is_private_with_a_key() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join(".client/settings.json");
        assert_eq!(apply(home.path(), &patch("any"), None).unwrap(), ApplyOutcome::Written(None));
        let expected = "{\n  \"$schema\": \"s\",\n  \"env\": {\n    \"KEY\": \"any\"\n  }\n}\n";
        assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
        assert_eq!(mode(&path), 0o644);
        assert_eq!(apply(home.path(), &patch("any"), None).unwrap(), ApplyOutcome::Unchanged);
        let backup = home.path().join(".client/settings.json.before-russet");
        let written = ApplyOutcome::Written(Some(
            std::fs::canonicalize(home.path()).unwrap().join(".client/settings.json.before-russet"),
        ));
        assert_eq!(apply(home.path(), &patch("rk-1"), Some("rk-1")).unwrap(), written);
        assert_eq!((mode(&path), mode(&backup)), (0o600, 0o644));
        assert_eq!(std::fs::read_to_string(&backup).unwrap(), expected, "the earlier file is kept");
        assert_eq!(apply(home.path(), &patch("rk-2"), Some("rk-2")).unwrap(), written);
        assert_eq!(std::fs::read_to_string(&backup).unwrap(), expected, "once");
        assert_eq!(apply(home.path(), &patch("rk-2"), Some("rk-2")).unwrap(), ApplyOutcome::Unchanged);
        let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 2, "{left:?}");
    }

    #[test]
    fn a_key_makes_a_readable_file_private() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join(".client/settings.json");
        apply(home.path(), &patch("rk-1"), Some("rk-1")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(
            apply(home.path(), &patch("rk-1"), Some("rk-1")).unwrap(),
            ApplyOutcome::Written(_)
        ));
        assert_eq!(mode(&path), 0o600);
    }

    #[test]
    fn files_that_are_no_settings_are_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join(".client");
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("settings.jsonc");
        for (content, part) in [
            (&b"{\"env\": "[..], "is left alone"),
            (b"[]", "is left alone"),
            (b"\xff\xfe", "is left alone"),
            (b"{\"providers\": {}}", "it has another form"),
        ] {
            std::fs::write(&path, content).unwrap();
            let error = format!("{:#}", apply(home.path(), &patch("any"), None).unwrap_err());
            assert!(error.contains(part) && error.contains("settings.jsonc"), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), content);
            assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        }
        let large = std::fs::File::create(&path).unwrap();
        large.set_len(MAX_FILE_BYTES + 1).unwrap();
        let error = apply(home.path(), &patch("any"), None).unwrap_err().to_string();
        assert!(error.contains("more than 4194304 bytes"), "{error}");
    }

    #[test]
    fn the_file_behind_a_link_changes_and_the_link_stays() {
        let home = tempfile::tempdir().unwrap();
        let (dotfiles, folder) = (home.path().join("dotfiles"), home.path().join(".client"));
        std::fs::create_dir(&dotfiles).unwrap();
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(dotfiles.join("client.json"), "{\"mine\": 1}\n").unwrap();
        std::os::unix::fs::symlink(dotfiles.join("client.json"), folder.join("settings.json")).unwrap();
        apply(home.path(), &patch("any"), None).unwrap();
        assert!(folder.join("settings.json").is_symlink());
        let text = std::fs::read_to_string(dotfiles.join("client.json")).unwrap();
        assert_eq!(
            text,
            "{\n  \"mine\": 1,\n  \"$schema\": \"s\",\n  \"env\": {\n    \"KEY\": \"any\"\n  }\n}\n"
        );
    }
}
