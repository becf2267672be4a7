//! Whether only root can replace a program: a service that runs as root must not run what others may write,
//! neither the file nor any folder or link on the way to it. Not here: what the program does.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Links followed on the way; as many as Linux follows.
const MAX_LINKS: u32 = 40;
/// Write permission of the group, and of everybody.
const GROUP_WRITE: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;

/// Checks that only root may replace `program`, which is absolute.
pub fn check(program: &Path) -> Result<()> {
    walk(program, MAX_LINKS, &|path| std::fs::symlink_metadata(path).map(|found| Access::of(&found)))
        .with_context(|| remedy(program))
}

fn remedy(program: &Path) -> String {
    format!(
        "root must not run {}, because others may replace it; install it where only root may write, and use it from there: sudo install -m 755 {} /usr/local/bin/russet",
        program.display(),
        program.display()
    )
}

/// Who may change a file or folder.
#[derive(Clone, Copy, Debug)]
struct Access {
    owner: u32,
    group: u32,
    mode: u32,
    is_link: bool,
}

impl Access {
    fn of(found: &Metadata) -> Self {
        let is_link = found.file_type().is_symlink();
        Self { owner: found.uid(), group: found.gid(), mode: found.mode(), is_link }
    }

    /// Why others than root may change it.
    fn fault(self) -> Option<String> {
        if self.owner != 0 {
            return Some(format!("belongs to user {}", self.owner));
        }
        // The permissions of a link are those of its folder.
        let by_group = self.mode & GROUP_WRITE != 0 && self.group != 0;
        let writable = !self.is_link && (by_group || self.mode & OTHERS_WRITE != 0);
        writable.then(|| {
            format!("may be written by others (mode {:04o}, group {})", self.mode & 0o7777, self.group)
        })
    }
}

/// Checks each part of a path from the root on, and where links lead.
fn walk(path: &Path, links: u32, access: &dyn Fn(&Path) -> std::io::Result<Access>) -> Result<()> {
    let mut parts: Vec<&Path> = path.ancestors().filter(|part| !part.as_os_str().is_empty()).collect();
    parts.reverse();
    for part in parts {
        let found = access(part).with_context(|| format!("{} cannot be checked", part.display()))?;
        if let Some(fault) = found.fault() {
            bail!("{} {fault}", part.display());
        }
        if found.is_link {
            let Some(links) = links.checked_sub(1) else { bail!("{} has too many links", path.display()) };
            let target = std::fs::read_link(part)?;
            let rest = path.strip_prefix(part).unwrap_or(Path::new(""));
            let resolved: PathBuf = part.parent().unwrap_or(Path::new("/")).join(target);
            let whole = if rest.as_os_str().is_empty() { resolved } else { resolved.join(rest) };
            return walk(&whole, links, access);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    /// Owners and modes as of a machine whose files all belong to root, except those named.
    fn check_with(path: &Path, others: &[(PathBuf, u32, u32, u32)]) -> Result<()> {
        walk(path, MAX_LINKS, &|part| {
            let found = std::fs::symlink_metadata(part)?;
            let is_link = found.file_type().is_symlink();
            let given = others.iter().find(|(path, ..)| path == part);
            let (owner, group, mode) =
                given.map_or((0, 0, 0o755), |(_, owner, group, mode)| (*owner, *group, *mode));
            Ok(Access { owner, group, mode, is_link })
        })
    }

    #[test]
    fn root_runs_only_what_root_alone_may_replace() {
        let folder = tempfile::tempdir().unwrap();
        let folder = std::fs::canonicalize(folder.path()).unwrap();
        let (bin, home) = (folder.join("bin"), folder.join("home"));
        std::fs::create_dir(&bin).unwrap();
        std::fs::create_dir(&home).unwrap();
        std::fs::write(bin.join("russet"), "").unwrap();
        std::fs::write(home.join("russet"), "").unwrap();
        symlink("russet", bin.join("alias")).unwrap();
        symlink(home.join("russet"), bin.join("away")).unwrap();
        symlink("loop", bin.join("loop")).unwrap();
        symlink(&bin, home.join("bin")).unwrap();
        for (story, path, others, fault) in [
            ("root's own", bin.join("russet"), vec![], None),
            (
                "the file is mine",
                bin.join("russet"),
                vec![(bin.join("russet"), 501, 0, 0o755)],
                Some("belongs to user 501"),
            ),
            (
                "all may write it",
                bin.join("russet"),
                vec![(bin.join("russet"), 0, 0, 0o757)],
                Some("mode 0757"),
            ),
            ("its group may", bin.join("russet"), vec![(bin.join("russet"), 0, 50, 0o775)], Some("group 50")),
            ("root's group may", bin.join("russet"), vec![(bin.clone(), 0, 0, 0o775)], None),
            (
                "the folder is mine",
                bin.join("russet"),
                vec![(bin.clone(), 501, 0, 0o755)],
                Some("belongs to user 501"),
            ),
            (
                "a folder above is sticky",
                bin.join("russet"),
                vec![(folder.clone(), 0, 0, 0o1777)],
                Some("mode 1777"),
            ),
            ("a link that root made", bin.join("alias"), vec![], None),
            (
                "a link of mine",
                bin.join("alias"),
                vec![(bin.join("alias"), 501, 0, 0o777)],
                Some("belongs to user 501"),
            ),
            (
                "a link to my home",
                bin.join("away"),
                vec![(home.clone(), 501, 0, 0o755)],
                Some("belongs to user 501"),
            ),
            (
                "a folder that is a link in my home",
                home.join("bin/russet"),
                vec![(home.clone(), 501, 0, 0o755)],
                Some("home belongs to user 501"),
            ),
            ("links in a circle", bin.join("loop"), vec![], Some("too many links")),
            ("nothing there", bin.join("absent"), vec![], Some("absent cannot be checked")),
        ] {
            let error = check_with(&path, &others).err().map(|error| format!("{error:#}"));
            match fault {
                None => assert_eq!(error, None, "{story}"),
                Some(words) => {
                    assert!(error.as_ref().is_some_and(|error| error.contains(words)), "{story}: {error:?}")
                }
            }
        }
    }

    #[test]
    fn refusal_says_how_to_install_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let program = std::fs::canonicalize(folder.path()).unwrap().join("russet");
        std::fs::write(&program, "").unwrap();
        std::fs::set_permissions(&program, Permissions::from_mode(0o777)).unwrap();
        let error = format!("{:#}", check(&program).unwrap_err());
        assert!(
            error.contains(&format!("sudo install -m 755 {} /usr/local/bin/russet", program.display())),
            "{error}"
        );
    }
}
