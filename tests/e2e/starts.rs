//! Start latency of an engine once a model with local files is requested.

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::{TestCluster, repository};

use crate::mistakes::write;
use crate::path::{delete_and_wait, serves, shards_of};

/// Number of timed starts; their median is printed.
const ROUNDS: usize = 5;

/// Applies a deployment of a ready model several times, and prints the time from the start of the command to
/// the start of the engine's process.
pub async fn starts(cluster: &mut TestCluster) -> Result<()> {
    let model = repository().join("manifests/samples/quickstart/model.yaml");
    cluster.russet(&["apply", "-f", &model.display().to_string()]).await?;
    let file = write(
        "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: soon}\n\
         spec: {modelRef: {name: smoke}, sharding: {mode: Single, kv: {contextTokens: 1024}}}\n",
    )?;
    let path = file.path().display().to_string();
    let mut times = Vec::new();
    // The first start fetches the files, and is not counted.
    for round in 0..=ROUNDS {
        let start = uptime()?;
        match cluster.kubectl() {
            Ok(kubectl) => drop(kubectl.run(&["apply", "-f", &path]).await?),
            Err(_) => drop(cluster.russet(&["apply", "-f", &path]).await?),
        }
        let applied = uptime()? - start;
        serves(cluster, "soon").await?;
        let shards = shards_of(cluster, "soon").await?;
        let pid = shards.first().and_then(|shard| shard["status"]["enginePid"].as_i64());
        let started = started(pid.context("the Shard names no engine")?)? - start;
        // A process of the previous round would have existed already.
        ensure!(started > 0.0, "the engine started {started} s before it was asked for");
        if round > 0 {
            times.push((started, applied));
        }
        delete_and_wait(cluster, "soon").await?;
    }
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (started, applied) = times[ROUNDS / 2];
    let (command, most) = (applied * 1000.0, times[ROUNDS - 1].0 * 1000.0);
    println!(
        "  engine started {:.0} ms after apply began (median of {ROUNDS}, most {most:.0}); the command took {command:.0}",
        started * 1000.0
    );
    Ok(())
}

/// Seconds since the machine started.
fn uptime() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/uptime")?;
    Ok(text.split_whitespace().next().context("/proc/uptime is empty")?.parse()?)
}

/// When a process started, in the same seconds.
fn started(pid: i64) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name, in parentheses, may contain anything; field 22 is the twentieth after it.
    let (_, rest) = stat.rsplit_once(')').context("no process status")?;
    let ticks: f64 = rest.split_whitespace().nth(19).context("no start time")?.parse()?;
    Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
}
