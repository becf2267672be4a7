//! Network partitions in the middle of a stream: the cable between the two machines, the activations between
//! ranks, and only an agent's connection to the API server.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use russet_tests::cluster::{TestCluster, condition};

use super::{
    TOKENS, answers_again, check_invariants, expected, finish_resumed, finish_undisturbed, resumed_count,
};
use crate::path;
use crate::servers::epochs;

/// Agent, engine and every connection of the far machine are cut at once: the stream stalls until the group
/// has re-formed, and resumes.
pub async fn cable(cluster: &mut TestCluster) -> Result<()> {
    if let Some(why) = &cluster.lab.fallback {
        println!("  skipped: there is no cable to pull, because {why}");
        return Ok(());
    }
    let printed = ("cable pulled, group begins anew", 30, "cable back, stream went on");
    // Only after that there are engines.
    expected(cluster).await?;
    let engines = cluster.engines().await?;
    with_fault(cluster, |cluster| cluster.lab.cut(), printed).await?;
    path::ready(cluster).await?;
    let now = cluster.engines().await?;
    ensure!(now == engines, "a rank read its weights again for a cable: {engines:?} became {now:?}");
    check_invariants(cluster).await
}

/// Cuts the network in the middle of a stream and restores it once the group re-forms: the stream resumes.
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

/// The far machine gets another address, and its old connections are dead without a word. Its agent comes back under the
/// new one, the group re-forms there, and the stream resumes.
pub async fn address(cluster: &mut TestCluster) -> Result<()> {
    if let Some(why) = &cluster.lab.fallback {
        println!("  skipped: there is no second address, because {why}");
        return Ok(());
    }
    // Only after that there are engines.
    expected(cluster).await?;
    let engines = cluster.engines().await?;
    let mut moved = None;
    let printed = ("another address, group begins anew", 30, "another address, stream went on");
    with_fault(
        cluster,
        |cluster| {
            moved = Some(cluster.lab.change_address()?);
            Ok(())
        },
        printed,
    )
    .await?;
    let (address, fault) = moved.context("the address was not changed")?;
    let shown = |node: &serde_json::Value| node["status"]["addresses"][0] == address.to_string().as_str();
    let node = cluster.get("inferencenodes node-b").await?;
    ensure!(shown(&node), "node-b shows {}, not {address}", node["status"]["addresses"]);
    path::ready(cluster).await?;
    // The moved engine listens at an address that is gone, so there is another one.
    println!("  engines {engines:?} became {:?}", cluster.engines().await?);
    let back = Instant::now();
    drop(fault);
    cluster
        .until("node-b has its old address again", async |cluster| {
            Ok(!shown(&cluster.get("inferencenodes node-b").await?))
        })
        .await?;
    println!("fault: its old address again, seen = {:.2} of 30", back.elapsed().as_secs_f64());
    path::ready(cluster).await?;
    answers_again(cluster).await?;
    check_invariants(cluster).await
}

/// Only the traffic of MLX's ring is dropped: every process runs and sends heartbeats, every connection is
/// open, and a batch waits for ever. The stream resumes with the re-formed group.
pub async fn ring(cluster: &mut TestCluster) -> Result<()> {
    if let Some(why) = &cluster.lab.fallback {
        println!("  skipped: the ring cannot be cut alone, because {why}");
        return Ok(());
    }
    // Only after that there are shards.
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
    // Reported by the machine of the rank that was killed for it. Its group reports the first failure it
    // sees, which may be that the other rank lost this one.
    cluster
        .until("an event says EngineHung", async |cluster| Ok(hang_events(cluster).await? != before))
        .await?;
    path::ready(cluster).await?;
    // Which rank is killed is random: the first one detected, or both.
    println!("  engines {engines:?} became {:?}", cluster.engines().await?);
    check_invariants(cluster).await
}

/// The Events of hung engines, by name and version: a repetition is the same Event with a higher count.
async fn hang_events(cluster: &TestCluster) -> Result<BTreeSet<String>> {
    let events = cluster.get("events").await?;
    let items = events["items"].as_array().context("no list of events")?;
    let of_nodes = items.iter().filter(|event| {
        event["reason"] == "EngineHung" && event["involvedObject"]["kind"] == "InferenceNode"
    });
    Ok(of_nodes
        .map(|event| format!("{} {}", event["metadata"]["name"], event["metadata"]["resourceVersion"]))
        .collect())
}

/// The far machine's agent reaches no API server, until the operator marks its node unreachable: its engine
/// keeps working with the near one, and is the same when the agent is back.
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

/// The machine is closed for others by hand: their connections end and new ones are refused, while streams go on. It is
/// opened again, and the node returns by itself.
pub async fn closed(cluster: &mut TestCluster) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    let engines = cluster.engines().await?;
    if let Some(why) = &cluster.lab.fallback {
        println!("  skipped: there is no other machine, because {why}");
        return Ok(());
    }
    let data_dir = cluster.near_dir().display().to_string();
    let heartbeat = async |cluster: &TestCluster| -> Result<String> {
        let lease = cluster.get("leases node-node-b -n russet-system").await?;
        Ok(lease["spec"]["renewTime"].as_str().context("a Lease without a time")?.to_owned())
    };
    let connect = async |cluster: &TestCluster| {
        tokio::net::TcpStream::connect((cluster.lab.near.address, cluster.api_port)).await
    };
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    cluster.russet(&["token", "close", "--data-dir", &data_dir]).await?;
    cluster.until("the API server is closed", async |cluster| Ok(connect(cluster).await.is_err())).await?;
    let closed = heartbeat(cluster).await?;
    finish_undisturbed(&mut answer).await?;
    ensure!(answer.text == undisturbed, "the text changed:\n{}\n{undisturbed}", answer.text);
    ensure!(heartbeat(cluster).await? == closed, "node-b reached a closed API server");
    cluster.russet(&["token", "create", "--quiet", "--data-dir", &data_dir]).await?;
    let back = Instant::now();
    cluster.until("node-b renews its Lease", async |cluster| Ok(heartbeat(cluster).await? != closed)).await?;
    println!("fault: API server open again, Lease renewed = {:.2} of 40", back.elapsed().as_secs_f64());
    path::ready(cluster).await?;
    ensure!(cluster.engines().await? == engines, "the engines changed: {engines:?}");
    check_invariants(cluster).await
}

async fn until_reachable(cluster: &mut TestCluster, expected: &str) -> Result<()> {
    cluster
        .until(&format!("node-b's Reachable is {expected}"), async |cluster| {
            let node = cluster.get("inferencenodes node-b").await?;
            Ok(condition(&node, "Reachable").is_some_and(|reachable| reachable["status"] == expected))
        })
        .await
}
