//! A small disk of a test's own that can be full, in a mount namespace that ends with it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use tempfile::TempDir;

/// The disk, kept mounted by a process that does nothing else.
pub struct TestDisk {
    holder: Child,
    folder: TempDir,
}

impl TestDisk {
    /// Mounts a disk of `bytes`; `None`, with a message, where this user may not mount one. CI may.
    pub fn mount(bytes: u64) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("mount -t tmpfs -o size={bytes} russet \"$0\" && echo mounted && exec cat");
        let holder = Command::new("unshare")
            .args(["--mount", "sh", "-c", &script])
            .arg(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(holder) = holder else {
            assert!(std::env::var_os("CI").is_none(), "CI wants disks of its own");
            eprintln!("skipped: there is no `unshare`; install util-linux");
            return None;
        };
        let mut disk = Self { holder, folder };
        let mut buffer = [0; 8];
        let output = disk.holder.stdout.as_mut().unwrap();
        if std::io::Read::read_exact(output, &mut buffer).is_err() {
            assert!(std::env::var_os("CI").is_none(), "CI wants disks of its own");
            eprintln!("skipped: this user may not mount a disk of its own");
            return None;
        }
        Some(disk)
    }

    /// Its path, visible to every process on this machine.
    pub fn path(&self) -> PathBuf {
        let inside = self.folder.path().strip_prefix("/").unwrap();
        Path::new(&format!("/proc/{}/root", self.holder.id())).join(inside)
    }

    /// Fills it except for the given number of bytes; removing the file frees them.
    pub fn fill_except(&self, left: u64) -> PathBuf {
        let path = self.path().join("ballast");
        let seen = statvfs(self.path()).unwrap();
        let file = std::fs::File::create(&path).unwrap();
        let free = seen.f_bavail * seen.f_frsize;
        fallocate(&file, FallocateFlags::empty(), 0, free.saturating_sub(left)).unwrap();
        path
    }
}

impl Drop for TestDisk {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
