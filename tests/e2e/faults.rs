//! Kill -9 of each process in the middle of a stream with end-of-sequence banned. Times are printed; `cargo
//! xtask bench faults` checks them. Submodules have the other faults: frozen processes, partitioned networks,
//! full disks, copies, an edited spec, clocks that jump.

mod campaign;
pub mod clocks;
mod copies;
mod disk;
pub mod frozen;
mod memory;
pub mod network;
mod out_of_memory;
mod rollout;
mod wire;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use russet_tests::chat::{self, StreamEnd, StreamedAnswer};
use russet_tests::cluster::{TestCluster, kill};
use russet_tests::control_plane::PlaneProcess;

pub use self::copies::MODEL as HELD;
use crate::faults::campaign::Aim;
use crate::path::{self, answers};

/// Faults other than kill -9.
pub fn others() -> Vec<(&'static str, crate::Scenario)> {
    vec![
        ("losing_rank_0_to_a_freeze_breaks_no_stream", |c| Box::pin(frozen::rank(c, 0))),
        ("losing_rank_1_to_a_freeze_breaks_no_stream", |c| Box::pin(frozen::rank(c, 1))),
        ("losing_any_rank_while_it_loads_breaks_no_stream", |c| Box::pin(campaign::strike(c, Aim::Load))),
        ("losing_any_rank_while_it_joins_breaks_no_stream", |c| Box::pin(campaign::strike(c, Aim::Join))),
        ("losing_any_rank_in_a_prompt_breaks_no_stream", |c| Box::pin(campaign::strike(c, Aim::Prompt))),
        ("losing_any_rank_in_answers_breaks_no_stream", |c| Box::pin(campaign::strike(c, Aim::Answer))),
        ("losing_the_memory_of_rank_0_breaks_no_stream", |c| Box::pin(out_of_memory::rank(c, 0))),
        ("losing_the_memory_of_rank_1_breaks_no_stream", |c| Box::pin(out_of_memory::rank(c, 1))),
        ("losing_one_of_two_replicas_breaks_no_stream", |c| Box::pin(replica(c))),
        ("losing_an_agent_to_a_freeze_disturbs_no_stream", |c| Box::pin(frozen::agents(c))),
        ("losing_serve_to_a_freeze_disturbs_no_stream", |c| Box::pin(frozen::serve(c))),
        ("losing_the_gateway_to_a_freeze_only_delays_its_streams", |c| Box::pin(frozen::gateway(c))),
        ("losing_the_cable_breaks_no_stream_and_the_group_reforms", |c| Box::pin(network::cable(c))),
        ("losing_an_address_breaks_no_stream_and_the_group_reforms", |c| Box::pin(network::address(c))),
        ("losing_the_ring_breaks_no_stream_and_the_group_reforms", |c| Box::pin(network::ring(c))),
        ("losing_the_wire_of_a_ring_is_reported_and_network_is_used", |c| Box::pin(wire::wire(c))),
        ("losing_a_plan_to_an_edit_breaks_no_stream", |c| Box::pin(rollout::edit(c))),
        ("losing_a_deployment_ends_its_streams_with_typed_errors", |c| Box::pin(rollout::deletion(c))),
        ("losing_an_agents_network_alone_disturbs_no_stream", |c| Box::pin(network::agent(c))),
        ("losing_an_agent_in_a_copy_fetches_nothing_twice", |c| Box::pin(copies::killed(c))),
        ("losing_disk_space_under_a_copy_is_reported_and_it_resumes", |c| Box::pin(disk::copy(c))),
        ("losing_disk_space_of_a_machine_ends_no_process", |c| Box::pin(disk::machine(c))),
        ("losing_disk_space_of_the_store_loses_nothing_acknowledged", |c| Box::pin(disk::store(c))),
    ]
}

/// Servers that are not restarted can be lost only once.
const ONCE: [&str; 1] = ["losing_the_leader_restarts_no_group"];

/// How often a scenario runs, one after the other on the same cluster: `cargo xtask proof faults N` sets it
/// for the scenarios that lose a process.
pub fn rounds(scenario: &str) -> usize {
    let configured = std::env::var("RUSSET_FAULT_ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    if scenario.starts_with("losing_") && !ONCE.contains(&scenario) { configured.unwrap_or(1) } else { 1 }
}

/// Replaces a group that was restarted often by a new one. After 20 restarts within ten minutes a group backs
/// off on purpose, longer each time; many rounds should measure its recovery before that.
pub async fn replace_restarted_group(cluster: &mut TestCluster) -> Result<()> {
    const MAX_RESTARTS: u64 = 15;
    let groups = cluster.get("shardgroups").await?;
    let restarts = |group: &serde_json::Value| group["status"]["restarts"].as_u64().unwrap_or(0);
    if groups["items"].as_array().is_some_and(|all| all.iter().any(|group| restarts(group) >= MAX_RESTARTS)) {
        path::quickstart(cluster).await?;
        path::delete(cluster).await?;
        path::quickstart(cluster).await?;
    }
    Ok(())
}

/// Tokens of a stream to disturb: one is read, more than 100 are still to come.
pub const TOKENS: u32 = 400;

/// Reads on after the fault and requires that at least 100 tokens were still to come.
pub async fn finish_undisturbed(answer: &mut StreamedAnswer) -> Result<()> {
    let before = answer.pieces;
    let end = answer.finish().await;
    ensure!(
        end == StreamEnd::Finished("length".into()),
        "the stream ended with {end:?} after {} pieces",
        answer.pieces
    );
    ensure!(answer.pieces >= before + 100, "only {} pieces came after the fault", answer.pieces - before);
    Ok(())
}

/// Reads on after the loss of the engine and requires that another resumes the stream, with every token sent
/// once; returns how long it stalled.
pub async fn finish_resumed(answer: &mut StreamedAnswer, undisturbed: &str) -> Result<Duration> {
    let (before, mut last, mut longest) = (answer.pieces, Instant::now(), Duration::ZERO);
    let end = loop {
        match answer.piece().await {
            Ok(_) => {
                let now = Instant::now();
                longest = longest.max(now - std::mem::replace(&mut last, now));
            }
            Err(end) => break end,
        }
    };
    ensure!(answer.text == undisturbed, "the text changed, to its {end:?}:\n{}\n{undisturbed}", answer.text);
    ensure!(end == StreamEnd::Finished("length".into()), "the stream ended with {end:?}");
    ensure!(answer.pieces >= before + 100, "only {} pieces came after the fault", answer.pieces - before);
    Ok(longest)
}

/// Streams that the gateway has resumed on another engine so far.
pub async fn resumed_count(cluster: &TestCluster) -> Result<u64> {
    let metrics = cluster.base_url().replace("/v1", "/metrics");
    let text = chat::client()?.get(metrics).send().await?.text().await?;
    let counted = text
        .lines()
        .filter(|line| line.starts_with("russet_gateway_request_continued_total"))
        .filter(|line| line.contains("outcome=\"continued\""));
    counted.map(|line| Ok(line.rsplit(' ').next().unwrap_or_default().parse::<u64>()?)).sum()
}

/// The text of an undisturbed stream, which is the same every time: greedy, one model.
pub async fn expected(cluster: &mut TestCluster) -> Result<String> {
    static TEXT: OnceLock<String> = OnceLock::new();
    // Idempotent, so that the faults can be run alone.
    path::quickstart(cluster).await?;
    if let Some(text) = TEXT.get() {
        return Ok(text.clone());
    }
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    let end = answer.finish().await;
    ensure!(end == StreamEnd::Finished("length".into()), "an undisturbed stream ended with {end:?}");
    Ok(TEXT.get_or_init(|| answer.text).clone())
}

/// Kills the processes of a role, and returns their ids.
fn kill_role(cluster: &TestCluster, role: PlaneProcess) -> Result<Vec<i32>> {
    let pids = cluster.pids(role)?;
    pids.iter().for_each(|pid| kill(*pid));
    Ok(pids)
}

/// Waits until new processes run instead of the killed ones.
async fn until_replaced(cluster: &mut TestCluster, role: PlaneProcess, killed: &[i32]) -> Result<()> {
    cluster
        .until("others run in place of the killed", async |cluster| {
            Ok(cluster.pids(role).is_ok_and(|now| now.iter().all(|pid| !killed.contains(pid))))
        })
        .await
}

/// The API server and operator die: no stream is affected.
pub async fn serve(cluster: &mut TestCluster) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    let killed = kill_role(cluster, PlaneProcess::Serve)?;
    let struck = Instant::now();
    until_replaced(cluster, PlaneProcess::Serve, &killed).await?;
    cluster
        .until("the API answers", async |cluster| Ok(cluster.get("modeldeployments smoke").await.is_ok()))
        .await?;
    println!("fault: serve killed, API back = {:.2}", struck.elapsed().as_secs_f64());
    finish_undisturbed(&mut answer).await?;
    ensure!(answer.text == undisturbed, "the text changed:\n{}\n{undisturbed}", answer.text);
    path::ready(cluster).await?;
    check_invariants(cluster).await
}

/// Each agent dies: its engine keeps running and is adopted.
pub async fn agents(cluster: &mut TestCluster) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    for near in [true, false] {
        let engines = cluster.engines().await?;
        let mut answer = path::long_answer(cluster, TOKENS).await?;
        let killed = match near {
            true => kill_role(cluster, PlaneProcess::Agent)?,
            false => {
                kill(cluster.far_agent()?);
                Vec::new()
            }
        };
        let struck = Instant::now();
        let killed_at = renew_time(cluster, if near { "node-a" } else { "node-b" }).await?;
        if near {
            until_replaced(cluster, PlaneProcess::Agent, &killed).await?;
        } else {
            cluster.restart_far_agent().await?;
        }
        until_renewed(cluster, if near { "node-a" } else { "node-b" }, killed_at).await?;
        println!(
            "fault: agent of {} killed, Lease renewed by its successor = {:.2}",
            if near { "node-a" } else { "node-b" },
            struck.elapsed().as_secs_f64()
        );
        finish_undisturbed(&mut answer).await?;
        ensure!(answer.text == undisturbed, "the text changed:\n{}\n{undisturbed}", answer.text);
        path::ready(cluster).await?;
        ensure!(
            cluster.engines().await? == engines,
            "the engines were not adopted: {engines:?} became {:?}",
            cluster.engines().await?
        );
        check_invariants(cluster).await?;
    }
    Ok(())
}

/// The gateway dies: its connections break, engines and group stay.
pub async fn gateway(cluster: &mut TestCluster) -> Result<()> {
    path::quickstart(cluster).await?;
    let engines = cluster.engines().await?;
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    kill_role(cluster, PlaneProcess::Gateway)?;
    let struck = Instant::now();
    let end = answer.finish().await;
    ensure!(end == StreamEnd::Broken, "the gateway is dead, yet its stream ended with {end:?}");
    answers_again(cluster).await?;
    println!("fault: gateway killed, answers again = {:.2}", struck.elapsed().as_secs_f64());
    ensure!(cluster.engines().await? == engines, "engines changed");
    check_invariants(cluster).await
}

/// The process of a rank.
async fn engine_of(cluster: &TestCluster, rank: i64) -> Result<i32> {
    let engines = cluster.engines().await?;
    let found = engines.iter().find(|(known, _)| *known == rank);
    found.map(|(_, pid)| *pid).with_context(|| format!("no engine of rank {rank}: {engines:?}"))
}

/// Waits until the process of a lost rank is gone.
async fn until_ended(cluster: &mut TestCluster, pid: i32) -> Result<()> {
    let path = format!("/proc/{pid}");
    cluster
        .until("the process of the lost rank is gone", async |_| Ok(!std::path::Path::new(&path).exists()))
        .await
}

/// A rank dies: the group re-forms by itself, and its streams resume.
pub async fn rank(cluster: &mut TestCluster, rank: i64) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    let engines = cluster.engines().await?;
    let pid = engine_of(cluster, rank).await?;
    let before = resumed_count(cluster).await?;
    let mut answers = [path::long_answer(cluster, TOKENS).await?, path::long_answer(cluster, TOKENS).await?];
    kill(pid);
    let mut longest = Duration::ZERO;
    for answer in &mut answers {
        longest = longest.max(finish_resumed(answer, &undisturbed).await?);
    }
    println!("fault: rank {rank} killed, streams stood still = {:.2}", longest.as_secs_f64());
    answers_again(cluster).await?;
    let continued = resumed_count(cluster).await? - before;
    ensure!(continued == 2, "of two streams {continued} went on elsewhere");
    path::ready(cluster).await?;
    let now = cluster.engines().await?;
    ensure!(now.iter().all(|(_, new)| *new != pid), "the dead engine is still named");
    let survivors = engines.iter().filter(|(known, _)| *known != rank);
    for survivor in survivors {
        ensure!(now.contains(survivor), "rank {} read its weights again: {engines:?}, {now:?}", survivor.0);
    }
    check_invariants(cluster).await
}

/// One of two replicas dies: the other resumes its streams at once.
pub async fn replica(cluster: &mut TestCluster) -> Result<()> {
    path::quickstart(cluster).await?;
    let twice = "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: twice}\nspec:\n  \
                 modelRef: {name: smoke}\n  replicas: 2\n  sharding:\n    mode: Single\n    \
                 kv: {contextTokens: 1024, maxSequences: 4}\n";
    crate::mistakes::apply(cluster, twice).await?;
    cluster
        .until("both replicas answer", async |cluster| {
            Ok(cluster.get("modeldeployments twice").await?["status"]["readyReplicas"] == 2)
        })
        .await?;
    let mut undisturbed = path::long_answer_of(cluster, "twice", TOKENS).await?;
    let end = undisturbed.finish().await;
    ensure!(end == StreamEnd::Finished("length".into()), "an undisturbed stream ended with {end:?}");
    let before = resumed_count(cluster).await?;
    let (mut answers, mut groups) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let answer = path::long_answer_of(cluster, "twice", TOKENS).await?;
        groups.push(group_of(&cluster.base_url(), &answer.request_id).await?);
        answers.push(answer);
    }
    // Where both are expected to be quicker at one replica, both are there.
    let lost = groups.iter().filter(|group| **group == groups[0]).count();
    let shards = path::shards_of(cluster, "twice").await?;
    let mut shards = shards.iter();
    let of_first = shards.find(|shard| shard["spec"]["groupRef"]["name"] == groups[0]);
    let pid = of_first.and_then(|shard| shard["status"]["enginePid"].as_i64()).context("no engine")?;
    kill(pid as i32);
    let mut longest = Duration::ZERO;
    for answer in &mut answers {
        longest = longest.max(finish_resumed(answer, &undisturbed.text).await?);
    }
    println!("fault: one of two replicas killed, streams stood still = {:.2}", longest.as_secs_f64());
    let continued = resumed_count(cluster).await? - before;
    let lost = u64::try_from(lost)?;
    ensure!(continued == lost, "{continued} of two streams went on elsewhere, and {lost} had to");
    path::serves(cluster, "twice").await?;
    path::delete_and_wait(cluster, "twice").await?;
    check_invariants(cluster).await
}

/// Name of the group that a request was sent to, as the log of the gateway with this base URL has it.
pub async fn group_of(gateway: &str, request_id: &str) -> Result<String> {
    let url = format!("{}/requests/{request_id}/why", gateway.trim_end_matches("/v1"));
    let record: serde_json::Value = chat::client()?.get(url).send().await?.json().await?;
    let group = record["attempts"][0]["group"].as_str().context("the log has no attempt of the request")?;
    Ok(group.split_once('/').map_or(group, |(_, name)| name).to_owned())
}

/// Retries until there is an answer, as a user would after an error.
pub async fn answers_again(cluster: &mut TestCluster) -> Result<()> {
    cluster
        .until("a question is answered", async |cluster| {
            Ok(chat::answer(&cluster.base_url(), "smoke", "What is 17 + 25?").await.is_ok())
        })
        .await
}

/// Invariants after every fault: memory was granted once, and answers are correct.
pub async fn check_invariants(cluster: &mut TestCluster) -> Result<()> {
    memory::is_granted_once(cluster).await?;
    check_answers(cluster).await
}

/// Waits until agents and operator have worked after a fault of the API server: any wrong action would have
/// happened by then.
pub async fn until_caught_up(cluster: &mut TestCluster) -> Result<()> {
    for node in ["node-a", "node-b"] {
        let before = renew_time(cluster, node).await?;
        until_renewed(cluster, node, before).await?;
    }
    // The operator reconciles a new deployment.
    crate::mistakes::unknown_model(cluster).await
}

async fn check_answers(cluster: &TestCluster) -> Result<()> {
    answers(cluster, "smoke").await?;
    Ok(())
}

/// When a node's Lease was last renewed.
async fn renew_time(cluster: &TestCluster, node: &str) -> Result<String> {
    let lease = cluster.get(&format!("leases node-{node} -n russet-system")).await?;
    lease["spec"]["renewTime"].as_str().map(str::to_owned).context("a Lease without renewTime")
}

/// Waits until the Lease is renewed.
async fn until_renewed(cluster: &mut TestCluster, node: &str, before: String) -> Result<()> {
    cluster
        .until("the Lease is renewed", async |cluster| Ok(renew_time(cluster, node).await? != before))
        .await
}
