//! Peers that are built from Go modules, once per version, in the user's cache folder. The product
//! never needs them.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::mlx::cache_dir;

/// The Kubernetes release whose clients are the measure.
const KUBERNETES: &str = "1.36.3";

/// kubectl's own entry point, which its module does not ship as a program.
const KUBECTL_MAIN: &str = r#"package main

import (
	"k8s.io/component-base/cli"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
)

func main() {
	if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
}
"#;

/// kubectl of [`KUBERNETES`], built when it is not there.
pub fn kubectl() -> Result<PathBuf> {
    let minor = KUBERNETES.trim_start_matches("1.");
    let module = format!(
        "module russet.dev/oracle/kubectl\n\ngo 1.26\n\nrequire (\n\tk8s.io/component-base v0.{minor}\n\tk8s.io/kubectl v0.{minor}\n)\n"
    );
    let folder = cache_dir()?.join(format!("kubectl-{KUBERNETES}"));
    let program = folder.join("kubectl");
    if program.exists() {
        return Ok(program);
    }
    println!("▸ building kubectl {KUBERNETES} from its Go modules (once, some minutes)");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("go.mod"), module)?;
    std::fs::write(folder.join("main.go"), KUBECTL_MAIN)?;
    let stamp = format!("-s -w -X k8s.io/component-base/version.gitVersion=v{KUBERNETES}");
    // Built aside and renamed, so that a killed build leaves nothing that looks finished.
    for step in [vec!["mod", "tidy"], vec!["build", "-ldflags", &stamp, "-o", "kubectl.part", "."]] {
        let status = Command::new("go")
            .args(&step)
            .current_dir(&folder)
            .status()
            .context("cannot run go; install Go 1.26 or newer to build the oracles")?;
        ensure!(status.success(), "go {} ended with {status}", step.join(" "));
    }
    std::fs::rename(folder.join("kubectl.part"), &program)?;
    Ok(program)
}
