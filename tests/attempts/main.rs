//! Access control, tested by attempts: a node's client tries its own work, which must succeed, and other
//! actions, which must be rejected with 403 and a message that names the action. The server is that of
//! `KUBECONFIG` (an administrator's, of any Kubernetes) or the one that `RUSSET_CONTROL_PLANE` names, started
//! for the test: `embedded`, the default, or `kubernetes`, the real API server. Both of a node's identities
//! are tested: the user of its certificate, and its ServiceAccount. With an embedded control plane a second machine is
//! started, on which a tenant tries what it can on another one (`tenants`).

mod server;
mod table;
mod tenants;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use libtest_mimic::{Arguments, Failed, Trial};
use russet_tests::cluster::WAIT_TIMEOUT;
use serde_json::json;

use server::{AttemptServer, Request, RequestIdentity};
use table::{Attempt, NAMESPACE, OTHER_NODE, OVERPRIVILEGED_NODE, OWN_NODE};

/// Fixture of the trials.
struct AttemptFixture {
    server: AttemptServer,
    /// The clients of each node, by identity.
    identities: BTreeMap<(&'static str, &'static str), RequestIdentity>,
    csr: String,
    round: String,
}

const CERTIFICATE: &str = "certificate";
const ACCOUNT: &str = "service account";

impl AttemptFixture {
    async fn set_up(folder: &Path) -> Result<Self> {
        let server = AttemptServer::start(folder).await?;
        let round = format!("{:x}", std::process::id());
        let ensure_there = async |path: &str, object| -> Result<()> {
            server.must(&Request::apply(path, object)).await.map(drop)
        };
        ensure_there(
            &format!("/api/v1/namespaces/{NAMESPACE}"),
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
        )
        .await?;
        let russet = "/apis/russet.dev/v1alpha1";
        for (name, node) in [("mine", OWN_NODE), ("theirs", OTHER_NODE)] {
            ensure_there(&format!("{russet}/inferencenodes/{node}"), table::node(node)).await?;
            let shard = format!("{russet}/namespaces/{NAMESPACE}/shards/{name}");
            ensure_there(&shard, table::shard(name, node)).await?;
            let name = format!("attempt-{name}");
            ensure_there(&format!("{russet}/modelcopies/{name}"), table::copy(&name, node)).await?;
        }
        let mut identities = BTreeMap::new();
        for node in [OWN_NODE, OTHER_NODE, OVERPRIVILEGED_NODE] {
            let account = format!("/api/v1/namespaces/russet-nodes/serviceaccounts/{node}");
            let object = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": node}});
            ensure_there(&account, object).await?;
            let asked = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}});
            let token = server.must(&Request::create(&format!("{account}/token"), asked)).await?;
            let token = token["status"]["token"].as_str().context("the server gave no token")?;
            identities.insert((node, ACCOUNT), RequestIdentity::Token(token.to_owned()));
            let groups = ["russet:nodes", "system:authenticated"].map(str::to_owned).into();
            identities
                .insert((node, CERTIFICATE), RequestIdentity::User(format!("russet:node:{node}"), groups));
        }
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": "attempts-spoilt"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [
                {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": format!("russet:node:{OVERPRIVILEGED_NODE}")},
                {"kind": "ServiceAccount", "name": OVERPRIVILEGED_NODE, "namespace": "russet-nodes"},
            ],
        });
        let place = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/attempts-spoilt";
        ensure_there(place, binding).await?;
        let key = rcgen::KeyPair::generate()?;
        let request = rcgen::CertificateParams::new(Vec::<String>::new())?.serialize_request(&key)?;
        let csr = STANDARD.encode(request.pem()?);
        let stage = Self { server, identities, csr, round };
        stage.until_enforced().await?;
        Ok(stage)
    }

    /// A server of several processes takes a moment until installed rules are in force.
    async fn until_enforced(&self) -> Result<()> {
        let begin = Instant::now();
        let attempts = table::overprivileged_attempts(&self.csr, &self.round);
        let attempt = attempts.first().context("the table is empty")?;
        loop {
            let (code, body) =
                self.server.send(&self.identities[&(OVERPRIVILEGED_NODE, ACCOUNT)], &attempt.request).await?;
            if code == 403 && body["message"].as_str().is_some_and(|text| text.contains("russet-nodes")) {
                break;
            }
            if code.is_success() {
                self.server
                    .must(&Request::delete("/api/v1/namespaces/russet-system/secrets/attempt"))
                    .await?;
            }
            ensure!(begin.elapsed() < WAIT_TIMEOUT, "the policies are not in force: {code} {body}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Makes one attempt; the error is the difference to the expected response.
    async fn attempt(&self, who: &RequestIdentity, attempt: &Attempt, allowed: bool) -> Result<()> {
        let (code, body) = self.server.send(who, &attempt.request).await?;
        let message = body["message"].as_str().unwrap_or_default();
        if allowed {
            ensure!(code.is_success(), "to {} was refused: {code} {body}", attempt.what);
            return Ok(());
        }
        ensure!(code == 403, "to {} was answered with {code}: {body}", attempt.what);
        for word in &attempt.words {
            ensure!(
                message.contains(word.as_str()),
                "to {} was refused without “{word}”: {message}",
                attempt.what
            );
        }
        Ok(())
    }

    /// Makes an attempt whose response follows from an object that was just written. An embedded server decides
    /// by what is stored; the real one by its own watch of it, which is some milliseconds behind, so there the
    /// attempt is repeated until the response is the expected one.
    async fn attempt_after_write(
        &self,
        who: &RequestIdentity,
        attempt: &Attempt,
        allowed: bool,
    ) -> Result<()> {
        let begin = Instant::now();
        loop {
            let outcome = self.attempt(who, attempt, allowed).await;
            if outcome.is_ok() || self.server.is_embedded() || begin.elapsed() > WAIT_TIMEOUT {
                return outcome;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn all(&self, who: &RequestIdentity, attempts: Vec<Attempt>, allowed: bool) -> Result<()> {
        let mut wrong = Vec::new();
        let count = attempts.len();
        for attempt in attempts {
            let answer = match self.attempt(who, &attempt, allowed).await {
                Ok(()) if allowed => "allowed",
                Ok(()) => "refused",
                Err(error) => {
                    wrong.push(format!("{error:#}"));
                    "otherwise"
                }
            };
            // A row of `cargo xtask proof attempts`.
            println!("attempts | {} | {} | {answer}", who.name(), attempt.what);
        }
        if !wrong.is_empty() {
            bail!("{} of {count} attempts went otherwise:\n{}", wrong.len(), wrong.join("\n"));
        }
        println!("{count} attempts were {}", if allowed { "allowed" } else { "refused" });
        Ok(())
    }
}

/// A node can do its work, and nothing else.
async fn a_node_does_its_own_work_and_nothing_else(
    stage: &AttemptFixture,
    identity: &'static str,
) -> Result<()> {
    let who = &stage.identities[&(OWN_NODE, identity)];
    let round = format!("{}-{}", stage.round, &identity[..4]);
    stage.all(who, table::allowed_attempts(&stage.csr, &round), true).await?;
    let mut attempts = table::forbidden_attempts(&stage.csr, &round);
    if identity == ACCOUNT {
        attempts.extend(table::impersonation_attempts());
    }
    stage.all(who, attempts, false).await
}

/// An over-privileged role gives a node no more access.
async fn an_overprivileged_role_is_still_denied_by_policy(
    stage: &AttemptFixture,
    identity: &'static str,
) -> Result<()> {
    let who = &stage.identities[&(OVERPRIVILEGED_NODE, identity)];
    let round = format!("{}-{}-spoilt", stage.round, &identity[..4]);
    let signing = table::signing(&format!("attempt-{round}"), "russet.dev/node", &stage.csr);
    let place = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
    stage.server.must(&Request::create(place, signing)).await?;
    stage.all(who, table::overprivileged_attempts(&stage.csr, &round), false).await?;
    // It may not create its own node; if others create it, it may not label it either.
    let own = format!("/apis/russet.dev/v1alpha1/inferencenodes/{OVERPRIVILEGED_NODE}");
    stage.server.must(&Request::apply(&own, table::node(OVERPRIVILEGED_NODE))).await?;
    stage.attempt(who, &table::overprivileged_label_attempts(), false).await?;
    stage.server.must(&Request::delete(&own)).await?;
    Ok(())
}

/// Tenants name folders of machines only in namespaces that the administrator chose.
async fn a_namespace_names_folders_only_where_it_is_allowed(stage: &AttemptFixture) -> Result<()> {
    let who = &RequestIdentity::Admin;
    let create = |namespace: &str, uri: &str| {
        let path = format!("/apis/russet.dev/v1alpha1/namespaces/{namespace}/models?dryRun=All");
        let what = "name a source of a Model";
        Attempt {
            what,
            request: Request::create(&path, table::model("tenant", uri)),
            words: vec![
                "russet-file-sources".into(),
                format!(
                    "may not name folders of machines (file://); an administrator of the cluster may allow it: kubectl label namespace {namespace} "
                ),
            ],
        }
    };
    let folder = "file:///data/agent/models/of-another-namespace";
    stage.attempt_after_write(who, &create(NAMESPACE, folder), false).await?;
    stage.attempt(who, &create(NAMESPACE, "hf://owner/name"), true).await?;
    stage.attempt(who, &create("default", folder), true).await?;
    let path = format!("/api/v1/namespaces/{NAMESPACE}");
    let label = |value| json!({"metadata": {"labels": {"russet.dev/file-sources": value}}});
    for (value, allowed) in [(json!("denied"), false), (json!("allowed"), true), (json!(null), false)] {
        stage.server.must(&Request::merge(&path, label(value))).await?;
        stage.attempt_after_write(who, &create(NAMESPACE, folder), allowed).await?;
    }
    Ok(())
}

/// A node leaves by deleting its own object.
async fn a_node_may_remove_itself(stage: &AttemptFixture, identity: &'static str) -> Result<()> {
    let name = if identity == ACCOUNT { OTHER_NODE } else { OVERPRIVILEGED_NODE };
    let path = format!("/apis/russet.dev/v1alpha1/inferencenodes/{name}");
    stage.server.must(&Request::apply(&path, table::node(name))).await?;
    let leave = Attempt { what: "remove itself", request: Request::delete(&path), words: Vec::new() };
    stage.attempt(&stage.identities[&(name, identity)], &leave, true).await
}

fn main() -> Result<()> {
    let arguments = Arguments::from_args();
    let runtime = Arc::new(tokio::runtime::Builder::new_multi_thread().enable_all().build()?);
    let folder = tempfile::Builder::new().prefix("russet-attempts-").tempdir()?;
    let stage =
        if arguments.list { None } else { Some(runtime.block_on(AttemptFixture::set_up(folder.path()))?) };
    let stage = Arc::new(stage);
    let mut trials = Vec::new();
    // In this order: the last trials delete what the others need.
    for (name, number) in [
        ("a_node_does_its_own_work_and_nothing_else", 0),
        ("an_overprivileged_role_is_still_denied_by_policy", 1),
        ("a_node_may_remove_itself", 2),
    ] {
        for identity in [CERTIFICATE, ACCOUNT] {
            let (runtime, stage) = (runtime.clone(), stage.clone());
            trials.push(Trial::test(format!("{name} ({identity})"), move || {
                let stage = stage.as_ref().as_ref().ok_or("there is no server")?;
                let outcome = runtime.block_on(async {
                    match number {
                        0 => a_node_does_its_own_work_and_nothing_else(stage, identity).await,
                        1 => an_overprivileged_role_is_still_denied_by_policy(stage, identity).await,
                        _ => a_node_may_remove_itself(stage, identity).await,
                    }
                });
                outcome.map_err(|error| Failed::from(format!("{error:#}")))
            }));
        }
    }
    {
        let (runtime, stage) = (runtime.clone(), stage.clone());
        trials.push(Trial::test("a_namespace_names_folders_only_where_it_is_allowed", move || {
            let stage = stage.as_ref().as_ref().ok_or("there is no server")?;
            let outcome = runtime.block_on(a_namespace_names_folders_only_where_it_is_allowed(stage));
            outcome.map_err(|error| Failed::from(format!("{error:#}")))
        }));
    }
    let machine = match &*stage {
        Some(stage) if stage.server.is_embedded() => {
            let folder = folder.path().join("tenants");
            std::fs::create_dir(&folder)?;
            Some(runtime.block_on(tenants::start(&folder))?)
        }
        _ => None,
    };
    let machine = Arc::new(machine);
    for sequence in tenants::SEQUENCES.iter().filter(|_| arguments.list || machine.is_some()) {
        let (runtime, machine) = (runtime.clone(), machine.clone());
        trials.push(Trial::test(sequence.name, move || {
            let machine = machine.as_ref().as_ref().ok_or("there is no machine")?;
            let outcome = runtime.block_on((sequence.run)(machine));
            outcome.map_err(|error| Failed::from(format!("{error:#}\n{}", machine.logs())))
        }));
    }
    let conclusion = libtest_mimic::run(&Arguments { test_threads: Some(1), ..arguments }, trials);
    if let Some(machine) = Arc::into_inner(machine).flatten() {
        runtime.block_on(machine.stop())?;
    }
    if let Some(stage) = Arc::into_inner(stage).flatten() {
        runtime.block_on(stage.server.stop())?;
    }
    folder.close()?;
    conclusion.exit()
}
