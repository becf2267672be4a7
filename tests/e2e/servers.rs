//! Scenarios for several API servers on one etcd: loss of the leader, and of an etcd member.

use anyhow::{Context, Result, bail, ensure};
use russet_tests::chat::{self, StreamEnd};
use russet_tests::cluster::TestCluster;
use russet_tests::control_plane::ControlPlane;
use russet_tests::control_plane::etcd::EtcdControlPlane;
use serde_json::Value;

use crate::faults::frozen::FrozenProcesses;
use crate::{faults, mistakes, path};

/// Tokens of a stream that continues through a change of leader.
const TOKENS: u32 = 700;
/// Timeout of a write that gets no response.
const WRITE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(20);

fn plane(cluster: &mut TestCluster) -> Result<&mut EtcdControlPlane> {
    match cluster.plane_mut()? {
        ControlPlane::Etcd(plane) => Ok(plane),
        _ => bail!("this cluster has no etcd"),
    }
}

async fn holder(cluster: &TestCluster) -> Result<String> {
    let lease = cluster.get("leases russet-operator -n russet-system").await?;
    Ok(lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned())
}

/// Name and epoch of every group.
pub async fn epochs(cluster: &TestCluster) -> Result<Vec<(Value, Value)>> {
    let groups = cluster.get("shardgroups").await?;
    let groups = groups["items"].as_array().context("no list of groups")?;
    Ok(groups
        .iter()
        .map(|group| (group["metadata"]["uid"].clone(), group["spec"]["epoch"].clone()))
        .collect())
}

/// An etcd member dies: the others take the writes.
pub async fn member(cluster: &mut TestCluster) -> Result<()> {
    path::quickstart(cluster).await?;
    let engines = cluster.engines().await?;
    for at in 0..3 {
        plane(cluster)?.member(at, false)?;
        let struck = std::time::Instant::now();
        cluster
            .until("a write is taken while a member of etcd is dead", async |cluster| {
                let map = format!(
                    "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: member-{at}, namespace: default}}\n"
                );
                Ok(mistakes::apply(cluster, &map).await.is_ok())
            })
            .await?;
        println!("fault: member of etcd killed, a write is taken = {:.2}", struck.elapsed().as_secs_f64());
        plane(cluster)?.member(at, true)?;
        // The next one may only be killed when this one is in sync again.
        cluster
            .until("the restarted member is healthy", async |cluster| plane(cluster)?.is_healthy(at).await)
            .await?;
    }
    path::ready(cluster).await?;
    ensure!(cluster.engines().await? == engines, "engines changed");
    Ok(())
}

/// Every etcd member runs but does not respond, as behind a partition: streams and new requests are not
/// affected, a write is not acknowledged, and afterwards all data is there.
pub async fn cut(cluster: &mut TestCluster) -> Result<()> {
    path::quickstart(cluster).await?;
    let (groups, engines) = (epochs(cluster).await?, cluster.engines().await?);
    let map = |name: &str| {
        format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: default}}\n")
    };
    mistakes::apply(cluster, &map("before-the-cut")).await?;
    let undisturbed = faults::expected(cluster).await?;
    let mut answer = path::long_answer(cluster, faults::TOKENS).await?;
    let frozen = FrozenProcesses::new(&plane(cluster)?.members())?;
    faults::finish_undisturbed(&mut answer).await?;
    ensure!(answer.text == undisturbed, "the text changed:\n{}\n{undisturbed}", answer.text);
    let unanswered = tokio::time::timeout(WRITE_TIMEOUT, mistakes::apply(cluster, &map("in-the-cut"))).await;
    ensure!(!matches!(unanswered, Ok(Ok(()))), "a write was acknowledged that no member of etcd saw");
    chat::answer(&cluster.base_url(), "smoke", "What is 17 + 25?").await?;
    let thawed = std::time::Instant::now();
    drop(frozen);
    cluster
        .until("a write is taken", async |cluster| {
            Ok(mistakes::apply(cluster, &map("after-the-cut")).await.is_ok())
        })
        .await?;
    println!("fault: etcd cut off and back, writes again = {:.2} of 30", thawed.elapsed().as_secs_f64());
    cluster.get("configmaps before-the-cut -n default").await.context("an acknowledged write is lost")?;
    faults::until_caught_up(cluster).await?;
    path::ready(cluster).await?;
    ensure!(epochs(cluster).await? == groups, "a group began a new epoch");
    ensure!(cluster.engines().await? == engines, "engines changed");
    faults::check_invariants(cluster).await
}

/// The server with the leading operator dies: the other's takes over, and no group restarts.
pub async fn leader(cluster: &mut TestCluster) -> Result<()> {
    path::quickstart(cluster).await?;
    let [first, second] = plane(cluster)?.candidates()?;
    let led = holder(cluster).await?;
    ensure!(led == second, "{led} leads and not {second}, which started first");
    let (groups, engines) = (epochs(cluster).await?, cluster.engines().await?);
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    plane(cluster)?.kill_second().await?;
    let struck = std::time::Instant::now();
    cluster
        .until("the other server's operator leads", async |cluster| {
            Ok(holder(cluster).await.is_ok_and(|holder| holder == first))
        })
        .await?;
    println!("fault: leader killed, the other leads = {:.2} of 30", struck.elapsed().as_secs_f64());
    let end = answer.finish().await;
    ensure!(end == StreamEnd::Finished("length".into()), "the stream ended with {end:?}");
    // It reconciles: a deployment that fits nowhere gets its message.
    mistakes::fits_nowhere(cluster).await?;
    path::ready(cluster).await?;
    ensure!(epochs(cluster).await? == groups, "a group began a new epoch");
    ensure!(cluster.engines().await? == engines, "engines changed");
    Ok(())
}
