//! `russet pipeline approve` and `deny`: shows a person what the step of a run is about to do, to the letter, and
//! writes the decision. Not here: how a decision is written ([`crate::approve`]).

use anyhow::{Context, Result, bail, ensure};
use jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use russet_crds::{Approval, ApprovalDecision};
use russet_rpc::list_item::ListItem;
use russet_telemetry::say;

use super::gateway_client::{GatewayClient, sha256};
use super::{text, width};
use crate::approve::{decide, is_open};
use crate::confirmation::confirm;
use crate::stdout::{out, outln};

/// Longest action that is shown. A gateway's texts have at most 4 MiB, and a call of an address has some of them.
const MAX_ACTION_BYTES: usize = 64 << 20;

/// Shows what a step is about to do, asks, and approves it.
pub async fn approve(
    client: Client,
    namespace: &str,
    gateway: &GatewayClient,
    run: &str,
    yes: bool,
) -> Result<()> {
    let approval = open(&client, namespace, run).await?;
    let name = approval.name_any();
    outln!(
        "Approval {name} of PipelineRun {namespace}/{run} asks:\n\n{}\n",
        text::block(&approval.spec.message, 0, width())
    )?;
    match action(gateway, &approval.spec.plan_hash).await? {
        Ok(action) => {
            outln!("This will be done (sha256:{}):\n", approval.spec.plan_hash)?;
            out!("{}\n\n", text::action(&action, width()))?;
        }
        Err(error) if yes => say!("What will be done could not be shown: {error:#}"),
        Err(error) => {
            return Err(error.context(format!(
                "what Approval {name} would allow could not be shown, so it is not approved; --yes approves it unseen"
            )));
        }
    }
    confirm("Approve this?", yes)?;
    let api: Api<Approval> = Api::namespaced(client.clone(), namespace);
    decide(client, &api, &approval, ApprovalDecision::Approved).await
}

/// Denies what a step is about to do.
pub async fn deny(client: Client, namespace: &str, run: &str) -> Result<()> {
    let approval = open(&client, namespace, run).await?;
    let api: Api<Approval> = Api::namespaced(client.clone(), namespace);
    decide(client, &api, &approval, ApprovalDecision::Denied).await
}

/// The open Approval of a run.
async fn open(client: &Client, namespace: &str, run: &str) -> Result<Approval> {
    let api: Api<ListItem<Approval>> = Api::namespaced(client.clone(), namespace);
    let all = api.list(&ListParams::default()).await.context("the Approvals could not be listed")?;
    let all: Vec<Approval> = all.items.into_iter().filter_map(|approval| approval.0.ok()).collect();
    find_open(&all, namespace, run, Timestamp::now()).cloned()
}

/// The one Approval of a run that still may be decided.
fn find_open<'list>(
    all: &'list [Approval],
    namespace: &str,
    run: &str,
    now: Timestamp,
) -> Result<&'list Approval> {
    let pending = all.iter().filter(|one| one.spec.pipeline_run() == Some(run) && is_open(one));
    let (expired, open): (Vec<&Approval>, Vec<&Approval>) = pending.partition(|one| one.spec.is_expired(now));
    match (open.as_slice(), expired.first()) {
        ([one], _) => Ok(one),
        ([], Some(expired)) => bail!(
            "Approval {} of PipelineRun {namespace}/{run} has expired; `russet pipeline resume {run} \
             -n {namespace}` asks again",
            expired.name_any()
        ),
        ([], None) => bail!(
            "no PipelineRun {namespace}/{run} waits for an approval; `russet pipeline list -n {namespace}` shows \
             how far the runs are"
        ),
        (several, _) => bail!(
            "PipelineRun {namespace}/{run} waits for {} approvals; decide on each with `russet approve NAME \
             -n {namespace}`: {}",
            several.len(),
            several.iter().map(|one| one.name_any()).collect::<Vec<_>>().join(", ")
        ),
    }
}

/// What will be done, or why that is not known. It is an error of its own where the gateway shows something else.
async fn action(gateway: &GatewayClient, plan_hash: &str) -> Result<Result<Vec<u8>>> {
    match gateway.artifact(&format!("sha256:{plan_hash}"), MAX_ACTION_BYTES).await {
        Err(error) => Ok(Err(error)),
        Ok(artifact) if !artifact.is_whole => {
            Ok(Err(anyhow::anyhow!("it has more than {} MiB", MAX_ACTION_BYTES >> 20)))
        }
        Ok(artifact) => {
            check_hash(&artifact.bytes, plan_hash)?;
            Ok(Ok(artifact.bytes))
        }
    }
}

/// Whether these bytes are what an Approval covers.
fn check_hash(bytes: &[u8], plan_hash: &str) -> Result<()> {
    let found = sha256(bytes);
    ensure!(
        found == plan_hash,
        "the gateway shows something with SHA-256 {found}, and the Approval covers {plan_hash}; nothing was approved: \
         deny it with `russet pipeline deny`, and look into that gateway"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::{ApprovalSpec, LocalReference};

    use super::*;

    fn approval(name: &str, run: &str, expires: i64, decision: Option<ApprovalDecision>) -> Approval {
        let spec = ApprovalSpec {
            pipeline_run_ref: Some(LocalReference { name: run.to_owned() }),
            expires_at: Some(Time(Timestamp::from_second(expires).unwrap())),
            decision,
            ..ApprovalSpec::default()
        };
        Approval::new(name, spec)
    }

    #[test]
    fn the_open_approval_of_a_run_is_found() {
        let deployment = ApprovalSpec {
            deployment_ref: Some(LocalReference { name: "r".to_owned() }),
            ..ApprovalSpec::default()
        };
        let all = [
            approval("decided", "r", 200, Some(ApprovalDecision::Denied)),
            approval("expired", "r", 100, None),
            approval("open", "r", 200, None),
            Approval::new("deployment", deployment),
            approval("late", "s", 100, None),
            approval("t-1", "t", 200, None),
            approval("t-2", "t", 200, None),
        ];
        for (run, expected) in [
            ("r", Ok("open")),
            ("s", Err("Approval late of PipelineRun team/s has expired; `russet pipeline resume s")),
            ("t", Err("waits for 2 approvals; decide on each with `russet approve NAME -n team`: t-1, t-2")),
            ("u", Err("no PipelineRun team/u waits for an approval")),
        ] {
            match (find_open(&all, "team", run, Timestamp::from_second(100).unwrap()), expected) {
                (Ok(found), Ok(name)) => assert_eq!(found.name_any(), name),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (found, _) => panic!("{run}: {found:?}"),
            }
        }
    }

    #[test]
    fn bytes_that_the_approval_does_not_cover_are_refused() {
        let hash = sha256(b"{}");
        assert!(check_hash(b"{}", &hash).is_ok());
        let error = check_hash(b"{ }", &hash).unwrap_err().to_string();
        assert!(error.contains(&hash) && error.contains("russet pipeline deny"), "{error}");
    }
}
