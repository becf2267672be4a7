//! Networks that are cut in the middle of a stream and mended: the cable between the two machines, what carries the
//! activations between ranks, and an agent's way to the API server alone.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use russet_tests::cluster::{TestCluster, condition};

use super::{TOKENS, answers_again, resumed_count, expected, finish_resumed, finish_undisturbed, check_invariants};
use crate::path;
use crate::servers::epochs;

/// Agent, engine and every connection of the far machine are cut off at once: the stream waits until the group is
/// formed anew, and goes on.
pub async fn cable(cluster: &mut TestCluster) -> Result<()> {
    if let Some(why) = &cluster.lab.fallback {
        println!("  skipped: there is no cable to pull, because {why}");
        return Ok(());
    }
    let printed = ("cable pulled, group begins anew", 30, "cable back, stream went on");
    // Only then there are engines.
    expected(cluster).await?;
    let engines = cluster.engines().await?;
    with_fault(cluster, |cluster| cluster.lab.cut(), printed).await?;
    path::ready(cluster).await?;
    let now = cluster.engines().await?;
    ensure!(now == engines, "a rank read its weights again for a cable: {engines:?} became {now:?}");
    check_invariants(cluster).await
}

/// Makes the cut in the middle of a stream and mends it once the group begins anew: the stream goes on.
async fn with_fault<T>(
    cluster: &mut TestCluster,
    cut: impl FnOnce(&mut TestCluster) -> Result<T>,
    (begins, bound, goes_on): (&str, u32, &str),
) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    let before = resumed_count(cluster).await?;
    let epochs = epochs(cluster).await?;
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    let cut = cut(cluster)?;
    let struck = Instant::now();
    cluster
        .until("the group begins a new epoch", async |cluster| Ok(self::epochs(cluster).await? != epochs))
        .await?;
    println!("fault: {begins} = {:.2} of {bound}", struck.elapsed().as_secs_f64());
    drop(cut);
    let longest = finish_resumed(&mut answer, &undisturbed).await?;
    println!("fault: {goes_on} = {:.2} of 30", longest.as_secs_f64());
    answers_again(cluster).await?;
    ensure!(resumed_count(cluster).await? == before + 1, "the stream did not go on elsewhere");
    Ok(())
}

/// What MLX's ring sends is swallowed, and nothing else: every process works and beats, every connection is open, and a
/// batch waits for ever. The stream goes on with the group that is formed anew.
pub async fn ring(cluster: &mut TestCluster) -> Result<()> {
    if let Some(why) = &cluster.lab.fallback {
        println!("  skipped: the ring cannot be cut alone, because {why}");
        return Ok(());
    }
    // Only then there are shards.
    expected(cluster).await?;
    let engines = cluster.engines().await?;
    let shards = cluster.get("shards").await?;
    let ring = |shard: &serde_json::Value| {
        shard["status"]["rendezvous"]["ring"].as_str()?.rsplit(':').next()?.parse().ok()
    };
    let ports: Vec<u16> = shards["items"].as_array().into_iter().flatten().filter_map(ring).collect();
    ensure!(ports.len() == 2, "two ranks have {} ports for their ring: {shards}", ports.len());
    let before = hang_events(cluster).await?;
    let printed =
        ("ring between ranks cut, group begins anew", 20, "ring between ranks cut, stream stood still");
    with_fault(cluster, |cluster| cluster.lab.cut_connections(&ports), printed).await?;
    // Said by the machine of the rank that was killed for it. Its group says what it hears of first, which may be that
    // the other rank lost this one.
    cluster.until("an event says EngineHung", async |cluster| Ok(hang_events(cluster).await? != before)).await?;
    path::ready(cluster).await?;
    // Who was killed for it is chance: the first to be noticed, or both.
    println!("  engines {engines:?} became {:?}", cluster.engines().await?);
    check_invariants(cluster).await
}

/// The Events of engines that hung, by name and version: the same again is the same Event, told once more.
async fn hang_events(cluster: &TestCluster) -> Result<BTreeSet<String>> {
    let events = cluster.get("events").await?;
    let told = events["items"].as_array().context("no list of events")?;
    let of_nodes = told.iter().filter(|event| {
        event["reason"] == "EngineHung" && event["involvedObject"]["kind"] == "InferenceNode"
    });
    Ok(of_nodes
        .map(|event| format!("{} {}", event["metadata"]["name"], event["metadata"]["resourceVersion"]))
        .collect())
}

/// The far machine's agent reaches no API server, until the operator calls its node unreachable: its
/// engine works on with the near one, and is the same when the agent is back.
pub async fn agent(cluster: &mut TestCluster) -> Result<()> {
    if let Some(why) = &cluster.lab.fallback {
        println!("  skipped: the agent has no network of its own, because {why}");
        return Ok(());
    }
    let undisturbed = expected(cluster).await?;
    let engines = cluster.engines().await?;
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    let cut = cluster.lab.cut_ports(&cluster.api_ports()?)?;
    let struck = Instant::now();
    finish_undisturbed(&mut answer).await?;
    ensure!(answer.text == undisturbed, "the text changed:\n{}\n{undisturbed}", answer.text);
    until_reachable(cluster, "False").await?;
    println!("fault: agent cut off, called unreachable = {:.2} of 40", struck.elapsed().as_secs_f64());
    super::check_answers(cluster).await?;
    drop(cut);
    let back = Instant::now();
    until_reachable(cluster, "True").await?;
    println!("fault: agent's network back, called reachable = {:.2} of 40", back.elapsed().as_secs_f64());
    path::ready(cluster).await?;
    ensure!(cluster.engines().await? == engines, "the engines changed: {engines:?}");
    check_invariants(cluster).await
}

async fn until_reachable(cluster: &mut TestCluster, wanted: &str) -> Result<()> {
    cluster
        .until(&format!("node-b's Reachable is {wanted}"), async |cluster| {
            let node = cluster.get("inferencenodes node-b").await?;
            Ok(condition(&node, "Reachable").is_some_and(|reachable| reachable["status"] == wanted))
        })
        .await
}
