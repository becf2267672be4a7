//! A cable between the machines of two ranks beside their network: ranks use it while it works, and the
//! network, with a condition that says so, while it does not.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use russet_tests::chat::StreamEnd;
use russet_tests::cluster::{TestCluster, condition};
use serde_json::Value;

use super::{TOKENS, check_invariants, expected, finish_resumed};
use crate::path;
use crate::servers::epochs;

/// Plugged in, the cable is a measured link, and a re-formed group uses it. Pulled in the middle of a stream,
/// the stream resumes over the network, and every condition says so. Restored, it is used again.
pub async fn wire(cluster: &mut TestCluster) -> Result<()> {
    let Some(macs) = cluster.macs.clone() else {
        println!("  skipped: no wire joins the machines: {:?}", cluster.lab.fallback);
        return Ok(());
    };
    let undisturbed = expected(cluster).await?;
    let [near, far] = &macs;
    near.plug(far)?;
    far.plug(near)?;
    let plugged = Instant::now();
    cluster
        .until("both nodes have measured the wire", async |cluster| {
            let links = links(cluster).await?;
            Ok(links.len() == 2
                && links.iter().all(|link| link["measured"]["roundTripMicroseconds"].is_u64()))
        })
        .await?;
    println!("fault: wire plugged in, measured = {:.2} of 60", plugged.elapsed().as_secs_f64());
    let before = "formed before its cable was known";
    until_reported(cluster, ("False", "PathFallback", before), ("False", "PathFallback")).await?;
    reform_group(cluster).await?;
    until_reported(cluster, ("True", "CablesUsed", "is reached over a cable"), ("True", "RdmaReady")).await?;
    let before = cluster.lab.wire_bytes()?;
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    ensure!(
        answer.finish().await == StreamEnd::Finished("length".into()),
        "an undisturbed stream did not end"
    );
    ensure!(answer.text == undisturbed, "over the wire the text changed:\n{}\n{undisturbed}", answer.text);
    let carried = cluster.lab.wire_bytes()? - before;
    println!("  {carried} bytes came over the wire during {TOKENS} tokens");
    // The agents' own probes are a few hundred bytes a second.
    ensure!(carried > 100 * u64::from(TOKENS), "{carried} bytes over the wire are no activations");

    let epochs = epochs(cluster).await?;
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    let cut = cluster.lab.cut_wire()?;
    let struck = Instant::now();
    cluster
        .until("the group begins a new epoch", async |cluster| Ok(self::epochs(cluster).await? != epochs))
        .await?;
    println!("fault: wire pulled, group begins anew = {:.2} of 20", struck.elapsed().as_secs_f64());
    let longest = finish_resumed(&mut answer, &undisturbed).await?;
    println!("fault: wire pulled, stream stood still = {:.2} of 30", longest.as_secs_f64());
    until_reported(
        cluster,
        ("False", "PathFallback", "and not over the cable that leads there"),
        ("False", "PathFallback"),
    )
    .await?;
    let shown = cluster.russet(&["fabric", "show"]).await?;
    ensure!(shown.matches("PathFallback").count() == 2, "`russet fabric show` does not say it:\n{shown}");
    cluster
        .until("both nodes say that nobody answers over the wire", async |cluster| {
            let links = links(cluster).await?;
            Ok(links.iter().all(|link| link["measured"]["roundTripMicroseconds"].is_null()))
        })
        .await?;

    drop(cut);
    cluster
        .until("both nodes hear each other over the wire", async |cluster| {
            let links = links(cluster).await?;
            Ok(links.iter().all(|link| link["measured"]["roundTripMicroseconds"].is_u64()))
        })
        .await?;
    reform_group(cluster).await?;
    until_reported(cluster, ("True", "CablesUsed", "is reached over a cable"), ("True", "RdmaReady")).await?;
    near.unplug()?;
    far.unplug()?;
    cluster.until("no link is left", async |cluster| Ok(links(cluster).await?.is_empty())).await?;
    check_invariants(cluster).await
}

/// The links of all nodes.
async fn links(cluster: &TestCluster) -> Result<Vec<Value>> {
    let nodes = cluster.get("inferencenodes").await?;
    let nodes = nodes["items"].as_array().context("no list of nodes")?;
    let of = |node: &Value| node["status"]["links"].as_array().cloned().unwrap_or_default();
    Ok(nodes.iter().flat_map(of).collect())
}

/// Makes the group re-form, as the message of `PathFallback` tells people to.
async fn reform_group(cluster: &mut TestCluster) -> Result<()> {
    let epochs = epochs(cluster).await?;
    let shards = cluster.get("shards").await?;
    let name = shards["items"][0]["metadata"]["name"].as_str().context("no shard has a name")?;
    cluster.russet(&["delete", &format!("shards/{name}")]).await?;
    cluster
        .until("the group begins a new epoch", async |cluster| Ok(self::epochs(cluster).await? != epochs))
        .await?;
    path::ready(cluster).await
}

/// Waits until both Shards report this about the paths between them, and both nodes this about their cables.
async fn until_reported(
    cluster: &mut TestCluster,
    (status, reason, words): (&str, &str, &str),
    healthy: (&str, &str),
) -> Result<()> {
    cluster
        .until(&format!("both ranks say {reason}, and both nodes {}", healthy.1), async |cluster| {
            let (shards, nodes) = (cluster.get("shards").await?, cluster.get("inferencenodes").await?);
            let all = |list: &Value, kind: &str, check: &dyn Fn(&Value) -> bool| {
                let found = list["items"].as_array().map(Vec::as_slice).unwrap_or_default();
                found.len() == 2 && found.iter().all(|object| condition(object, kind).is_some_and(check))
            };
            Ok(all(&shards, "OverCables", &|found| {
                found["status"] == status
                    && found["reason"] == reason
                    && found["message"].as_str().is_some_and(|said| said.contains(words))
            }) && all(&nodes, "FabricHealthy", &|found| {
                (found["status"].as_str(), found["reason"].as_str()) == (Some(healthy.0), Some(healthy.1))
            }))
        })
        .await
}
