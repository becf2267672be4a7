//! Benchmark of the operator: a `russet operator` beside `russet serve`, with machines, deployments and
//! copies written through its API as agents would report them, in three sizes. Prints one line of JSON per
//! figure; `cargo xtask bench operator` runs it and checks the figures.
//!
//! `scale RUSSET [NODES…]`

mod control_plane;
mod fill;
mod stub_agents;

use std::path::PathBuf;
use std::time::Instant;

use kube::Api;
use kube::api::{Patch, PatchParams};
use russet_crds::ModelDeployment;
use serde_json::json;

use control_plane::BenchControlPlane;

/// Sizes of clusters, in nodes.
const SIZES: [usize; 3] = [10, 100, 1000];

/// Any error ends the benchmark.
type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut arguments = std::env::args_os().skip(1);
    let russet = PathBuf::from(arguments.next().ok_or("say: scale RUSSET [NODES…]")?);
    let asked = arguments.map(|text| text.to_string_lossy().parse::<usize>());
    let mut sizes = asked.collect::<Result<Vec<usize>, _>>()?;
    if sizes.is_empty() {
        sizes = SIZES.to_vec();
    }
    let mut few = None;
    for nodes in sizes {
        eprintln!("▸ {nodes} nodes");
        let figures = measure(&russet, nodes).await?;
        let tell = |what: &str, ours: f64, peer: Option<f64>, unit: &str| {
            let what = format!("{what}, {nodes} nodes");
            println!("{}", json!({"what": what, "nodes": nodes, "ours": ours, "peer": peer, "unit": unit}));
        };
        tell("from an empty cluster until all is ready", figures.ready, None, "s");
        tell("resident memory of the operator", figures.operator, None, "MB");
        tell("resident memory of the API server", figures.server, None, "MB");
        tell("writes of the operator for one edited deployment", figures.writes, few, "writes");
        few.get_or_insert(figures.writes);
    }
    Ok(())
}

struct BenchFigures {
    ready: f64,
    operator: f64,
    server: f64,
    writes: f64,
}

/// Fills one control plane, waits until it is quiet, and edits one deployment.
async fn measure(russet: &std::path::Path, nodes: usize) -> Result<BenchFigures, Error> {
    let plane = BenchControlPlane::start(russet).await?;
    let played = stub_agents::StubAgents::start(plane.client.clone());
    let started = Instant::now();
    fill::machines(&plane.client, &played, nodes).await?;
    fill::deployments(&plane.client, &played, (nodes / 2).max(1)).await?;
    fill::ready(&plane.client, (nodes / 2).max(1)).await?;
    let ready = started.elapsed().as_secs_f64();
    fill::copies(&plane.client, &played, nodes).await?;
    let before = plane.wait_until_quiet(&played).await?;
    let (operator, server) = plane.resident()?;
    let api: Api<ModelDeployment> = Api::default_namespaced(plane.client.clone());
    let edit = json!({"spec": {"sharding": {"kv": {"maxSequences": 3}}}});
    api.patch("d00000", &PatchParams::default(), &Patch::Merge(edit)).await?;
    played.wrote();
    let after = plane.wait_until_quiet(&played).await?;
    Ok(BenchFigures { ready, operator, server, writes: (after - before) as f64 })
}
