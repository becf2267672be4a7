//! `russet doctor`: finds problems of a cluster and their remedies. With `--prove` it also runs a model on
//! each machine and on every pair of machines.

mod diagnose;
mod gateway;
mod selftest;

use anyhow::{Context, Result, bail};
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, is_true};
use russet_crds::{InferenceNode, Model, ModelCopy, ModelDeployment};

use crate::client::Connection;
use crate::plan::text::wrap;
use crate::stdout::{out, outln};

/// Columns of a terminal.
const WIDTH: usize = 110;
/// Columns of the subject.
const SUBJECT_WIDTH: usize = 22;

/// Arguments of `russet doctor`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Also run the smoke model, which is built into agents, on every node and on every pair of nodes, one
    /// after the other. It uses only free memory and is removed afterwards.
    #[arg(long)]
    prove: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// As it should be.
    Good,
    /// Worth knowing.
    Note,
    /// Needs to be fixed.
    Bad,
}

/// A finding about one subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub mark: Mark,
    pub subject: String,
    pub words: String,
}

impl Finding {
    fn new(mark: Mark, subject: impl Into<String>, words: impl Into<String>) -> Self {
        Self { mark, subject: subject.into(), words: words.into() }
    }

    /// Text lines, wrapped.
    fn show(&self) -> String {
        let mark = match self.mark {
            Mark::Good => '✓',
            Mark::Note => '·',
            Mark::Bad => '✗',
        };
        // Names come from people and machines and may contain anything.
        let clean = |text: &str| text.replace(char::is_control, "?");
        let mut lines = self.words.lines().flat_map(|words| wrap(&clean(words), WIDTH - SUBJECT_WIDTH - 4));
        let first = lines.next().unwrap_or_default();
        let mut text = format!("{mark} {:SUBJECT_WIDTH$} {first}\n", clean(&self.subject));
        for line in lines {
            text.push_str(&format!("  {:SUBJECT_WIDTH$}   {line}\n", ""));
        }
        text
    }
}

/// Diagnoses, and runs the proof if asked to; fails if anything needs to be fixed.
pub async fn run(arguments: Arguments) -> Result<()> {
    let client = arguments.connection.client().await?;
    let (params, began) = (ListParams::default(), std::time::Instant::now());
    let nodes: Api<InferenceNode> = Api::all(client.clone());
    let nodes = nodes.list(&params).await.context("the API server does not list nodes")?.items;
    let took = began.elapsed();
    let models: Api<Model> = Api::all(client.clone());
    let copies: Api<ModelCopy> = Api::all(client.clone());
    let deployments: Api<ModelDeployment> = Api::all(client.clone());
    let (models, copies, deployments) =
        tokio::try_join!(models.list(&params), copies.list(&params), deployments.list(&params))?;

    let mut findings = vec![Finding::new(
        Mark::Good,
        "API server",
        format!("lists {} nodes in {:.0} ms", nodes.len(), took.as_secs_f64() * 1e3),
    )];
    findings.extend(gateway::finding(&arguments.connection.folder()?).await);
    findings.extend(diagnose::nodes(&nodes));
    findings.extend(diagnose::models(&models.items, &copies.items));
    findings.extend(diagnose::deployments(&deployments.items));
    for finding in &findings {
        out!("{}", finding.show())?;
    }
    if arguments.prove {
        let ready = |node: &&InferenceNode| {
            node.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Ready))
        };
        let ready: Vec<String> = nodes.iter().filter(ready).map(|node| node.name_any()).collect();
        findings.extend(selftest::run(&client, &arguments.connection.namespace(), &ready).await?);
    }
    let bad = findings.iter().filter(|finding| finding.mark == Mark::Bad).count();
    if bad > 0 {
        bail!("{bad} of {} findings need attention", findings.len());
    }
    outln!("nothing needs attention")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_a_line_and_what_is_long_goes_on_below() {
        let short = Finding::new(Mark::Good, "node a", "Ready");
        assert_eq!(short.show(), "✓ node a                 Ready\n");
        let long = Finding::new(Mark::Bad, "node b", format!("{}\nplug it in\u{7}", "word ".repeat(20)));
        let shown = long.show();
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 3, "{shown}");
        assert!(
            lines[0].starts_with("✗ node b                 word word") && lines[2].ends_with("plug it in?")
        );
        assert!(lines.iter().all(|line| line.chars().count() <= WIDTH), "{shown}");
    }
}
