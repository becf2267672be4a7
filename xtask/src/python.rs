//! Prepares the Python that oracles, SDK tests and the smoke model's scripts run in: one virtual
//! environment per list of pins, in the user's cache folder.
//!
//! It serves tests and tools only: no shipped part of Russet runs Python, and nothing for GPUs is installed.
//! A killed run leaves nothing that a later run would trust: the environment is valid once its last file, the
//! mark, is written.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::mlx::{MLX_VERSION, cache_dir};
use crate::step::{fingerprint, run};

/// The release of the OpenAI SDK that tests use, and whose own tests run against the gateway.
pub const OPENAI_VERSION: &str = "3.52.0";
/// The oldest Python the pinned packages have wheels for.
const OLDEST: (u32, u32) = (3, 10);
/// Tried in this order; the first that is new enough and can create environments is used.
const CANDIDATES: &[&str] = &["python3", "python3.13", "python3.12", "python3.11", "python3.10"];
/// Written last.
const MARK: &str = "russet-ready";

/// The pinned packages. Their dependencies are left to pip: no result depends on them.
fn pins() -> String {
    format!(
        "mlx=={MLX_VERSION}\n\
         mlx-cpu=={MLX_VERSION}; sys_platform == \"linux\"\n\
         mlx-lm=={MLX_VERSION}\n\
         transformers==5.23.0\n\
         numpy>=2,<3\n\
         safetensors==0.8.0\n\
         gguf==0.19.0\n\
         openai=={OPENAI_VERSION}\n\
         anthropic==2.14.0\n\
         ollama==0.6.3\n"
    )
}

/// A prepared environment.
#[derive(Clone, Debug)]
pub struct Python {
    home: PathBuf,
}

impl Python {
    /// The interpreter.
    pub fn interpreter(&self) -> PathBuf {
        self.home.join("bin/python3")
    }

    /// Folder of the programs that packages install.
    pub fn programs(&self) -> PathBuf {
        self.home.join("bin")
    }

    /// A command that runs the interpreter, with fast arithmetic where this machine has OpenBLAS.
    ///
    /// The MLX wheel for Linux ships reference BLAS, 25 times slower: OpenBLAS's symbols win when it
    /// is loaded first.
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.interpreter());
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("HF_HUB_OFFLINE", "1");
        if let Some(library) = openblas() {
            command.env("LD_PRELOAD", library);
            if std::env::var_os("OPENBLAS_CORETYPE").is_none()
                && let Some(kernels) =
                    fs::read_to_string("/proc/cpuinfo").ok().as_deref().and_then(openblas_kernels)
            {
                command.env("OPENBLAS_CORETYPE", kernels);
            }
        }
        command
    }
}

/// The OpenBLAS kernels that fit a processor, from the text of `/proc/cpuinfo`.
///
/// OpenBLAS selects them by processor model, and uses its oldest (SSE) ones for a model newer than itself:
/// Debian 12's 0.3.21 does so on Sapphire Rapids, at a fifth of the speed. The instruction sets that the
/// kernel lists do not have this problem.
pub fn openblas_kernels(cpuinfo: &str) -> Option<&'static str> {
    let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags"))?;
    let has = |required: &[&str]| {
        required.iter().all(|flag| flags.split_ascii_whitespace().any(|word| word == *flag))
    };
    if has(&["avx512f", "avx512dq", "avx512bw", "avx512vl"]) {
        Some("SkylakeX")
    } else if has(&["avx2", "fma"]) {
        Some("Haswell")
    } else {
        None
    }
}

/// Path of OpenBLAS in distributions; the loader is not asked, since a preload that it cannot find makes it
/// complain in every child.
fn openblas() -> Option<PathBuf> {
    let folders = [
        format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH),
        "/usr/lib64".to_owned(),
        "/usr/lib".to_owned(),
    ];
    folders.iter().map(|folder| Path::new(folder).join("libopenblas.so.0")).find(|library| library.exists())
}

/// Creates the environment of the tests; a second run finds it ready and returns at once.
pub fn prepare() -> Result<Python> {
    environment(&format!("mlx-lm {MLX_VERSION} and the OpenAI SDK"), &pins())
}

/// Creates an environment with `pins`; `what` describes it in messages.
pub fn environment(what: &str, pins: &str) -> Result<Python> {
    let (base, version) = find_base()?;
    let cache = cache_dir()?;
    fs::create_dir_all(&cache).with_context(|| format!("create {}", cache.display()))?;
    let name = format!("python-{}.{}-{:016x}", version.0, version.1, fingerprint(pins.as_bytes()));
    let home = cache.join(&name);
    if home.join(MARK).exists() {
        return Ok(Python { home });
    }

    // Two runs at once would write one folder; the second waits here and then finds it done.
    let lock = fs::File::create(cache.join(format!("{name}.lock")))?;
    lock.lock().with_context(|| format!("lock {}", cache.display()))?;
    if !home.join(MARK).exists() {
        println!("python: preparing {what} (once, about half a minute)");
        // Created in place, not aside and renamed: an environment's scripts contain its absolute path.
        let _ = fs::remove_dir_all(&home);
        run(
            Command::new(base).args(["-m", "venv"]).arg(&home),
            "make a virtual environment (needs the venv module: apt-get install python3-venv)",
        )?;
        let requirements = home.join("requirements.txt");
        fs::write(&requirements, pins)?;
        run(
            Command::new(home.join("bin/python3"))
                .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"])
                .arg(&requirements),
            "install the Python packages (needs PyPI or a mirror of it)",
        )?;
        fs::write(home.join(MARK), "")?;
    }
    Ok(Python { home })
}

/// The first usable Python of this machine, and its version.
fn find_base() -> Result<(&'static str, (u32, u32))> {
    let mut seen = Vec::new();
    for candidate in CANDIDATES {
        let probe = "import sys, venv, ensurepip; print(*sys.version_info[:2])";
        let Ok(output) = Command::new(candidate).args(["-c", probe]).output() else {
            continue;
        };
        let text = String::from_utf8_lossy(&output.stdout);
        match parse_version(&text) {
            Some(version) if version >= OLDEST => return Ok((candidate, version)),
            Some((major, minor)) => seen.push(format!("{candidate} is {major}.{minor}")),
            None => seen.push(format!("{candidate} lacks venv or ensurepip")),
        }
    }
    bail!(
        "no Python of at least {}.{} with the venv module ({}); on Debian: apt-get install python3 python3-venv",
        OLDEST.0,
        OLDEST.1,
        if seen.is_empty() { "no python3 on the PATH".to_owned() } else { seen.join(", ") }
    )
}

fn parse_version(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.trim().split_once(' ')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_follow_the_instruction_sets_not_the_model_name() {
        for (cpuinfo, kernels) in [
            (
                "model name\t: New\nflags\t\t: sse avx2 fma avx512f avx512dq avx512bw avx512vl\n",
                Some("SkylakeX"),
            ),
            ("flags\t\t: sse avx2 fma avx512f\n", Some("Haswell")),
            ("flags\t\t: sse sse2\n", None),
            ("Features\t: fp asimd\n", None),
        ] {
            assert_eq!(openblas_kernels(cpuinfo), kernels, "{cpuinfo}");
        }
    }

    #[test]
    fn a_python_without_venv_prints_no_version() {
        assert_eq!(parse_version("3 11\n"), Some((3, 11)));
        assert_eq!(parse_version(""), None);
    }

    #[test]
    fn a_changed_pin_changes_the_folder() {
        assert_ne!(fingerprint(b"mlx==0.32.2\n"), fingerprint(b"mlx==0.32.3\n"));
    }
}
