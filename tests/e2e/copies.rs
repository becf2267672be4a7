//! Preloaded files on both machines: a deployment then starts without a transfer. Also for a model whose hub
//! requires a token.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::{Result, ensure};
use russet_tests::cluster::{TestCluster, condition};

use crate::mistakes::apply;
use crate::path::{answers, delete_and_wait, delete_object, serves};

/// The hub's name of a model that only this scenario fetches.
pub const AHEAD: &str = "russet/ahead";

/// The hub's name of a gated model.
pub const CLOSED: &str = "closed/smoke";
/// The hub's name of a model with rate limits and quiet hours.
pub const PACED: &str = "russet/paced";
const TOKEN: &str = "hf_of_the_tests";

pub async fn ahead(cluster: &mut TestCluster) -> Result<()> {
    let model = format!(
        "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {{name: ahead}}\n\
         spec: {{source: {{uri: 'hf://{AHEAD}'}}, preload: {{policy: Always}}}}\n"
    );
    apply(cluster, &model).await?;
    let asked = Instant::now();
    cluster
        .until("both machines hold the files", async |cluster| {
            let model = cluster.get("models ahead").await?;
            let preloaded = condition(&model, "Preloaded").is_some_and(|it| it["status"] == "True");
            Ok(preloaded && model["status"]["preloaded"] == "2/2")
        })
        .await?;
    println!("  both machines hold the files after {:.1} s", asked.elapsed().as_secs_f64());
    // They came from the hub once; the second machine downloaded them from the first.
    let copies = cluster.get("modelcopies").await?;
    let own = copies["items"].as_array().into_iter().flatten();
    let own: Vec<_> = own.filter(|copy| copy["spec"]["modelRef"]["name"] == "ahead").collect();
    let ids: BTreeSet<&str> = own.iter().filter_map(|copy| copy["status"]["content"].as_str()).collect();
    ensure!(ids.len() == 1, "both are to have the same bytes, and have {ids:?}");
    let model = own.iter().filter_map(|copy| copy["status"]["bytesTotal"].as_u64()).max().unwrap_or(0);
    let given = cluster.hub.bytes_served(AHEAD);
    let share = given as f64 / model as f64;
    println!("  the hub gave {given} bytes for {model} on two machines, headers included: {share:.3}");
    // The model is so small that its headers, which are read first, are a large share.
    ensure!(given >= model && share < 1.1, "the hub gave {given} bytes of {model}");
    for kind in ["models", "modelcopies"] {
        println!("{}", cluster.russet(&["get", kind]).await?);
    }

    // From here on the hub records transfers, and would block them.
    let held = cluster.hub.hold_transfers();
    let deployment = "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: ahead}\n\
                      spec: {modelRef: {name: ahead}, sharding: {mode: Pipeline, ranks: 2, kv: {contextTokens: 512}}}\n";
    apply(cluster, deployment).await?;
    serves(cluster, "ahead").await?;
    let offsets = cluster.hub.hold_offsets();
    ensure!(offsets.is_empty(), "the files were there, and transfers began at {offsets:?}");
    drop(held);
    answers(cluster, "ahead").await?;

    // Engines record their reads, and the retention shows it.
    cluster
        .until("both copies were used", async |cluster| {
            let copies = cluster.get("modelcopies").await?;
            let own = copies["items"].as_array().into_iter().flatten();
            let own = own.filter(|copy| copy["spec"]["modelRef"]["name"] == "ahead");
            Ok(own.filter(|copy| copy["status"]["lastUsedTime"].is_string()).count() == 2)
        })
        .await?;
    for kind in ["models", "modelcopies"] {
        println!("{}", cluster.russet(&["get", kind]).await?);
    }
    delete_and_wait(cluster, "ahead").await?;
    let copies = cluster.get("modelcopies").await?;
    let left = copies["items"].as_array().into_iter().flatten();
    ensure!(
        left.filter(|copy| copy["spec"]["modelRef"]["name"] == "ahead").count() == 2,
        "files went with their deployment"
    );
    delete_object(cluster, "models/ahead").await
}

/// A gated model waits for its Secret and reports it; nodes may read it while they fetch, and no longer.
pub async fn closed(cluster: &mut TestCluster) -> Result<()> {
    cluster.hub.gate(CLOSED, TOKEN);
    let model = format!(
        "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {{name: closed}}\n\
         spec: {{source: {{uri: 'hf://{CLOSED}', secretRef: {{name: hub}}}}, preload: {{policy: Always}}}}\n"
    );
    apply(cluster, &model).await?;
    let says = async |cluster: &TestCluster, words: &str| {
        let model = cluster.get("models closed").await?;
        let ready = condition(&model, "Ready").cloned().unwrap_or_default();
        let message = ready["message"].as_str().unwrap_or_default();
        anyhow::Ok(ready["reason"] == "SourceForbidden" && message.contains(words))
    };
    cluster
        .until("the model says which command lets nodes read its Secret", async |cluster| {
            says(cluster, "russet credentials allow hub -n default").await
        })
        .await?;
    let secret =
        format!("apiVersion: v1\nkind: Secret\nmetadata: {{name: hub}}\nstringData: {{token: {TOKEN}}}\n");
    apply(cluster, &secret).await?;
    println!("  {}", cluster.russet(&["credentials", "allow", "hub"]).await?.trim());
    let allowed = Instant::now();
    cluster
        .until("both machines hold the files", async |cluster| {
            Ok(cluster.get("models closed").await?["status"]["preloaded"] == "2/2")
        })
        .await?;
    println!("  both machines hold the closed model's files {:.1} s later", allowed.elapsed().as_secs_f64());
    cluster
        .until("no node may read the Secret any more", async |cluster| {
            let bindings = cluster.get("rolebindings").await?;
            let mut bindings = bindings["items"].as_array().into_iter().flatten();
            Ok(!bindings.any(|it| it["roleRef"]["name"] == "russet-sources"))
        })
        .await?;
    delete_object(cluster, "models/closed").await?;
    cluster.russet(&["credentials", "forbid", "hub"]).await?;
    cluster.russet(&["delete", "secrets/hub"]).await?;
    Ok(())
}

/// Sets the transfers of a node's spec.
async fn transfers(cluster: &TestCluster, said: &str) -> Result<()> {
    let nodes = cluster.get("inferencenodes").await?;
    for node in nodes["items"].as_array().into_iter().flatten() {
        let node = node["metadata"]["name"].as_str().unwrap_or_default();
        let object = format!(
            "apiVersion: russet.dev/v1alpha1\nkind: InferenceNode\nmetadata: {{name: {node}}}\nspec: {said}\n"
        );
        apply(cluster, &object).await?;
    }
    Ok(())
}

/// Quiet hours start in the middle of a transfer, which continues when they are over, at the rate set then.
pub async fn paced(cluster: &mut TestCluster) -> Result<()> {
    let held = cluster.hub.hold_transfers();
    let model = format!(
        "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {{name: paced}}\n\
         spec: {{source: {{uri: 'hf://{PACED}'}}, preload: {{policy: Always}}}}\n"
    );
    apply(cluster, &model).await?;
    let bytes = async |cluster: &TestCluster| {
        let copies = cluster.get("modelcopies").await?;
        let own: Vec<serde_json::Value> = copies["items"].as_array().into_iter().flatten().cloned().collect();
        let mut own: Vec<_> =
            own.into_iter().filter(|it| it["spec"]["modelRef"]["name"] == "paced").collect();
        own.retain(|copy| copy["spec"]["want"] == "Files");
        anyhow::Ok(own)
    };
    cluster
        .until("a transfer hangs in the middle", async |cluster| Ok(!cluster.hub.hold_offsets().is_empty()))
        .await?;
    transfers(cluster, "{transfers: {fromSources: {quietHours: [{from: '00:00', until: '00:00'}]}}}").await?;
    cluster
        .until("every copy that is to come from the source waits for its hours", async |cluster| {
            let own = bytes(cluster).await?;
            let quiet = |copy: &&serde_json::Value| {
                condition(copy, "Ready").is_some_and(|it| it["reason"] == "QuietHours")
            };
            Ok(own.iter().filter(quiet).count() == 2)
        })
        .await?;
    println!("{}", cluster.russet(&["get", "modelcopies"]).await?);
    drop(held);
    // In bits per second; its files are some megabytes.
    let rate = 10_000_000;
    let on_disk = |copy: &serde_json::Value| copy["status"]["bytesDone"].as_u64().unwrap_or(0);
    let before = bytes(cluster).await?.iter().map(on_disk).max().unwrap_or(0);
    transfers(cluster, &format!("{{transfers: {{fromSources: {{maxBitsPerSecond: '{rate}'}}}}}}")).await?;
    cluster.until("it is let go", async |cluster| Ok(cluster.hub.hold_offsets().len() > 1)).await?;
    let started = Instant::now();
    cluster
        .until("both machines hold the files", async |cluster| {
            Ok(cluster.get("models paced").await?["status"]["preloaded"] == "2/2")
        })
        .await?;
    // What a node received, not what the hub sent: megabytes fit into the buffers of a socket. The limit is a node's,
    // both may download from the hub, and the first that is complete serves the other without a limit.
    let seconds = started.elapsed().as_secs_f64();
    let received = bytes(cluster).await?.iter().map(on_disk).min().unwrap_or(0).saturating_sub(before);
    println!("  {received} bytes of it came within {seconds:.1} s at {rate} bit/s");
    ensure!(received > 1_000_000, "only {received} bytes were left to download, too few for a measurement");
    // Bytes that came before the first look are not timed.
    ensure!(
        received as f64 * 8.0 < 2.0 * seconds * f64::from(rate),
        "{received} bytes came within {seconds:.1} s"
    );
    transfers(cluster, "{}").await?;
    delete_object(cluster, "models/paced").await
}
