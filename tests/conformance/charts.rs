//! Helm with both charts: what they reject, what they install on the real API server, what an upgrade and an
//! uninstallation preserve, and their installation on the embedded server.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use russet_tests::cluster::repository;
use russet_tests::control_plane::kubernetes::KubernetesControlPlane;
use russet_tests::processes::oracle;
use russet_tests::tool::Tool;
use serde_json::Value;

use crate::ConformanceBench;

fn chart(name: &str) -> String {
    repository().join("charts").join(name).display().to_string()
}

fn has(text: &str, words: &[&str]) -> Result<()> {
    for word in words {
        ensure!(text.contains(word), "\"{word}\" is missing in:\n{text}");
    }
    Ok(())
}

/// The real control plane, shared by the trials that need one, and the runtime of its processes.
struct RealCluster {
    runtime: tokio::runtime::Runtime,
    plane: Option<KubernetesControlPlane>,
    _folder: tempfile::TempDir,
}

impl RealCluster {
    fn start() -> Result<Self> {
        let runtime = tokio::runtime::Runtime::new()?;
        let folder = tempfile::Builder::new().prefix("russet-charts-").tempdir()?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let address = std::net::Ipv4Addr::LOCALHOST.into();
        let plane =
            runtime.block_on(KubernetesControlPlane::bare(address, port, &folder.path().join("plane")))?;
        Ok(Self { runtime, plane: Some(plane), _folder: folder })
    }

    fn run(&self, step: impl AsyncFnOnce(&KubernetesControlPlane) -> Result<()>) -> Result<()> {
        let plane = self.plane.as_ref().context("the control plane is gone")?;
        self.runtime.block_on(step(plane))
    }
}

impl Drop for RealCluster {
    fn drop(&mut self) {
        // Its processes end when it is dropped, which needs the runtime.
        let _guard = self.runtime.enter();
        drop(self.plane.take());
    }
}

/// Every trial; `bench` is the embedded control plane.
pub fn trials(bench: &Arc<Mutex<ConformanceBench>>) -> Result<Vec<Trial>> {
    let real = Arc::new(Mutex::new(RealCluster::start()?));
    let mut trials = Vec::new();
    for (name, step) in [
        ("charts::helm_lints_both_charts", lint as fn() -> Result<()>),
        ("charts::values_that_make_no_sense_are_refused_by_name", refused),
        ("charts::another_namespace_is_refused", namespace),
        ("charts::dashboard_and_alerts_equal_the_files_and_are_optional", board_and_alerts),
    ] {
        trials.push(Trial::test(name, move || step().map_err(|error| format!("{error:#}").into())));
    }
    type ChartStep =
        for<'a> fn(&'a KubernetesControlPlane) -> futures::future::LocalBoxFuture<'a, Result<()>>;
    let steps: [(&str, ChartStep); 5] = [
        ("charts::the_charts_install_and_their_pods_are_restricted", |plane| Box::pin(install(plane))),
        ("charts::the_kinds_upgrade_in_place_and_outlive_their_chart", |plane| Box::pin(upgrade(plane))),
        ("charts::service_accounts_may_do_what_they_need_and_no_more", |plane| Box::pin(rights(plane))),
        ("charts::view_and_edit_reach_our_kinds", |plane| Box::pin(people(plane))),
        ("charts::uninstalling_leaves_models_and_nodes", |plane| Box::pin(uninstall(plane))),
    ];
    for (name, step) in steps {
        let real = real.clone();
        trials.push(Trial::test(name, move || {
            let real = real.lock().unwrap_or_else(PoisonError::into_inner);
            real.run(async |plane| step(plane).await).map_err(|error| format!("{error:#}").into())
        }));
    }
    let bench = bench.clone();
    trials.push(Trial::test("charts::embedded_server_gets_only_roles_and_models_of_the_chart", move || {
        let bench = bench.lock().unwrap_or_else(PoisonError::into_inner);
        embedded(&bench).map_err(|error| format!("{error:#}").into())
    }));
    Ok(trials)
}

/// Runs Helm where no server is needed.
fn helm(arguments: &[&str]) -> Result<(bool, String)> {
    let output = std::process::Command::new(oracle("RUSSET_HELM")?)
        .args(arguments)
        .env("KUBECONFIG", "/nowhere")
        .output()?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

fn lint() -> Result<()> {
    for name in ["russet-crds", "russet"] {
        let (ok, text) = helm(&["lint", "--strict", "--namespace", "russet-system", &chart(name)])?;
        ensure!(ok, "{text}");
    }
    Ok(())
}

fn refused() -> Result<()> {
    for (values, words) in [
        ("operator.replicas=many", &["replicas", "integer"][..]),
        ("gateway.port=70000", &["port", "65,535"]),
        ("image.digest=latest", &["digest", "pattern"]),
        ("gatway.enabled=false", &["gatway", "additional"]),
        ("models[0].name=x", &["models", "source"]),
        ("podMonitor.interval=often", &["interval", "pattern"]),
        ("prometheusRule.enabled=perhaps", &["enabled", "boolean"]),
        ("dashboard.folder=llm", &["folder", "additional"]),
        ("gateway.responsesStore.maxSize=much", &["maxsize", "pattern"]),
        ("gateway.responsesStore.enabled=true", &["gateway.replicas to 1"]),
        ("gateway.auditLog.enabled=true", &["gateway.responsesstore.enabled to true"]),
    ] {
        let (ok, text) = helm(&["template", "x", &chart("russet"), "-n", "russet-system", "--set", values])?;
        ensure!(!ok, "{values} was taken");
        let lower = text.to_lowercase();
        has(&lower, words).with_context(|| values.to_owned())?;
    }
    Ok(())
}

fn namespace() -> Result<()> {
    let (ok, text) = helm(&["template", "x", &chart("russet"), "-n", "elsewhere"])?;
    ensure!(!ok, "the chart went into another namespace");
    has(&text, &["--namespace russet-system"])
}

/// The inverse of a template applied to a file: nothing may be left.
fn board_and_alerts() -> Result<()> {
    let template = ["template", "x", &chart("russet"), "-n", "russet-system"];
    let (ok, text) = helm(&template)?;
    ensure!(ok && !text.contains("PrometheusRule") && !text.contains("grafana_dashboard"), "{text}");
    let values =
        "prometheusRule.enabled=true,prometheusRule.labels.release=monitoring,dashboard.enabled=true";
    let (ok, text) = helm(&[&template[..], &["--set", values]].concat())?;
    ensure!(ok, "{text}");
    let documents = text.split("\n---\n").filter(|document| document.contains("kind:"));
    let documents: Vec<Value> = documents.map(serde_norway::from_str).collect::<Result<_, _>>()?;
    let of = |kind: &str, name: &str| {
        let object = documents.iter().find(|it| it["kind"] == kind && it["metadata"]["name"] == name);
        object.with_context(|| format!("the chart brings no {kind} {name}"))
    };
    let file = |path: &str| std::fs::read_to_string(Path::new(&chart("russet")).join(path));
    let rule = of("PrometheusRule", "russet")?;
    ensure!(rule["spec"] == serde_norway::from_str::<Value>(&file("rules/russet.yaml")?)?, "{rule}");
    ensure!(rule["metadata"]["labels"]["release"] == "monitoring", "{rule}");
    let board = of("ConfigMap", "russet-dashboard")?;
    ensure!(board["metadata"]["labels"]["grafana_dashboard"] == "1", "{}", board["metadata"]);
    let shipped = board["data"]["russet.json"].as_str().context("the ConfigMap holds no board")?;
    ensure!(shipped == file("dashboards/russet.json")?.trim(), "the board is not the file's");
    Ok(())
}

/// With everything optional enabled, in a namespace that rejects pods that are not restricted.
async fn install(plane: &KubernetesControlPlane) -> Result<()> {
    plane.kubectl(&["create", "namespace", "russet-system"]).await?;
    let labels = ["warn", "enforce"].map(|mode| format!("pod-security.kubernetes.io/{mode}=restricted"));
    plane.kubectl(&["label", "namespace", "russet-system", &labels[0], &labels[1]]).await?;
    plane.install(&repository().join("charts"), 18080).await?;
    // A gateway with a store is one, and its volume claim is there; without, there may be more.
    let claim = plane.kubectl(&["-n", "russet-system", "get", "pvc", "-o", "name"]).await?;
    has(&claim, &["persistentvolumeclaim/russet-responses"])?;
    let more = "operator.replicas=2,networkPolicy.enabled=true,gateway.tls.secretName=from-cert-manager,\
                gateway.replicas=2,gateway.responsesStore.enabled=false,gateway.auditLog.enabled=false";
    plane.helm(&["upgrade", "russet", &chart("russet"), "--reuse-values", "--set", more]).await?;
    let claim = plane.kubectl(&["-n", "russet-system", "get", "pvc", "-o", "name"]).await?;
    has(&claim, &["persistentvolumeclaim/russet-responses"])
        .context("what was kept must outlive its switch")?;
    let budgets = plane.kubectl(&["-n", "russet-system", "get", "pdb,netpol,sa,svc", "-o", "name"]).await?;
    has(
        &budgets,
        &[
            "poddisruptionbudget.policy/russet-operator",
            "poddisruptionbudget.policy/russet-gateway",
            "networkpolicy.networking.k8s.io/russet-gateway",
            "serviceaccount/russet-gateway",
            "service/russet-gateway",
        ],
    )?;
    for component in ["operator", "gateway"] {
        // The same pod, created by hand: validated by the server, without a kubelet.
        let text = plane
            .kubectl(&[
                "-n",
                "russet-system",
                "get",
                "deployment",
                &format!("russet-{component}"),
                "-o",
                "jsonpath={.spec.template}",
            ])
            .await?;
        let mut pod: Value = serde_json::from_str(&text)?;
        pod["apiVersion"] = "v1".into();
        pod["kind"] = "Pod".into();
        pod["metadata"]["name"] = component.into();
        pod["metadata"]["namespace"] = "russet-system".into();
        let dry = ["create", "--dry-run=server", "-f", "-"];
        plane.kubectl_with(&dry, &pod.to_string()).await?;
        pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = true.into();
        let error = plane.kubectl_with(&dry, &pod.to_string()).await.err();
        let error = error.context("the check is blind: a pod that may escalate was taken")?;
        has(&format!("{error:#}"), &["PodSecurity", "allowPrivilegeEscalation"])?;
    }
    Ok(())
}

/// A newer chart adds a field; objects stay, also when the chart is uninstalled.
async fn upgrade(plane: &KubernetesControlPlane) -> Result<()> {
    let model = "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {name: kept}\nspec: {source: {uri: 'hf://russet/smoke'}}\n";
    plane.kubectl_with(&["apply", "-f", "-"], model).await?;
    let folder = tempfile::tempdir()?;
    let newer = folder.path().join("russet-crds");
    copy(Path::new(&chart("russet-crds")), &newer)?;
    replace(&newer.join("Chart.yaml"), "version: 0.1.0", "version: 0.2.0")?;
    let source = "            description: A model and its source.\n            properties:\n";
    replace(
        &newer.join("templates/models.yaml"),
        source,
        &format!("{source}              colour:\n                type: string\n"),
    )?;
    plane.helm(&["upgrade", "russet-crds", &newer.display().to_string()]).await?;
    plane
        .kubectl(&["patch", "model", "kept", "--type=merge", "-p", "{\"spec\":{\"colour\":\"red\"}}"])
        .await?;
    let colour = plane.kubectl(&["get", "model", "kept", "-o", "jsonpath={.spec.colour}"]).await?;
    ensure!(colour == "red", "the newer kind was not served: {colour:?}");
    plane.helm(&["uninstall", "russet-crds"]).await?;
    plane.kubectl(&["get", "model", "kept"]).await?;
    let back = ["upgrade", "--install", "russet-crds", &chart("russet-crds"), "--take-ownership"];
    plane.helm(&back).await?;
    plane.kubectl(&["get", "model", "kept"]).await.map(|_| ())
}

fn replace(path: &Path, from: &str, to: &str) -> Result<()> {
    let text = std::fs::read_to_string(path)?;
    ensure!(text.contains(from), "{} does not hold {from:?}", path.display());
    Ok(std::fs::write(path, text.replacen(from, to, 1))?)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy(&entry.path(), &target)?,
            false => drop(std::fs::copy(entry.path(), target)?),
        }
    }
    Ok(())
}

/// Least privilege, checked with the real server one permission at a time.
async fn rights(plane: &KubernetesControlPlane) -> Result<()> {
    let operator = "system:serviceaccount:russet-system:russet-operator";
    let gateway = "system:serviceaccount:russet-system:russet-gateway";
    for (who, question, expected) in [
        (operator, "patch shards.russet.dev -n default", true),
        (operator, "get secrets/russet-ca -n russet-system", true),
        (operator, "patch modeldeployments.russet.dev --subresource=scale -n default", true),
        (operator, "list secrets -n russet-system", false),
        (operator, "get secrets -n kube-system", false),
        (operator, "get secrets/other -n russet-system", false),
        (operator, "create pods -n russet-system", false),
        (operator, "create clusterrolebindings", false),
        (operator, "delete models.russet.dev -n default", false),
        (operator, "create tokenreviews", false),
        (operator, "impersonate users", false),
        (gateway, "list modeldeployments.russet.dev -A", true),
        (gateway, "watch models.russet.dev -A", true),
        (gateway, "list modelcopies.russet.dev", true),
        (gateway, "delete modeldeployments.russet.dev -n default", false),
        (gateway, "delete models.russet.dev -n default", false),
        (gateway, "patch modeldeployments.russet.dev --subresource=status -n default", true),
        (gateway, "patch modeldeployments.russet.dev -n default", false),
        (gateway, "patch modeldeployments.russet.dev --subresource=scale -n default", false),
        (gateway, "get secrets -n russet-system", false),
        (gateway, "create shards.russet.dev -n default", false),
    ] {
        let mut arguments = vec!["auth", "can-i", "--as", who];
        arguments.extend(question.split(' '));
        let may = plane.kubectl(&arguments).await.is_ok();
        ensure!(may == expected, "{who} {} {question}", if may { "may" } else { "may not" });
    }
    Ok(())
}

async fn people(plane: &KubernetesControlPlane) -> Result<()> {
    for (role, question, expected) in [
        ("view", "list modeldeployments.russet.dev -n default", true),
        ("view", "create modeldeployments.russet.dev -n default", false),
        ("view", "get accesskeys.russet.dev -n default", false),
        ("edit", "create modeldeployments.russet.dev -n default", true),
        ("edit", "create shards.russet.dev -n default", false),
        ("edit", "patch modeldeployments.russet.dev --subresource=scale -n default", true),
    ] {
        let user = format!("a-{role}er");
        let binding = format!("test-{role}");
        let make =
            ["create", "rolebinding", &binding, &format!("--clusterrole={role}"), &format!("--user={user}")];
        let _ = plane.kubectl(&[&make[..], &["-n", "default"]].concat()).await;
        let mut arguments = vec!["auth", "can-i", "--as", &user];
        arguments.extend(question.split(' '));
        // The controller manager aggregates roles a moment after they are created.
        let mut may = plane.kubectl(&arguments).await.is_ok();
        for _ in 0..100 {
            if may == expected {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            may = plane.kubectl(&arguments).await.is_ok();
        }
        ensure!(may == expected, "{user} {} {question}", if may { "may" } else { "may not" });
    }
    Ok(())
}

async fn uninstall(plane: &KubernetesControlPlane) -> Result<()> {
    plane.helm(&["uninstall", "russet"]).await?;
    let left = plane.kubectl(&["-n", "russet-system", "get", "deploy,svc,sa", "-o", "name"]).await?;
    ensure!(!left.contains("russet-operator"), "left behind: {left}");
    plane.kubectl(&["get", "model", "kept"]).await?;
    plane.install(&repository().join("charts"), 18080).await
}

/// Helm on the embedded server.
fn embedded(bench: &ConformanceBench) -> Result<()> {
    let kubeconfig = bench.folder().join("kubeconfig");
    let helm = Tool::new(oracle("RUSSET_HELM")?, &kubeconfig, bench.folder());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let run = |arguments: &[&str]| runtime.block_on(helm.run(arguments));
    let values = "controlPlane.enabled=false,models[0].name=by-helm,models[0].source.uri=hf://russet/smoke";
    let install =
        ["upgrade", "--install", "russet", &chart("russet"), "-n", "russet-system", "--set", values];
    has(&run(&install)?, &["STATUS: deployed", "Russet's own"])?;
    let deployment = bench.run(&["get", "mdeploy", "by-helm", "-o", "jsonpath={.spec.modelRef.name}"], "")?;
    ensure!(deployment == "by-helm", "the ModelDeployment names {deployment}");
    bench.refused(&["-n", "russet-system", "get", "deployments.apps"], "", &["deployments"])?;
    let more = format!("{values},models[0].replicas=0");
    run(&["upgrade", "russet", &chart("russet"), "-n", "russet-system", "--set", &more])?;
    let replicas = bench.run(&["get", "mdeploy", "by-helm", "-o", "jsonpath={.spec.replicas}"], "")?;
    ensure!(replicas == "0", "after the upgrade replicas are {replicas}");
    has(&run(&["history", "russet", "-n", "russet-system"])?, &["superseded", "deployed"])?;
    run(&["rollback", "russet", "1", "-n", "russet-system"])?;
    let replicas = bench.run(&["get", "mdeploy", "by-helm", "-o", "jsonpath={.spec.replicas}"], "")?;
    ensure!(replicas == "1", "after the rollback replicas are {replicas}");
    run(&["uninstall", "russet", "-n", "russet-system"])?;
    bench.refused(&["get", "mdeploy", "by-helm"], "", &["NotFound"])?;
    bench.run(&["get", "clusterrole", "russet-operator"], "").map(|_| ())
}
