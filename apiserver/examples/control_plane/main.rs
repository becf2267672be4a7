//! The control plane's benchmark: `russet serve` against kube-apiserver with etcd and its controller manager,
//! in turn, with the same client and the same objects. Prints one line of JSON per figure; `cargo xtask bench
//! control-plane` runs it and checks the figures.
//!
//! `control_plane RUSSET ETCD KUBE_APISERVER KUBE_CONTROLLER_MANAGER`

mod load;
mod planes;

use std::path::PathBuf;

use serde_json::json;

use load::LoadFigures;
use planes::{KubernetesPlane, RussetPlane};

/// Rounds of starting, measuring and stopping each control plane; the medians are reported.
const ROUNDS: usize = 3;

/// Any error ends the benchmark.
type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let programs: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [russet, etcd, apiserver, controller_manager] = programs.as_slice() else {
        return Err("say: control_plane RUSSET ETCD KUBE_APISERVER KUBE_CONTROLLER_MANAGER".into());
    };
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        eprintln!("▸ round {round} of {ROUNDS}: russet serve");
        let plane = RussetPlane::start(russet).await?;
        ours.push(load::measure(&plane.0).await?);
        drop(plane);
        eprintln!("▸ round {round} of {ROUNDS}: kube-apiserver, etcd, kube-controller-manager");
        let plane = KubernetesPlane::start(etcd, apiserver, controller_manager).await?;
        theirs.push(load::measure(&plane.0).await?);
        drop(plane);
    }
    let tell = |what: &str, unit: &str, figure: fn(&LoadFigures) -> f64| {
        let (ours, theirs) = (median(&ours, figure), median(&theirs, figure));
        println!("{}", json!({"what": what, "ours": ours, "peer": theirs, "unit": unit}));
    };
    tell("from start to ready", "s", |it| it.ready);
    tell("resident memory, idle", "MB", |it| it.idle);
    tell("resident memory with 10,000 objects", "MB", |it| it.full);
    tell("creates, 1 client", "1/s", |it| it.creates_alone);
    tell("creates, 32 clients", "1/s", |it| it.creates_together);
    tell("from create to watch event, p50", "ms", |it| it.watch_p50);
    tell("from create to watch event, p99", "ms", |it| it.watch_p99);
    tell("list of 10,000", "ms", |it| it.list);
    Ok(())
}

fn median(rounds: &[LoadFigures], figure: fn(&LoadFigures) -> f64) -> f64 {
    let mut values: Vec<f64> = rounds.iter().map(figure).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
