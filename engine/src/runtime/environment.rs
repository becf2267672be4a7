//! Environment variables that MLX and OpenBLAS read. Adding one in a process with threads is not sound, and
//! OpenBLAS reads its own when it is loaded, so all of them exist before the process starts: set by the
//! parent process, or by [`ensure`]. Values that differ between groups are overwritten when joining, by
//! `russet_mlx`.

use std::{
    ffi::OsString,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
};

use crate::jaccl::Topology;

/// MLX's variable for the rank in the group being joined.
pub(super) const RANK: &str = "MLX_RANK";
/// MLX's variable for the path of the ring's hostfile.
pub(super) const HOSTFILE: &str = "MLX_HOSTFILE";
/// MLX's variable for the path of the file with a stage's RDMA devices.
pub(super) const DEVICES: &str = "MLX_IBV_DEVICES";
/// MLX's variable for the address at which tensor rank 0 of a stage exchanges the keys of RDMA queues.
const COORDINATOR: &str = "MLX_JACCL_COORDINATOR";
/// If it exists, jaccl assumes a ring topology.
const JACCL_RING: &str = "MLX_JACCL_RING";
/// MLX's variable for whether the GPU polls for the result of a collective.
const FAST_FENCE: &str = "MLX_METAL_FAST_SYNCH";
/// OpenBLAS's variable for the kernels to use.
const KERNELS: &str = "OPENBLAS_CORETYPE";

/// What MLX reads for a rank in a group of more than one.
#[derive(Clone, Debug)]
pub struct MlxEnvironment {
    /// The rank in the whole group.
    pub rank: u32,
    /// Path prefix of its files for MLX, which get other extensions.
    pub files: PathBuf,
    /// Coordinator address of its stage (tensor rank 0) and cable topology, with RDMA.
    pub jaccl: Option<(SocketAddr, Topology)>,
    /// Whether the GPU polls for the result of a collective: faster, and known to wedge it occasionally.
    pub fast_fence: bool,
}

/// Variables that the process of a rank needs; `place` is `None` for a single rank.
pub fn variables(place: Option<&MlxEnvironment>) -> Vec<(&'static str, OsString)> {
    let mut variables = Vec::new();
    if let Some(MlxEnvironment { rank, files, jaccl, fast_fence }) = place {
        // Set either way: the inherited value was not meant for this group.
        variables.push((FAST_FENCE, if *fast_fence { "1" } else { "0" }.into()));
        variables.push((RANK, rank.to_string().into()));
        variables.push((HOSTFILE, files.with_extension("ring.json").into()));
        if let Some((coordinator, topology)) = jaccl {
            variables.push((DEVICES, files.with_extension("devices.json").into()));
            variables.push((COORDINATOR, coordinator.to_string().into()));
            if *topology == Topology::Ring {
                variables.push((JACCL_RING, "1".into()));
            }
        }
    }
    // A user's own choice of kernels stays.
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    match (std::env::var_os(KERNELS), openblas_kernels(&cpuinfo)) {
        (Some(chosen), _) => variables.push((KERNELS, chosen)),
        (None, Some(kernels)) => variables.push((KERNELS, kernels.into())),
        (None, None) => {}
    }
    variables
}

/// Ensures that this process has its [`variables`]; if one is missing, re-execs the process with all of them
/// set (same pid, same arguments). Call it first in main. Returns only with the variables in place or with an
/// error.
pub fn ensure(place: Option<&MlxEnvironment>) -> io::Result<()> {
    use std::os::unix::process::CommandExt;
    let variables = variables(place);
    if variables.iter().all(|(name, value)| std::env::var_os(name).as_ref() == Some(value)) {
        return Ok(());
    }
    Err(Command::new(std::env::current_exe()?).args(std::env::args_os().skip(1)).envs(variables).exec())
}

/// The path in a variable that the parent process has set.
pub(super) fn file_from_variable(variable: &str) -> Result<PathBuf, String> {
    std::env::var_os(variable)
        .map(PathBuf::from)
        .ok_or_else(|| format!("{variable} is not set; prepare the process with environment::ensure"))
}

/// Writes a file for MLX.
pub(super) fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// The OpenBLAS kernels for the instruction sets that `/proc/cpuinfo` lists. OpenBLAS goes by the model of
/// the processor, and takes its oldest kernels, five times slower, for a model newer than itself.
fn openblas_kernels(cpuinfo: &str) -> Option<&'static str> {
    let flags: Vec<&str> =
        cpuinfo.lines().find(|line| line.starts_with("flags"))?.split_ascii_whitespace().collect();
    let all = |required: &[&str]| required.iter().all(|flag| flags.contains(flag));
    if all(&["avx512f", "avx512dq", "avx512bw", "avx512vl"]) {
        Some("SkylakeX")
    } else if all(&["avx2", "fma"]) {
        Some("Haswell")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_follow_the_instruction_sets() {
        for (cpuinfo, kernels) in [
            ("model name : New\nflags : sse avx2 fma avx512f avx512dq avx512bw avx512vl\n", Some("SkylakeX")),
            ("flags : avx2 fma avx512f\n", Some("Haswell")),
            ("flags : sse2\n", None),
            ("", None),
        ] {
            assert_eq!(openblas_kernels(cpuinfo), kernels, "{cpuinfo}");
        }
    }

    #[test]
    fn mlx_variables_are_set_only_for_groups_that_need_them() {
        let named = |place: Option<&MlxEnvironment>| -> Vec<(&'static str, String)> {
            variables(place)
                .into_iter()
                .filter(|(name, _)| *name != KERNELS)
                .map(|(name, value)| (name, value.into_string().unwrap()))
                .collect()
        };
        assert_eq!(named(None), []);
        let files = PathBuf::from("/run/shard.sock");
        let mut place = MlxEnvironment { rank: 2, files, jaccl: None, fast_fence: false };
        let ring = [
            (FAST_FENCE, "0".to_owned()),
            (RANK, "2".to_owned()),
            (HOSTFILE, "/run/shard.ring.json".to_owned()),
        ];
        assert_eq!(named(Some(&place)), ring);
        let coordinator = "192.0.2.7:4000".parse().unwrap();
        let jaccl =
            [(DEVICES, "/run/shard.devices.json".to_owned()), (COORDINATOR, "192.0.2.7:4000".to_owned())];
        place.jaccl = Some((coordinator, Topology::Mesh));
        assert_eq!(named(Some(&place)), [&ring[..], &jaccl].concat());
        place.fast_fence = true;
        assert_eq!(named(Some(&place))[0], (FAST_FENCE, "1".to_owned()));
        place.fast_fence = false;
        place.jaccl = Some((coordinator, Topology::Ring));
        assert_eq!(named(Some(&place)), [&ring[..], &jaccl, &[(JACCL_RING, "1".to_owned())]].concat());
    }
}
