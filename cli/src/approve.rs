//! `russet approve` and `russet deny`: a person's decision on an Approval. It is recorded under the user name
//! that the server authenticates; an admission policy enforces that.

use anyhow::{Context, Result, bail};
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use russet_crds::{Approval, ApprovalDecision};
use serde_json::json;

use crate::client::Connection;
use crate::get::format_table;
use crate::stdout::{out, outln};

/// Arguments of `russet approve` and `russet deny`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Name of the Approval, or of the deployment or the run that waits for it; without it, list open Approvals.
    name: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

/// Writes the decision, or lists open Approvals.
pub async fn run(arguments: Arguments, decision: ApprovalDecision) -> Result<()> {
    let Arguments { name, connection } = arguments;
    let client = connection.client().await?;
    let api: Api<Approval> = Api::namespaced(client.clone(), &connection.namespace());
    let pending = api.list(&ListParams::default()).await.context("the Approvals could not be listed")?.items;
    let Some(name) = name else {
        list(&pending, &connection.namespace())?;
        return Ok(());
    };
    let of_name = |approval: &&Approval| {
        let is_for = approval.spec.deployment() == Some(&name) || approval.spec.pipeline_run() == Some(&name);
        approval.name_any() == name || (is_for && is_open(approval))
    };
    let found: Vec<&Approval> = pending.iter().filter(of_name).collect();
    let approval = match found.as_slice() {
        [one] => *one,
        [] => bail!(
            "there is no pending Approval {name}, and no ModelDeployment or PipelineRun {name} with one, in namespace {}; `russet approve` lists pending Approvals",
            connection.namespace()
        ),
        several => bail!(
            "{name} has {} pending Approvals; name one of {}",
            several.len(),
            several.iter().map(|one| one.name_any()).collect::<Vec<_>>().join(", ")
        ),
    };
    decide(client, &api, approval, decision).await
}

/// Writes a decision under the user name that the server authenticates, and prints it.
pub async fn decide(
    client: Client,
    api: &Api<Approval>,
    approval: &Approval,
    decision: ApprovalDecision,
) -> Result<()> {
    let name = approval.name_any();
    let me = who_am_i(client).await?;
    // By its UID the server refuses the decision where another Approval got the name meanwhile.
    let patch = json!({
        "metadata": {"uid": approval.uid()},
        "spec": {"decision": decision, "decidedBy": me},
    });
    api.patch(&name, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .with_context(|| format!("the decision of Approval {name} could not be written"))?;
    let word = if decision == ApprovalDecision::Approved { "approved" } else { "denied" };
    outln!("approval.russet.dev/{name} {word} by {me}")?;
    Ok(())
}

/// Whether nobody decided yet.
pub fn is_open(approval: &Approval) -> bool {
    approval.spec.decision.is_none()
}

fn list(pending: &[Approval], namespace: &str) -> Result<()> {
    let open: Vec<&Approval> = pending.iter().filter(|approval| is_open(approval)).collect();
    if open.is_empty() {
        outln!("No Approval is pending in namespace {namespace}.")?;
        return Ok(());
    }
    let header = ["NAME", "FOR", "ACTION", "QUESTION"].map(str::to_owned).to_vec();
    let rows = open.iter().map(|approval| {
        vec![
            approval.name_any(),
            approval.spec.subject(),
            format!("{:?}", approval.spec.action),
            approval.spec.message.clone(),
        ]
    });
    out!("{}", format_table(&std::iter::once(header).chain(rows).collect::<Vec<_>>()))?;
    Ok(())
}

/// The user name under which the server authenticates this client.
async fn who_am_i(client: Client) -> Result<String> {
    let api: Api<SelfSubjectReview> = Api::all(client);
    let review = api
        .create(&PostParams::default(), &SelfSubjectReview::default())
        .await
        .context("the server does not say who you are")?;
    let name = review.status.and_then(|status| status.user_info).and_then(|user| user.username);
    name.context("the server does not say who you are")
}
