//! End-to-end scenarios and fault injection: real processes on two machines, one cluster for all scenarios,
//! which run one after the other.

mod adapters;
mod agent_prompts;
mod benchmarks;
mod catalog;
mod completions;
mod copies;
mod drafts;
mod embeddings;
mod faults;
mod four_nodes;
mod gitops;
mod keys;
mod mistakes;
mod path;
mod pipeline_kills;
mod pipelines;
mod pools;
mod priorities;
mod prometheus;
mod restores;
mod scaling;
mod servers;
mod skew;
mod starts;
mod tiers;
mod tools;
mod vllm_cases;

use std::sync::Arc;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};
use russet_tests::cluster::{TestCluster, repository};
use russet_tests::control_plane::PlaneKind;

/// One scenario on the shared cluster.
type Scenario = for<'a> fn(&'a mut TestCluster) -> futures::future::LocalBoxFuture<'a, Result<()>>;

/// Every scenario, in order: read-only ones first, destructive ones last.
fn scenarios() -> Vec<(&'static str, Scenario)> {
    if std::env::var_os("RUSSET_FAR_BIN").is_some() {
        return skew::scenarios();
    }
    if std::env::var_os(russet_tests::clock::CLOCKS_VARIABLE).is_some() {
        return faults::clocks::scenarios();
    }
    if std::env::var_os("RUSSET_SEEN").is_some() {
        return prometheus::scenarios();
    }
    let mut scenarios = everywhere();
    scenarios.extend(faults::others());
    match PlaneKind::from_environment() {
        Ok(PlaneKind::Etcd) => scenarios.extend(on_etcd()),
        Ok(PlaneKind::Embedded) => scenarios.extend(embedded()),
        _ => {}
    }
    match std::env::var(PART) {
        Ok(selected) => part(scenarios, &selected),
        Err(_) => scenarios,
    }
}

/// Selects part of the scenarios: `0/2` those at even positions, `1/2` the others.
const PART: &str = "RUSSET_PART";

/// Scenarios that others depend on: after the first the quickstart serves, and after the second the machines
/// are empty.
const ALWAYS: [&str; 2] =
    ["quickstart_becomes_ready_with_two_shards_on_two_nodes", "a_deleted_deployment_leaves_nothing"];

/// The scenarios of this part.
fn part(scenarios: Vec<(&'static str, Scenario)>, selected: &str) -> Vec<(&'static str, Scenario)> {
    let numbers =
        selected.split_once('/').and_then(|(part, of)| Some((part.parse().ok()?, of.parse().ok()?)));
    let (part, of): (usize, usize) = numbers.unwrap_or_else(|| panic!("{PART}={selected} is not like 0/2"));
    let falls = |(place, (name, _)): &(usize, (&str, Scenario))| place % of == part || ALWAYS.contains(name);
    scenarios.into_iter().enumerate().filter(falls).map(|(_, scenario)| scenario).collect()
}

/// Scenarios for several servers on one etcd; the second one does not come back once it led.
fn on_etcd() -> Vec<(&'static str, Scenario)> {
    vec![
        ("losing_a_member_of_etcd_stops_no_write", |c| Box::pin(servers::member(c))),
        ("losing_the_leader_restarts_no_group", |c| Box::pin(servers::leader(c))),
        // Afterwards the leader is unknown, so it comes after the scenario that must know it.
        ("losing_the_network_of_etcd_disturbs_no_stream", |c| Box::pin(servers::cut(c))),
    ]
}

/// Scenarios for the server whose objects are in a file.
fn embedded() -> Vec<(&'static str, Scenario)> {
    vec![
        ("losing_an_open_api_server_disturbs_no_stream", |c| Box::pin(faults::network::closed(c))),
        ("a_restored_store_is_followed_by_what_runs", |c| Box::pin(restores::restore(c))),
    ]
}

fn everywhere() -> Vec<(&'static str, Scenario)> {
    vec![
        ("quickstart_becomes_ready_with_two_shards_on_two_nodes", |c| Box::pin(path::quickstart(c))),
        ("every_smoke_prompt_is_answered_right", |c| Box::pin(path::smoke_prompts(c))),
        ("the_doctor_finds_nothing_and_proves_every_machine", |c| Box::pin(path::doctor(c))),
        ("every_process_shows_health_and_metrics", |c| Box::pin(path::metrics(c))),
        ("the_openai_sdk_works", |c| Box::pin(path::openai_sdk(c))),
        ("a_model_without_a_chat_template_continues_texts", |c| Box::pin(completions::completions(c))),
        ("the_openai_sdk_passes_its_own_tests", |c| Box::pin(completions::openai_resources(c))),
        ("cases_of_vllm_hold_through_the_gateway", |c| Box::pin(vllm_cases::tables(c))),
        ("minilm_embeds_through_the_openai_sdk", |c| Box::pin(embeddings::minilm(c))),
        ("every_family_calls_tools_and_is_answered", |c| Box::pin(tools::rounds(c))),
        ("a_disconnect_frees_the_slot", |c| Box::pin(path::disconnect(c))),
        ("benchmarks_run_once_and_one_at_a_time", |c| Box::pin(benchmarks::benchmarks(c))),
        ("a_run_asks_a_person_and_outlives_its_gateway", |c| Box::pin(pipelines::chain(c))),
        ("a_run_of_a_real_model_outlives_its_killed_gateways", |c| Box::pin(pipeline_kills::kills(c))),
        ("keys_open_the_gateway_and_revoking_them_does_not", |c| Box::pin(keys::keys(c))),
        ("a_key_sets_priority_length_and_deadline_of_answers", |c| Box::pin(priorities::turns(c))),
        ("an_unknown_model_is_named", |c| Box::pin(mistakes::unknown_model(c))),
        ("an_unknown_field_or_type_is_named", |c| Box::pin(mistakes::unknown_field(c))),
        ("a_model_that_fits_nowhere_says_the_numbers", |c| Box::pin(mistakes::fits_nowhere(c))),
        ("a_corrupt_header_is_named", |c| Box::pin(mistakes::corrupt_header(c))),
        ("a_model_with_nan_logits_replaces_no_serving_one", |c| Box::pin(mistakes::no_numbers(c))),
        ("a_cut_download_is_resumed", |c| Box::pin(mistakes::cut_download(c))),
        ("a_port_in_use_is_named", |c| Box::pin(mistakes::port_in_use(c))),
        ("losing_serve_disturbs_no_stream", |c| Box::pin(faults::serve(c))),
        ("losing_an_agent_disturbs_no_stream", |c| Box::pin(faults::agents(c))),
        ("losing_the_gateway_breaks_its_streams_and_no_more", |c| Box::pin(faults::gateway(c))),
        ("losing_rank_0_breaks_no_stream_and_the_group_reforms", |c| Box::pin(faults::rank(c, 0))),
        ("losing_rank_1_breaks_no_stream_and_the_group_reforms", |c| Box::pin(faults::rank(c, 1))),
        ("a_deleted_deployment_leaves_nothing", |c| Box::pin(path::delete(c))),
        ("a_tensor_group_over_two_nodes_answers_every_prompt_right", |c| Box::pin(path::tensor(c))),
        ("quantised_caches_and_weights_reserve_less_and_edits_roll_out", |c| Box::pin(path::quantised(c))),
        ("a_draft_model_runs_beside_rank_0_and_changes_no_answer", |c| Box::pin(drafts::draft_model(c))),
        ("adapters_answer_beside_their_model", |c| Box::pin(adapters::adapters(c))),
        ("an_agents_next_turn_reads_little_of_its_prompt_again", |c| {
            Box::pin(agent_prompts::second_turns(c))
        }),
        ("an_engine_starts_soon_after_apply", |c| Box::pin(starts::starts(c))),
        ("files_are_preloaded_before_they_are_needed", |c| Box::pin(copies::ahead(c))),
        ("a_gated_model_is_fetched_with_a_temporarily_readable_secret", |c| Box::pin(copies::closed(c))),
        ("transfers_wait_for_their_hours_and_keep_their_rate", |c| Box::pin(copies::paced(c))),
        ("a_name_becomes_an_answer_in_one_command", |c| Box::pin(catalog::run(c))),
        ("a_deployment_of_a_pool_runs_there_as_its_strategy_says", |c| Box::pin(pools::pools(c))),
        ("a_workload_group_has_a_machine_of_its_own", |c| Box::pin(tiers::tiers(c))),
        ("tiers_on_four_nodes_roll_ask_preempt_and_drain", |c| Box::pin(four_nodes::tiers(c))),
        ("a_sleeping_model_is_woken_by_a_request_that_is_held", |c| Box::pin(scaling::sleeper(c))),
        ("twenty_requests_at_once_get_a_second_replica", |c| Box::pin(scaling::burst(c))),
        ("a_drained_node_is_empty_and_its_models_answer_elsewhere", |c| Box::pin(path::drain(c))),
        ("kubectl_applies_samples_and_prunes_them", |c| Box::pin(gitops::kubectl(c))),
        ("flux_follows_samples_and_prunes_them", |c| Box::pin(gitops::flux(c))),
    ]
}

fn main() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut arguments = Arguments::from_args();
    // One cluster, one scenario at a time: they kill processes that others would use.
    arguments.test_threads = Some(1);
    let runtime = Arc::new(tokio::runtime::Runtime::new().expect("a runtime can be made"));
    let smoke = repository().join("engine/smoke/model");
    let broken = mistakes::broken_model().expect("a broken model can be written");
    let damaged = mistakes::damaged_model().expect("a damaged model can be written");
    let own: Vec<_> =
        (1..7).map(|number| mistakes::own_model(number).expect("a model can be written")).collect();
    let models = [
        ("russet/smoke", smoke.as_path()),
        ("russet/cut", own[0].path()),
        (copies::AHEAD, own[1].path()),
        (copies::CLOSED, own[2].path()),
        (copies::PACED, own[3].path()),
        (catalog::RUN, own[4].path()),
        (faults::HELD, own[5].path()),
        ("russet/broken", broken.path()),
        (mistakes::DAMAGED, damaged.path()),
    ];
    let listing = arguments.list;
    let cluster = Arc::new(std::sync::Mutex::new(None));
    let mut trials = Vec::new();
    // A filter that no scenario matches needs no machines.
    let filter = arguments.filter.clone().unwrap_or_default();
    let any_selected = scenarios().iter().any(|(name, _)| name.contains(&filter));
    if !listing && any_selected {
        let started = runtime.block_on(TestCluster::start(&models, &mut |step| println!("▸ {step}")));
        match started {
            Ok(started) => *cluster.lock().expect("nobody else holds it yet") = Some(started),
            Err(error) => {
                println!("the cluster did not start: {error:#}");
                println!("\ntest result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out");
                std::process::exit(1);
            }
        }
    }
    for (name, scenario) in scenarios() {
        let (runtime, cluster) = (runtime.clone(), cluster.clone());
        trials.push(Trial::test(name, move || {
            let mut cluster = cluster.lock().map_err(|_| Failed::from("an earlier scenario panicked"))?;
            let cluster = cluster.as_mut().ok_or("no cluster")?;
            let started = std::time::Instant::now();
            let (mut round, rounds) = (0, faults::rounds(name));
            let result = runtime.block_on(async {
                let bound = std::time::Duration::from_secs(300);
                while round < rounds {
                    if round > 0 {
                        faults::replace_restarted_group(cluster).await?;
                    }
                    round += 1;
                    match tokio::time::timeout(bound, scenario(cluster)).await {
                        Ok(result) => result?,
                        Err(_) => anyhow::bail!("hung for 300 s\n{}", cluster.diagnostics().await),
                    }
                }
                Ok(())
            });
            let verdict = if result.is_ok() { "passed" } else { "failed" };
            println!(
                "  {name} {verdict} after {round} of {rounds}: {:.1} s",
                started.elapsed().as_secs_f64()
            );
            result.map_err(|error: anyhow::Error| Failed::from(format!("{error:#}")))
        }));
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    // A scenario that panicked leaves the lock poisoned and the machines running.
    let stopped = cluster.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    if let Some(cluster) = stopped
        && let Err(error) = runtime.block_on(cluster.stop())
    {
        println!("the cluster did not end cleanly: {error:#}");
        std::process::exit(1);
    }
    conclusion.exit();
}
