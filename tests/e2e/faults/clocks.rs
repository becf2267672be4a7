//! Clocks that jump: `RUSSET_CLOCKS` gives each machine a clock of its own, which is set forward and back in
//! the middle of streams.

use std::time::Instant;

use anyhow::{Result, ensure};
use jiff::Timestamp;
use russet_tests::clock::Clock;
use russet_tests::cluster::TestCluster;
use russet_tests::lab::LabMachine;

use super::{TOKENS, check_invariants, expected, finish_undisturbed};
use crate::path;

/// Scenarios that replace the usual ones.
pub fn scenarios() -> Vec<(&'static str, crate::Scenario)> {
    vec![
        ("losing_the_time_on_the_far_machine_disturbs_no_stream", |c| Box::pin(jump(c, false))),
        ("losing_the_time_on_the_near_machine_disturbs_no_stream", |c| Box::pin(jump(c, true))),
    ]
}

/// Offsets in seconds, one after the other: five minutes, an hour and a day, forward, back, and correct
/// again.
const JUMPS: [i64; 7] = [300, -300, 3_600, -3_600, 86_400, -86_400, 0];

/// The clock of one machine jumps, for all its processes.
async fn jump(cluster: &mut TestCluster, near: bool) -> Result<()> {
    let machine = if near { cluster.lab.near.clone() } else { cluster.lab.far.clone() };
    let clock = cluster.clock(&machine)?;
    let outcome = jumps(cluster, &machine, &clock).await;
    // Correct again for the next scenario, whatever happened.
    clock.set(0)?;
    outcome
}

async fn jumps(cluster: &mut TestCluster, machine: &LabMachine, clock: &Clock) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    let engines = cluster.engines().await?;
    for seconds in JUMPS {
        let mut answer = path::long_answer(cluster, TOKENS).await?;
        let mut before = Vec::new();
        for node in ["node-a", "node-b"] {
            before.push((node, super::renew_time(cluster, node).await?));
        }
        clock.set(seconds)?;
        let struck = Instant::now();
        finish_undisturbed(&mut answer).await?;
        ensure!(answer.text == undisturbed, "the text changed:\n{}\n{undisturbed}", answer.text);
        for (node, before) in before {
            super::until_renewed(cluster, node, before).await?;
        }
        // The Lease may have been renewed once more with the previous clock.
        let what = format!("the Lease of {} shows a clock {seconds} s off", machine.name);
        cluster
            .until(&what, async |cluster| {
                let renewed: Timestamp = super::renew_time(cluster, &machine.name).await?.parse()?;
                Ok((renewed.as_second() - Timestamp::now().as_second() - seconds).abs() < 60)
            })
            .await?;
        println!(
            "fault: clock of {} {seconds:+} s off, both Leases renewed = {:.2} of 30",
            machine.name,
            struck.elapsed().as_secs_f64()
        );
        path::ready(cluster).await?;
        ensure!(cluster.engines().await? == engines, "the engines changed: {engines:?}");
        check_invariants(cluster).await?;
    }
    Ok(())
}
