//! Reference outputs of mlx-lm for the engine's test `exactness`: cached for as long as the script and its
//! MLX are unchanged. Not here: the comparison.

use std::{ffi::OsString, fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use crate::{
    mlx::{self, MLX_VERSION, Prepared, cache_dir},
    python::Python,
    step::fingerprint,
};

const ORACLE: &str = "engine/tests/oracle.py";
/// Written when all variants are there.
const MARK: &str = "complete";

/// Runs mlx-lm unless its outputs are cached, and returns the variables by which the engine's test
/// `exactness` finds them.
pub fn oracle(python: &Python) -> Result<Vec<(String, OsString)>> {
    let script =
        fs::read(ORACLE).with_context(|| format!("read {ORACLE}; run this in the workspace's root"))?;
    let folder = cache_dir()?.join(format!("oracle-{MLX_VERSION}-{:016x}", fingerprint(&script)));
    if !folder.join(MARK).exists() {
        println!(
            "exactness: asking mlx-lm, alone and sharded (once for each version of {ORACLE}, some minutes)"
        );
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        let status = python.command().arg(ORACLE).arg(&folder).env("OPENBLAS_NUM_THREADS", "1").status()?;
        ensure!(status.success(), "{ORACLE} ended with {status}");
        fs::write(folder.join(MARK), "")?;
    }
    same_library(&mlx::prepare()?, &python.interpreter())?;
    Ok(vec![("RUSSET_ORACLE".to_owned(), folder.into())])
}

/// Both sides have to run the same kernels: the engine's library and the oracle's are the same file.
fn same_library(prepared: &Prepared, interpreter: &Path) -> Result<()> {
    let Some(ours) = prepared.libmlx_dir().map(|dir| dir.join("libmlx.so")) else {
        return Ok(());
    };
    let probe =
        "import mlx.core, pathlib; print(pathlib.Path(mlx.core.__file__).parent / 'lib' / 'libmlx.so')";
    let output = Command::new(interpreter).args(["-c", probe]).output()?;
    let theirs = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(
        fs::read(&ours)?
            == fs::read(&theirs).with_context(|| format!("read the oracle's library {theirs:?}"))?,
        "{} and {theirs} differ, so the comparison would mean nothing; delete both folders and prepare again",
        ours.display()
    );
    Ok(())
}
