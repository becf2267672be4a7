//! Self-test of machines: deploys the smoke model, which is built into agents, on each node and each pair of
//! nodes. A deployment is Ready only once its ranks together have answered a smoke prompt. All objects are
//! removed afterwards.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use russet_crds::conditions::{Reason, Type, get, reason};
use russet_crds::{
    KvCapacity, LabelOperator, LabelRule, LocalReference, Model, ModelDeployment, ModelDeploymentSpec,
    ModelSource, ModelSpec, NodePool, NodePoolSpec, NodeSelector, Shard, Sharding, ShardingMode, names,
};
use tokio::time::Instant;

use super::{Finding, Mark};
use crate::stdout::out;

/// Timeout to copy, place, load and prompt a model of a megabyte.
const PROOF_TIMEOUT: Duration = Duration::from_secs(180);
/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Objects created for the test.
struct ProofObjects {
    name: String,
    models: Api<Model>,
    pools: Api<NodePool>,
    deployments: Api<ModelDeployment>,
    shards: Api<Shard>,
}

/// Tests every node and every pair; prints each result as soon as it is known.
pub async fn run(client: &Client, namespace: &str, nodes: &[String]) -> Result<Vec<Finding>> {
    let made = ProofObjects {
        name: format!("doctor-{:08x}", rand::random::<u32>()),
        models: Api::namespaced(client.clone(), namespace),
        pools: Api::all(client.clone()),
        deployments: Api::namespaced(client.clone(), namespace),
        shards: Api::namespaced(client.clone(), namespace),
    };
    let proved = tokio::select! {
        proved = made.prove_all(nodes) => proved,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    // Also removes what an interrupted test left behind.
    let deployment = made.clean_up().await;
    let model = delete_and_wait(&made.models, &made.name).await;
    let findings = proved?;
    deployment
        .and(model)
        .with_context(|| format!("{} could not be deleted; delete it by hand", made.name))?;
    Ok(findings)
}

/// Every node, then every pair.
fn teams(nodes: &[String]) -> Vec<Vec<&str>> {
    let alone = nodes.iter().map(|node| vec![node.as_str()]);
    let pairs = nodes.iter().enumerate().flat_map(|(index, one)| {
        nodes[index + 1..].iter().map(move |other| vec![one.as_str(), other.as_str()])
    });
    alone.chain(pairs).collect()
}

impl ProofObjects {
    async fn prove_all(&self, nodes: &[String]) -> Result<Vec<Finding>> {
        let uri = "builtin://smoke".to_owned();
        let model = Model::new(
            &self.name,
            ModelSpec { source: ModelSource { uri, ..ModelSource::default() }, preload: None },
        );
        self.models
            .create(&PostParams::default(), &model)
            .await
            .context("the smoke model could not be applied")?;
        let mut findings = Vec::new();
        for team in teams(nodes) {
            let began = Instant::now();
            let (mark, words) = self.prove_team(&team).await?;
            let words = format!("{words} ({:.1} s)", began.elapsed().as_secs_f64());
            let finding = Finding::new(mark, team.join(" + "), words);
            out!("{}", finding.show())?;
            findings.push(finding);
            self.clean_up().await?;
        }
        Ok(findings)
    }

    /// Whether these nodes become ready, and which transport they use.
    async fn prove_team(&self, team: &[&str]) -> Result<(Mark, String)> {
        let rule = LabelRule {
            key: names::LABEL_HOSTNAME.to_owned(),
            operator: LabelOperator::In,
            values: team.iter().map(|node| (*node).to_owned()).collect(),
        };
        let selector = NodeSelector { match_expressions: vec![rule], ..NodeSelector::default() };
        let pool = NodePool::new(&self.name, NodePoolSpec { selector, fabric: None });
        self.pools
            .create(&PostParams::default(), &pool)
            .await
            .context("the NodePool could not be applied")?;
        let sharding = Sharding {
            mode: if team.len() > 1 { ShardingMode::Pipeline } else { ShardingMode::Single },
            ranks: (team.len() > 1).then_some(team.len() as u32),
            kv: KvCapacity { context_tokens: 512, max_sequences: 1, ..KvCapacity::default() },
            ..Sharding::default()
        };
        let spec = ModelDeploymentSpec {
            model_ref: LocalReference::new(&self.name),
            sharding: Some(sharding),
            pool_refs: vec![LocalReference::new(&self.name)],
            replicas: 1,
            ..ModelDeploymentSpec::default()
        };
        let deployment = ModelDeployment::new(&self.name, spec);
        self.deployments
            .create(&PostParams::default(), &deployment)
            .await
            .context("the ModelDeployment could not be applied")?;
        let deadline = Instant::now() + PROOF_TIMEOUT;
        loop {
            let found = self.deployments.get(&self.name).await?;
            let conditions = found.status.map(|status| status.conditions).unwrap_or_default();
            let ready = get(&conditions, Type::Ready);
            let state = ready.map(|ready| format!("{}: {}", ready.reason, ready.message)).unwrap_or_default();
            if ready.is_some_and(|ready| ready.status == "True") {
                return self.transport_finding(team).await;
            }
            // Lack of free memory is no fault of the machine.
            let full = [Reason::NothingFits, Reason::NoNodes, Reason::MemoryRefused, Reason::Outweighed];
            let stalled = get(&conditions, Type::Stalled).is_some_and(|stalled| stalled.status == "True");
            if stalled || ready.and_then(reason).is_some_and(|reason| full.contains(&reason)) {
                return Ok((Mark::Note, format!("not proved, {state}")));
            }
            if Instant::now() >= deadline {
                return Ok((
                    Mark::Bad,
                    format!("no answer within {} s, last {state}", PROOF_TIMEOUT.as_secs()),
                ));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// The transport between the ranks of a ready group.
    async fn transport_finding(&self, team: &[&str]) -> Result<(Mark, String)> {
        if team.len() < 2 {
            return Ok((Mark::Good, "answers".to_owned()));
        }
        let shards = self.own_shards().await?;
        let paths = shards.iter().filter_map(|shard| {
            let over = get(&shard.status.as_ref()?.conditions, Type::OverCables)?;
            Some((over.status == "True", over.message.clone()))
        });
        let paths: Vec<(bool, String)> = paths.collect();
        let fallen: Vec<&str> =
            paths.iter().filter(|(over, _)| !over).map(|(_, words)| words.as_str()).collect();
        Ok(match (paths.is_empty(), fallen.is_empty()) {
            (true, _) => (Mark::Good, "answer together, over the network".to_owned()),
            (false, true) => (Mark::Good, "answer together, over a cable".to_owned()),
            (false, false) => (Mark::Bad, format!("answer together, PathFallback: {}", fallen.join("\n"))),
        })
    }

    async fn own_shards(&self) -> Result<Vec<Shard>> {
        let labelled = format!("{}={}", names::LABEL_DEPLOYMENT, self.name);
        Ok(self.shards.list(&ListParams::default().labels(&labelled)).await?.items)
    }

    /// Deletes the deployment and the pool, and waits until none of their engines is left.
    async fn clean_up(&self) -> Result<()> {
        delete_and_wait(&self.deployments, &self.name).await?;
        delete_and_wait(&self.pools, &self.name).await?;
        let deadline = Instant::now() + PROOF_TIMEOUT;
        while !self.own_shards().await?.is_empty() {
            if Instant::now() >= deadline {
                bail!("its engines did not end within {} s", PROOF_TIMEOUT.as_secs());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }
}

/// Deletes an object if it exists, and waits until it is gone.
async fn delete_and_wait<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let missing = |error: &kube::Error| matches!(error, kube::Error::Api(status) if status.code == 404);
    match api.delete(name, &DeleteParams::default()).await {
        Err(error) if missing(&error) => return Ok(()),
        answer => drop(answer?),
    }
    let deadline = Instant::now() + PROOF_TIMEOUT;
    loop {
        match api.get(name).await {
            Err(error) if missing(&error) => return Ok(()),
            Err(error) => return Err(error.into()),
            Ok(_) if Instant::now() >= deadline => {
                bail!("{name} is not deleted after {} s", PROOF_TIMEOUT.as_secs())
            }
            Ok(_) => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_comes_alone_and_every_two_together_once() {
        let nodes = ["a", "b", "c"].map(str::to_owned);
        let state: Vec<String> = teams(&nodes).iter().map(|team| team.concat()).collect();
        assert_eq!(state, ["a", "b", "c", "ab", "ac", "bc"]);
        assert!(teams(&[]).is_empty());
    }
}
