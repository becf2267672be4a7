//! Memory limits of the cgroups that this process is in: of a container, of a systemd unit with `MemoryMax=`, of
//! a pod. Versions 1 and 2, with the limits of all parents. Not here: limits of CPUs, which the standard library
//! reads for the number of threads.

use std::fs;
use std::path::{Path, PathBuf};

use super::pressure::{self, Pressure};

/// Files of one version of cgroups.
struct Files {
    /// Limits in bytes, or `max`.
    limits: &'static [&'static str],
    /// Bytes in use.
    used: &'static str,
    /// Fields of `memory.stat` that count memory which the kernel may take back.
    reclaimable: &'static [&'static str],
}

/// Version 1.
const V1: Files = Files {
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    reclaimable: &["total_active_file", "total_inactive_file"],
};
/// Version 2. Beyond `memory.high` a process is slowed down until it gives memory back, which weights never are.
const V2: Files = Files {
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    reclaimable: &["active_file", "inactive_file", "slab_reclaimable"],
};

/// Memory within the limits of cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupMemory {
    /// The smallest limit on the way to the root, in bytes.
    pub limit: u64,
    /// Bytes that every limit on the way still allows, without what could be reclaimed.
    pub available: u64,
}

/// The limits of this process, or of the machine described below `root`; `None` without limits.
pub fn memory(root: &Path) -> Option<CgroupMemory> {
    let (folders, files) = hierarchy(root)?;
    let limited = folders.iter().filter_map(|folder| {
        let limit = files.limits.iter().filter_map(|name| number(&folder.join(name))).min()?;
        let used = number(&folder.join(files.used)).unwrap_or(0);
        let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let reclaimable =
            files.reclaimable.iter().filter_map(|name| field(&stat, name)).fold(0, u64::saturating_add);
        Some(CgroupMemory { limit, available: limit.saturating_sub(used.saturating_sub(reclaimable)) })
    });
    limited.reduce(|one, other| CgroupMemory {
        limit: one.limit.min(other.limit),
        available: one.available.min(other.available),
    })
}

/// The worst memory pressure on the way to the root; version 2 alone measures it.
pub fn pressure(root: &Path) -> Option<Pressure> {
    let (folders, _) = hierarchy(root)?;
    let read = |folder: &PathBuf| pressure::memory(&fs::read_to_string(folder.join("memory.pressure")).ok()?);
    folders.iter().filter_map(read).max_by(|one, other| one.full.total_cmp(&other.full))
}

/// The folders of this process's cgroup and of its parents, as far as they are visible.
fn hierarchy(root: &Path) -> Option<(Vec<PathBuf>, &'static Files)> {
    let cgroups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let (own, mount, files) = v1(&cgroups, &mounts).or_else(|| v2(&cgroups, &mounts))?;
    // Outside of its namespace a cgroup's path begins with `..`, and only the mount itself is visible.
    let below = own.strip_prefix(mount.root).filter(|below| !below.split('/').any(|part| part == ".."));
    let below = below.unwrap_or_default().trim_matches('/');
    let mounted = root.join(mount.point.trim_start_matches('/'));
    let mut folders = vec![mounted.clone()];
    let mut folder = mounted;
    for part in below.split('/').filter(|part| !part.is_empty()) {
        folder.push(part);
        folders.push(folder.clone());
    }
    Some((folders, files))
}

/// A mounted hierarchy.
struct Mount<'a> {
    /// The cgroup that is mounted.
    root: &'a str,
    /// Where.
    point: &'a str,
}

/// The cgroup of version 1 with the memory controller.
fn v1<'a>(cgroups: &'a str, mounts: &'a str) -> Option<(&'a str, Mount<'a>, &'static Files)> {
    let own = cgroups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        controllers.split(',').any(|name| name == "memory").then_some(path)
    })?;
    let mount = mounts.lines().find_map(|line| mount(line, "cgroup", "memory"))?;
    Some((own, mount, &V1))
}

/// The cgroup of version 2.
fn v2<'a>(cgroups: &'a str, mounts: &'a str) -> Option<(&'a str, Mount<'a>, &'static Files)> {
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mount = mounts.lines().find_map(|line| mount(line, "cgroup2", ""))?;
    Some((own, mount, &V2))
}

/// A line of `/proc/self/mountinfo`, if it is of this type and option of its superblock.
fn mount<'a>(line: &'a str, kind: &str, option: &str) -> Option<Mount<'a>> {
    let (front, back) = line.split_once(" - ")?;
    let mut front = front.split(' ').skip(3);
    let mut back = back.split(' ');
    let found =
        back.next()? == kind && (option.is_empty() || back.nth(1)?.split(',').any(|name| name == option));
    found.then_some(Mount { root: front.next()?.trim_end_matches('/'), point: front.next()? })
}

/// A number in a file; `None` for `max`.
fn number(path: &Path) -> Option<u64> {
    super::word(path)?.parse().ok()
}

/// A field of `memory.stat`.
fn field(stat: &str, name: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const UNIFIED: &str = "25 20 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    const LEGACY: &str = "30 25 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
        31 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
    /// As a container sees its own part without a namespace of cgroups.
    const BOUND: &str = "31 25 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";

    /// A machine by its files; sizes in MiB.
    fn machine(cgroup: &str, mounts: &str, files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/self/cgroup", cgroup);
        write("proc/self/mountinfo", mounts);
        for (path, text) in files {
            let bytes =
                |word: &str| word.parse::<u64>().map_or(word.to_owned(), |mib| (mib * MIB).to_string());
            let lines: Vec<String> =
                text.lines().map(|line| line.split(' ').map(bytes).collect::<Vec<_>>().join(" ")).collect();
            write(&format!("sys/fs/cgroup/{path}"), &lines.join("\n"));
        }
        root
    }

    #[test]
    fn the_tightest_limit_on_the_way_to_the_root_counts() {
        for (story, cgroup, mounts, files, expected) in [
            ("no cgroups", "", "", &[][..], None),
            ("no limit", "0::/a\n", UNIFIED, &[("a/memory.max", "max")], None),
            (
                "a container",
                "0::/\n",
                UNIFIED,
                &[("memory.max", "2048"), ("memory.current", "48")],
                Some((2048, 2000)),
            ),
            (
                "page cache may be taken back",
                "0::/a\n",
                UNIFIED,
                &[
                    ("a/memory.max", "2048"),
                    ("a/memory.current", "1000"),
                    ("a/memory.stat", "anon 300\nactive_file 200\ninactive_file 400\nslab_reclaimable 50"),
                ],
                Some((2048, 1698)),
            ),
            (
                "MemoryMax of a slice, and a neighbour in it",
                "0::/russet.slice/agent.service\n",
                UNIFIED,
                &[
                    ("russet.slice/memory.max", "1024"),
                    ("russet.slice/memory.current", "900"),
                    ("russet.slice/agent.service/memory.max", "max"),
                    ("russet.slice/agent.service/memory.current", "10"),
                ],
                Some((1024, 124)),
            ),
            (
                "the larger limit is below",
                "0::/a/b\n",
                UNIFIED,
                &[("a/memory.max", "512"), ("a/b/memory.max", "4096"), ("a/b/memory.current", "4000")],
                Some((512, 96)),
            ),
            (
                "slowed down before",
                "0::/a\n",
                UNIFIED,
                &[("a/memory.max", "8192"), ("a/memory.high", "4096")],
                Some((4096, 4096)),
            ),
            (
                "more than the limit",
                "0::/a\n",
                UNIFIED,
                &[("a/memory.max", "10"), ("a/memory.current", "11")],
                Some((10, 0)),
            ),
            (
                "outside of the namespace",
                "0::/../../other\n",
                UNIFIED,
                &[("memory.max", "100"), ("other/memory.max", "1")],
                Some((100, 100)),
            ),
            (
                "version 1",
                "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n",
                LEGACY,
                &[
                    ("memory/docker/abc/memory.limit_in_bytes", "2048"),
                    ("memory/docker/abc/memory.usage_in_bytes", "1048"),
                    (
                        "memory/docker/abc/memory.stat",
                        "inactive_file 7\ntotal_inactive_file 40\ntotal_active_file 8",
                    ),
                    ("memory/memory.limit_in_bytes", "8796093022207"),
                ],
                Some((2048, 1048)),
            ),
            (
                "version 1, bound into a container",
                "4:memory:/docker/abc\n",
                BOUND,
                &[("memory/memory.limit_in_bytes", "64"), ("memory/memory.usage_in_bytes", "4")],
                Some((64, 60)),
            ),
            (
                "hybrid: the memory controller is in version 1",
                "4:memory:/a\n0::/b\n",
                &format!("{LEGACY}{UNIFIED}"),
                &[("memory/a/memory.limit_in_bytes", "32"), ("b/memory.max", "16")],
                Some((32, 32)),
            ),
        ] {
            let root = machine(cgroup, mounts, files);
            let expected = expected
                .map(|(limit, available)| CgroupMemory { limit: limit * MIB, available: available * MIB });
            assert_eq!(memory(root.path()), expected, "{story}");
        }
    }

    #[test]
    fn pressure_of_the_cgroup_is_read_beside_the_machine_s() {
        let root = machine("0::/a\n", UNIFIED, &[]);
        assert_eq!(pressure(root.path()), None);
        let folder = root.path().join("sys/fs/cgroup/a");
        fs::create_dir_all(&folder).unwrap();
        let text = "some avg10=60.00 avg60=0 avg300=0 total=1\nfull avg10=45.00 avg60=0 avg300=0 total=1\n";
        fs::write(folder.join("memory.pressure"), text).unwrap();
        assert_eq!(pressure(root.path()).map(|pressure| pressure.full), Some(45.0));
    }
}
