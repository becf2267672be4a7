//! Runs the engine against mlx-lm: the oracle's answers first, kept for as long as its script and its MLX
//! are the same, then the engine's test that compares. It judges nothing itself.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use crate::{
    mlx::{MLX_VERSION, Prepared, cache_dir},
    python,
};

const ORACLE: &str = "engine/tests/oracle.py";
/// Written when every variant is there.
const MARK: &str = "complete";

/// Compares the engine with the oracle; an error means that they differ or that a part could not run.
pub fn run(prepared: &Prepared) -> Result<()> {
    let script = fs::read(ORACLE).with_context(|| format!("read {ORACLE}; run this in the workspace's root"))?;
    let python = python::prepare()?;
    let folder = cache_dir()?.join(format!("oracle-{MLX_VERSION}-{:016x}", fingerprint(&script)));
    if !folder.join(MARK).exists() {
        println!("exactness: asking mlx-lm (once for each version of {ORACLE}, about a minute)");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        let status = python.command().arg(ORACLE).arg(&folder).env("OPENBLAS_NUM_THREADS", "1").status()?;
        ensure!(status.success(), "{ORACLE} ended with {status}");
        fs::write(folder.join(MARK), "")?;
    }
    same_library(prepared, &python.interpreter())?;

    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(prepared.cargo_args())
        .args(["test", "--package", "russet-engine", "--test", "exactness"])
        .env("RUSSET_ORACLE", &folder)
        .status()?;
    ensure!(status.success(), "the engine differs from mlx-lm, see above");
    Ok(())
}

/// Both sides have to run the same kernels: the engine's library and the oracle's are the same file.
fn same_library(prepared: &Prepared, interpreter: &Path) -> Result<()> {
    let Some(ours) = prepared.libmlx_dir().map(|dir| dir.join("libmlx.so")) else {
        return Ok(());
    };
    let probe = "import mlx.core, pathlib; print(pathlib.Path(mlx.core.__file__).parent / 'lib' / 'libmlx.so')";
    let output = Command::new(interpreter).args(["-c", probe]).output()?;
    let theirs = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(
        fs::read(&ours)? == fs::read(&theirs).with_context(|| format!("read the oracle's library {theirs:?}"))?,
        "{} and {theirs} differ, so the comparison would mean nothing; delete both folders and prepare again",
        ours.display()
    );
    Ok(())
}

/// FNV-1a: names a folder, guards nothing.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
