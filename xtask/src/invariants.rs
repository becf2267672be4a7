//! The invariants of the workspace: the rule, and the tests and tidy checks that execute it. This table
//! is the source; `docs/invariants.md` is generated from it, and ARCHITECTURE.md has a line for each.
//! Not here: whether the executors exist and the documents agree (`tidy/invariants.rs`).

use std::fmt::Write as _;

/// The generated page.
pub const PAGE: &str = "docs/invariants.md";

/// One invariant. Its number is its position in [`INVARIANTS`], from 1.
pub struct Invariant {
    /// The rule in a few words, as ARCHITECTURE.md has it.
    pub title: &'static str,
    /// The rule.
    pub rule: &'static str,
    /// Tests, tidy checks or test files, the main one first. Without any, the rule is not executed yet.
    pub executors: &'static [&'static str],
}

/// The line that ARCHITECTURE.md has for an invariant.
pub fn line(number: usize, invariant: &Invariant) -> String {
    let main = match invariant.executors.first() {
        Some(name) => format!("`{name}`"),
        None => "not yet".to_owned(),
    };
    format!("- **I{number} {}.** {main}", invariant.title)
}

/// The text of [`PAGE`]. `place` says which file has an executor.
pub fn page(invariants: &[Invariant], place: impl Fn(&str) -> Option<String>) -> String {
    let mut page = String::from(
        "# Invariants\n\n<!-- Generated from xtask/src/invariants.rs by `cargo xtask tidy --write`. -->\n\n\
         Rules that the code keeps everywhere, and what executes each: tests, and checks of \
         `cargo xtask tidy`.\nThe main executor stands first. [ARCHITECTURE.md](../ARCHITECTURE.md) has a \
         line for each rule.\n",
    );
    for (number, invariant) in (1..).zip(invariants) {
        // Writing to a String cannot fail.
        let _ = write!(page, "\n## I{number} {}\n\n{}\n\n", invariant.title, invariant.rule);
        if invariant.executors.is_empty() {
            page.push_str("Not executed yet.\n");
        }
        for name in invariant.executors {
            let _ = match place(name) {
                Some(path) if path != *name => writeln!(page, "- `{name}` ({path})"),
                _ => writeln!(page, "- `{name}`"),
            };
        }
    }
    page
}

/// Every invariant, in the order of their numbers.
pub const INVARIANTS: &[Invariant] = &[
    Invariant {
        title: "Planning is pure",
        rule: "`plan` reaches no runtime, clock, randomness or client. Planning an applied plan again \
               changes nothing.",
        executors: &["plan_is_pure", "thousands_of_random_clusters_never_break_a_rule_and_always_settle"],
    },
    Invariant {
        title: "The operator binds; an agent grants or refuses, with numbers",
        rule: "A Shard names its node before any agent sees it. Agents never race for work: each grants \
               or refuses what was bound to it, with numbers.",
        executors: &["no_byte_is_granted_twice", "a_refusal_shows_the_agents_numbers"],
    },
    Invariant {
        title: "Every field has one writer",
        rule: "Each field of an object has one writer, by server-side apply. RBAC and admission \
               policies hold each component to its own fields.",
        executors: &[
            "managers_own_fields_and_conflict_over_them",
            "every_binding_names_a_shipped_role_and_nobody_may_do_everything",
            "a_node_does_its_own_work_and_nothing_else",
            "a_role_that_gives_too_much_gives_nothing",
            "labels_are_the_operators_and_no_node_gives_itself_any",
            "every_kind_of_write_is_asked_about_and_nothing_is_stored_against_a_policy",
            "replicas_follow_demand_and_sleep_without_it",
        ],
    },
    Invariant {
        title: "A rank is disposable",
        rule: "A lost or hung rank raises the epoch of its group. A rank of an older epoch is killed or \
               joins the next formation, as its agent is told.",
        executors: &[
            "any_loss_begins_a_new_epoch_without_peers",
            "what_hangs_is_seen_in_time_and_what_works_is_left_alone",
            "a_healthy_rank_is_always_within_its_forecast_times_five",
            "an_engine_that_stands_still_is_killed_and_its_group_forms_anew",
            "a_rank_that_waits_for_one_it_cannot_hear_gives_up_soon_and_one_that_rests_later",
            "a_rank_that_dies_or_freezes_ends_the_stream_with_a_typed_error",
            "losing_rank_0_breaks_no_stream_and_the_group_forms_anew",
            "losing_rank_0_to_a_freeze_breaks_no_stream",
            "losing_any_rank_while_it_loads_breaks_no_stream",
            "losing_any_rank_while_it_joins_breaks_no_stream",
            "losing_the_cable_breaks_no_stream_and_the_group_forms_anew",
            "losing_the_ring_alone_breaks_no_stream_and_the_group_forms_anew",
            "losing_an_agents_network_alone_disturbs_no_stream",
            "every_state_has_one_next_step",
            "a_rank_that_is_left_forms_the_group_anew_and_reads_no_weights",
            "a_rank_without_its_group_is_the_next_formations_once_and_only_as_it_is",
            "an_engine_that_lost_its_group_is_of_the_next_one_and_replaced_if_it_cannot_be",
            "what_was_computed_without_a_neighbour_is_kept_nowhere",
        ],
    },
    Invariant {
        title: "Only a node's agent grants its memory",
        rule: "A node's memory is granted by its agent alone. It is reused only after the agent has \
               released it. Every fault of the end-to-end suite adds up what living engines were \
               granted.",
        executors: &[
            "memory_is_free_only_when_the_agent_has_released_it",
            "a_holder_that_asks_again_with_its_process_alive_needs_no_second_room",
            "losing_serve_disturbs_no_stream",
            "losing_an_agent_disturbs_no_stream",
        ],
    },
    Invariant {
        title: "Tokens never cross the control plane",
        rule: "Prompts and tokens travel between gateway and engine only. A stream survives the loss of \
               the API server and of the operator.",
        executors: &[
            "losing_serve_disturbs_no_stream",
            "the_gateway_follows_the_cluster_and_outlives_its_api_server",
        ],
    },
    Invariant {
        title: "Only verified bytes are served",
        rule: "Engines and other machines get only bytes that were verified against the model's digests.",
        executors: &[
            "a_folder_is_there_only_whole_and_holds_only_what_was_verified",
            "bytes_that_are_not_those_promised_are_never_published",
            "chunks_prove_the_file_that_blake3_hashes_whole",
            "a_manifest_of_another_machine_is_held_against_the_id",
            "bytes_that_are_not_the_models_are_found_and_come_from_another_node",
            "a_pin_holds_whatever_the_node_says_that_fetched_first",
            "every_bit_that_changes_on_the_way_is_caught",
            "a_store_that_is_killed_while_it_receives_goes_on_with_what_was_right",
            "a_store_that_is_killed_while_it_fetches_goes_on",
            "an_object_that_is_replaced_meanwhile_is_listed_anew_and_never_mixed",
            "layers_that_lie_and_manifests_that_are_no_models_are_refused",
        ],
    },
    Invariant {
        title: "Weights are data",
        rule: "No code of a model runs. Chat templates render with limits on work and output.",
        executors: &[
            "only_data_of_the_models_own_folder_is_taken",
            "hostile_and_broken_templates_end_with_an_error",
            "names_that_lead_elsewhere_are_left_or_refused_and_never_written",
        ],
    },
    Invariant {
        title: "Private data stays home",
        rule: "There are no external providers in this release, so nothing executes this yet.",
        executors: &[],
    },
    Invariant {
        title: "A stream never just ends",
        rule: "Every stream ends with a finish reason or a typed error. A lost engine ends no stream \
               that another engine can resume: each token is sent once, and greedy answers are what \
               they would have been.",
        executors: &[
            "an_answer_cut_after_any_token_goes_on_as_if_nothing_had_been",
            "every_way_an_engine_says_no_has_its_status_before_and_its_code_within_an_answer",
            "a_bug_ends_streams_and_rank_alike",
            "whoever_comes_and_goes_every_request_ends_once_and_as_if_it_were_alone",
            "an_answer_cut_after_any_token_is_the_answer_that_was_not",
            "an_answer_goes_on_with_another_group_as_it_would_have",
            "an_answer_that_nobody_can_go_on_with_ends_with_a_typed_error",
            "losing_rank_1_breaks_no_stream_and_the_group_forms_anew",
            "losing_any_rank_in_a_prompt_breaks_no_stream",
            "losing_any_rank_in_answers_breaks_no_stream",
            "whoever_comes_and_goes_every_answer_is_what_it_is_alone_and_nothing_is_lost",
            "numbers_that_are_none_end_one_request_and_leave_nothing_to_others",
            "losing_a_plan_to_an_edit_breaks_no_stream",
            "losing_a_deployment_ends_its_streams_typed",
        ],
    },
    Invariant {
        title: "The API server knows no Russet kind",
        rule: "`apiserver` depends on no crate of kinds and names no group of ours.",
        executors: &["the_api_server_knows_none_of_our_kinds"],
    },
    Invariant {
        title: "Secure by default",
        rule: "Components authenticate each other with mutual TLS. Listeners stay on loopback until \
               they are opened; an open listener needs keys, and one client cannot take every \
               connection.",
        executors: &[
            "strangers_are_refused",
            "only_the_pinned_ca_is_believed_and_only_for_its_own_addresses",
            "loopback_is_open_until_a_key_exists_and_the_network_never_is",
            "a_user_may_do_what_a_role_says_and_nothing_else",
            "a_token_is_one_machines",
            "only_a_request_that_is_exactly_right_and_its_own_is_approved",
            "streams_outlive_their_certificates_and_new_connections_take_the_new_ones",
            "what_is_not_there_is_an_error_and_never_false",
            "strangers_are_turned_away_and_the_neighbour_still_gets_in",
            "a_certificate_is_renewed_in_its_own_life_of_a_name_only",
            "an_approved_join_is_signed_for_the_machine_its_token_is_written_down_for",
            "an_authority_signs_with_the_key_of_its_first_certificate_alone",
            "where_certificates_are_believed_a_join_token_is_good_for_one_and_nothing_else",
            "another_ca_takes_the_place_of_the_first_and_no_node_joins_anew",
            "who_says_nothing_makes_room_and_nobody_waits_for_it",
            "one_machine_cannot_take_every_connection",
            "who_opens_many_handshakes_ends_its_own",
            "one_key_does_not_take_the_room_of_the_others",
            "who_fetches_may_read_the_secret_of_the_source_until_it_has_the_files",
        ],
    },
    Invariant {
        title: "Status is not telemetry",
        rule: "Copy progress is written at most once in 2 s. Other figures are written on change, or \
               seldom; that half has no executor yet.",
        executors: &["progress_is_told_once_in_two_seconds_at_most"],
    },
    Invariant {
        title: "Acknowledged writes are durable",
        rule: "What the store acknowledged survives kill -9 of its process, a full disk and the loss of \
               etcd's network.",
        executors: &[
            "what_was_acknowledged_is_there_after_reopening",
            "a_kill_in_the_middle_of_writing_loses_nothing_that_was_acknowledged",
            "losing_the_room_on_the_stores_disk_loses_nothing_acknowledged",
            "losing_the_network_of_etcd_disturbs_no_stream",
            "a_write_that_begins_anew_gets_no_new_time",
            "nothing_is_asked_after_the_deadline",
        ],
    },
    Invariant {
        title: "Crates depend as drawn; unsafe code stays in `engine/mlx`",
        rule: "Unsafe code lives in `engine/mlx`. Only the engine links MLX. There is one TLS provider.",
        executors: &[
            "crates_depend_as_drawn",
            "unsafe_stays_in_engine_mlx",
            "only_the_engine_links_mlx",
            "one_tls_provider",
            "wire_and_crds_have_no_client",
            "every_crate_obeys_the_workspace_lints",
        ],
    },
    Invariant {
        title: "Every file says what it is",
        rule: "Every source file opens with what it is. No unfinished work is left in a comment, and \
               every invariant has an executor that exists.",
        executors: &[
            "files_say_what_they_are",
            "no_work_is_left_in_comments",
            "every_invariant_is_executed",
            "invariants_page_is_generated",
            "architecture_lists_every_invariant",
            "architecture_is_short",
        ],
    },
    Invariant {
        title: "Same tokens as mlx-lm",
        rule: "Greedy tokens equal mlx-lm's on one rank, on pipelines of 2 and 3, on tensor groups of 2 \
               and 4 (against mlx-lm sharded over as many processes) and on 2 × 2.",
        executors: &["engine/tests/exactness/main.rs"],
    },
    Invariant {
        title: "Releases one apart interoperate, never within one group",
        rule: "Components one release apart work together. A group never mixes releases.",
        executors: &[
            "engines_of_two_releases_are_not_put_into_one_group",
            "every_kind_is_read_with_words_and_fields_of_a_newer_release",
            "a_plan_of_a_newer_release_is_left_alone",
            "an_unknown_failure_is_internal_and_keeps_its_words",
        ],
    },
    Invariant {
        title: "Predictions are judged by published measurements",
        rule: "Predicted rates stay within stated bounds of published measurements. Fitted constants \
               are the optimum on the rows they were fitted on.",
        executors: &[
            "published_rates_are_predicted_within_the_bounds",
            "the_constants_are_the_best_on_the_rows_they_were_fitted_on",
            "rates_that_were_never_fitted_are_predicted_too",
        ],
    },
    Invariant {
        title: "A change of a pool moves nothing that runs",
        rule: "The planner sees the pools of a deployment as a set of eligible nodes and the links they \
               need. A running replica stays until its spec is edited.",
        executors: &[
            "a_node_that_leaves_its_pool_keeps_what_runs_and_an_edit_moves_it",
            "a_deployment_runs_in_its_pool_and_stays_when_the_node_leaves_it",
        ],
    },
    Invariant {
        title: "A rank's reservation covers MLX's peak",
        rule: "MLX never takes more memory than the planner reserved. Models over a gigabyte are judged \
               by `cargo xtask proof memory`.",
        executors: &[
            "engines_never_take_more_than_was_planned",
            "the_room_is_never_overdrawn_and_everybody_comes_to_an_end",
        ],
    },
    Invariant {
        title: "Pending replicas are placed together, near the optimum",
        rule: "A plan is within two percent of the best one, and a second node must win clearly. \
               `russet plan` and the operator call the same functions.",
        executors: &[
            "plans_are_within_two_percent_of_the_best_there_is",
            "more_nodes_must_really_win",
            "the_pages_show_what_the_program_prints",
        ],
    },
    Invariant {
        title: "A workload group's nodes are its own",
        rule: "Nothing else is placed on the nodes of a workload group. They stay its own while it \
               needs them.",
        executors: &[
            "workload_groups_have_nodes_of_their_own_and_keep_them",
            "every_workload_group_has_nodes_of_its_own_that_hold_all_of_it",
            "nodes_stay_their_groups_and_grow_with_it",
        ],
    },
    Invariant {
        title: "No story breaks a promise",
        rule: "Whatever is applied, edited, drained, lost or refused, and wherever the operator \
               restarts between two writes: no byte and no port is granted twice, no request goes \
               unserved while a replica serves, and the cluster converges.",
        executors: &["every_script_comes_out_as_written", "stories_drawn_at_random_break_no_promise"],
    },
    Invariant {
        title: "No replica preempts its equal",
        rule: "Preemption needs a higher priority, the end of the tier's minimum residency and every \
               required approval. Freed room belongs to the preemptor, so replicas never evict each \
               other in turns. The simulator's ledger checks it in every script.",
        executors: &[
            "what_is_more_important_has_others_make_room_once_somebody_says_yes",
            "every_script_comes_out_as_written",
            "tiers_on_four_nodes_roll_ask_preempt_and_drain",
        ],
    },
    Invariant {
        title: "No needed file is evicted",
        rule: "Files that a replica reads, that are pinned or that `Always` needs for its number stay. \
               The others are evicted only for wanted files that then fit.",
        executors: &[
            "ten_thousand_random_clusters_keep_every_promise",
            "files_are_there_before_they_are_needed_and_make_room_in_order",
        ],
    },
    Invariant {
        title: "A model that will answer rejects no request",
        rule: "The gateway holds requests within bounds until a replica answers. Held requests wake a \
               sleeping model.",
        executors: &[
            "a_request_is_held_until_a_replica_answers_and_counted_meanwhile",
            "what_is_held_is_bounded_and_a_client_that_leaves_makes_room",
            "those_that_were_held_are_not_turned_away_by_the_replica_that_woke",
            "a_sleeping_model_is_woken_by_a_request_that_is_held",
        ],
    },
    Invariant {
        title: "A machine outlives its models",
        rule: "An agent kills a rank before the kernel has to kill anything. One deployment does not \
               bring a machine down three times.",
        executors: &[
            "an_engine_that_takes_far_more_than_it_was_granted_is_ended",
            "who_holds_far_more_than_was_granted_is_ended_whatever_is_left",
            "a_machine_at_its_end_loses_the_rank_that_is_to_blame_and_only_one_at_a_time",
            "after_two_panics_of_a_machine_the_deployment_is_held_there",
        ],
    },
    Invariant {
        title: "Only the root helper changes the network",
        rule: "The helper stays within its owner's bounds and can undo each change: the way back is on \
               disk before the change is made.",
        executors: &[
            "a_helper_that_is_killed_at_any_step_can_take_everything_back",
            "nobody_gets_more_out_of_the_helper_than_its_owner_allows",
            "a_user_that_is_not_named_is_not_heard",
            "what_is_applied_is_there_once_and_taken_back_wholly",
            "a_restart_forgets_what_was_for_its_time_and_makes_again_what_is_kept",
            "what_a_spec_asks_of_a_network_its_machine_is_and_what_it_no_longer_asks_is_taken_back",
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::{Invariant, line, page};

    const RULES: &[Invariant] = &[
        Invariant { title: "A", rule: "A holds.", executors: &["a_holds", "tests/a.rs"] },
        Invariant { title: "B", rule: "B will hold.", executors: &[] },
    ];

    #[test]
    fn lines_name_the_main_executor() {
        assert_eq!(line(1, &RULES[0]), "- **I1 A.** `a_holds`");
        assert_eq!(line(2, &RULES[1]), "- **I2 B.** not yet");
    }

    #[test]
    fn page_lists_rules_with_executors_and_files() {
        let page = page(RULES, |name| (name == "a_holds").then(|| "tests/b.rs".to_owned()));
        assert!(page.ends_with(
            "## I1 A\n\nA holds.\n\n- `a_holds` (tests/b.rs)\n- `tests/a.rs`\n\n## I2 B\n\nB will hold.\n\n\
             Not executed yet.\n"
        ));
    }
}
