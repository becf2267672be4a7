//! Samples as GitOps applies them: `kubectl apply -k` and Flux's own kustomize-controller, both of which use
//! kstatus for readiness and prune. The samples name real models; the overlays use the smoke model instead.
//! Without the programs, which `cargo xtask oracle` builds, nothing runs, which the oracle suites do not
//! accept.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::{TestCluster, repository};
use russet_tests::flux::Flux;
use russet_tests::processes::{oracle, tail};

use crate::path::answers;

/// Folder of the overlays in the repository.
const OVERLAYS: &str = "tests/e2e/overlays";

fn missing(variable: &str) -> Result<bool> {
    let missing = oracle(variable).is_err();
    if missing {
        ensure!(std::env::var_os("RUSSET_ORACLES").is_none(), "{variable} is not set in an oracle suite");
        println!("  skipped: {variable} is not set; `cargo xtask oracle e2e` builds what this needs");
    }
    Ok(missing)
}

/// All user-written objects of the namespace.
async fn user_objects(cluster: &TestCluster) -> Result<Vec<String>> {
    let kinds = "models,modeldeployments,modelroutes,accesskeys";
    let text = cluster.kubectl()?.run(&["get", kinds, "-o", "name"]).await?;
    Ok(text.lines().map(str::to_owned).collect())
}

async fn until_written(cluster: &mut TestCluster, expected: &[&str]) -> Result<()> {
    cluster
        .until(&format!("{expected:?} and nothing else"), async |cluster| {
            let mut names = user_objects(cluster).await?;
            names.iter_mut().for_each(|name| *name = name.replace(".russet.dev", ""));
            names.sort();
            let mut expected: Vec<&str> = expected.to_vec();
            expected.sort_unstable();
            Ok(names == expected)
        })
        .await
}

/// Deletes earlier objects, so that only the samples remain.
async fn clear(cluster: &mut TestCluster) -> Result<()> {
    let kinds = "modelroutes,modeldeployments,models,accesskeys";
    cluster.kubectl()?.run(&["delete", kinds, "--all", "--timeout=100s"]).await?;
    until_written(cluster, &[]).await
}

/// `kubectl apply -k`, with an ApplySet that prunes, and `kubectl delete -k`.
pub async fn kubectl(cluster: &mut TestCluster) -> Result<()> {
    if missing("RUSSET_KUBECTL")? {
        return Ok(());
    }
    clear(cluster).await?;
    let kubectl = cluster.kubectl()?;
    let overlay = |name: &str| repository().join(OVERLAYS).join(name).display().to_string();
    let apply = |name: &str| {
        let words =
            ["apply", "-n", "default", "--server-side", "--applyset=configmaps/samples", "--prune", "-k"];
        words.map(str::to_owned).into_iter().chain([overlay(name)]).collect::<Vec<String>>()
    };
    for (name, expected, model) in [
        ("one-mac", &["model/qwen3-4b", "modeldeployment/qwen3-4b", "modelroute/chat"][..], "gpt-4o"),
        ("two-macs", &["model/qwen3-32b", "modeldeployment/qwen3-32b"][..], "qwen3-32b"),
    ] {
        let arguments = apply(name);
        kubectl.run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).await?;
        until_written(cluster, expected).await?;
        let mut wait = vec!["wait", "--for=condition=Ready", "--timeout=120s"];
        wait.extend(expected);
        kubectl.run(&wait).await?;
        answers(cluster, model).await?;
    }
    kubectl.run(&["delete", "-k", &overlay("two-macs"), "--timeout=100s"]).await?;
    until_written(cluster, &[]).await?;
    kubectl.run(&["delete", "configmap", "samples"]).await.map(|_| ())
}

/// Flux's kustomize-controller follows a repository through revisions and paths.
pub async fn flux(cluster: &mut TestCluster) -> Result<()> {
    if missing("RUSSET_KUBECTL")? || missing("RUSSET_FLUX_KUSTOMIZE")? {
        return Ok(());
    }
    clear(cluster).await?;
    let folder = tempfile::tempdir()?;
    let work = folder.path().join("repository");
    for part in ["manifests/samples", OVERLAYS] {
        copy(&repository().join(part), &work.join(part))?;
    }
    let program = oracle("RUSSET_FLUX_KUSTOMIZE")?;
    let logs = folder.path().join("flux");
    let mut flux = Flux::start(program, cluster.kubectl()?, &cluster.kubeconfig(), &logs).await?;
    let outcome = follow(cluster, &mut flux, &work).await;
    let outcome = outcome.map_err(|error| error.context(format!("Flux's log:\n{}", tail(&flux.log(), 30))));
    let stopped = flux.stop().await;
    outcome.and(stopped)
}

async fn follow(cluster: &mut TestCluster, flux: &mut Flux, work: &Path) -> Result<()> {
    flux.publish(work).await?;
    for (name, expected, model) in [
        ("one-mac", &["model/qwen3-4b", "modeldeployment/qwen3-4b", "modelroute/chat"][..], Some("gpt-4o")),
        ("two-macs", &["model/qwen3-32b", "modeldeployment/qwen3-32b"][..], Some("qwen3-32b")),
        ("tensor-pair", &["model/llama-3-70b", "modeldeployment/llama-3-70b"][..], Some("llama-3-70b")),
        (
            "access-key",
            &["accesskey/editor", "model/qwen3-4b", "modeldeployment/qwen3-4b", "modelroute/chat"][..],
            None,
        ),
    ] {
        flux.reconcile(&format!("./{OVERLAYS}/{name}")).await?;
        until_ready(cluster, flux, name).await?;
        until_written(cluster, expected).await?;
        if let Some(model) = model {
            answers(cluster, model).await?;
        }
    }
    // Deleting a file from the repository deletes its objects, and no others.
    let list = work.join("manifests/samples/access-key/kustomization.yaml");
    std::fs::write(&list, std::fs::read_to_string(&list)?.replace("- key.yaml\n", ""))?;
    std::fs::remove_file(work.join("manifests/samples/access-key/key.yaml"))?;
    flux.publish(work).await?;
    until_ready(cluster, flux, "access-key without its key").await?;
    until_written(cluster, &["model/qwen3-4b", "modeldeployment/qwen3-4b", "modelroute/chat"]).await?;
    cluster
        .until("the gateway answers without keys again", async |cluster| {
            Ok(answers(cluster, "qwen3-4b").await.is_ok())
        })
        .await?;
    flux.remove().await?;
    until_written(cluster, &[]).await
}

async fn until_ready(cluster: &mut TestCluster, flux: &Flux, name: &str) -> Result<()> {
    cluster.until(&format!("Flux finds {name} ready"), async |_| flux.is_ready().await).await
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from).with_context(|| format!("{}", from.display()))? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
