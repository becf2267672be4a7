//! The variables that MLX and OpenBLAS read from the environment. Changing the environment of a process
//! with threads is not sound, and OpenBLAS reads its own when it is loaded, so they are set before the
//! process begins: by whoever starts it, or by [`ensure`].

use std::{ffi::OsString, io, path::Path, process::Command};

/// MLX's name for the rank.
pub(super) const RANK: &str = "MLX_RANK";
/// MLX's name for the file with the addresses of all ranks.
pub(super) const HOSTFILE: &str = "MLX_HOSTFILE";
/// OpenBLAS's name for the kernels to use.
const KERNELS: &str = "OPENBLAS_CORETYPE";

/// What the process of a rank has to find in its environment; `ring` is the rank and where its file of
/// addresses will be, in a group of more than one.
pub fn variables(ring: Option<(u32, &Path)>) -> Vec<(&'static str, OsString)> {
    let mut variables = Vec::new();
    if let Some((rank, hostfile)) = ring {
        variables.push((RANK, rank.to_string().into()));
        variables.push((HOSTFILE, hostfile.into()));
    }
    // A person's own choice of kernels stays.
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    match (std::env::var_os(KERNELS), openblas_kernels(&cpuinfo)) {
        (Some(chosen), _) => variables.push((KERNELS, chosen)),
        (None, Some(kernels)) => variables.push((KERNELS, kernels.into())),
        (None, None) => {}
    }
    variables
}

/// Makes sure that this process has its [`variables`]; if it lacks one, replaces the process by itself with
/// all of them set (same pid, same arguments). Call it first thing in main. It returns only with the
/// variables in place or with an error.
pub fn ensure(ring: Option<(u32, &Path)>) -> io::Result<()> {
    use std::os::unix::process::CommandExt;
    let variables = variables(ring);
    if variables.iter().all(|(name, value)| std::env::var_os(name).as_ref() == Some(value)) {
        return Ok(());
    }
    Err(Command::new(std::env::current_exe()?).args(std::env::args_os().skip(1)).envs(variables).exec())
}

/// The OpenBLAS kernels for the instruction sets that `/proc/cpuinfo` lists. OpenBLAS goes by the model of the
/// processor, and takes its oldest kernels, five times slower, for a model newer than itself.
fn openblas_kernels(cpuinfo: &str) -> Option<&'static str> {
    let flags: Vec<&str> =
        cpuinfo.lines().find(|line| line.starts_with("flags"))?.split_ascii_whitespace().collect();
    let all = |wanted: &[&str]| wanted.iter().all(|flag| flags.contains(flag));
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
    fn a_group_of_one_needs_no_ring() {
        assert!(variables(None).iter().all(|(name, _)| *name == KERNELS));
        let ring = variables(Some((2, Path::new("/run/hosts.json"))));
        assert!(ring.contains(&(RANK, "2".into())) && ring.contains(&(HOSTFILE, "/run/hosts.json".into())));
    }
}
