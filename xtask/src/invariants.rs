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
        executors: &["plan_is_pure", "random_clusters_never_break_a_rule_and_always_settle"],
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
            "rbac_bindings_name_shipped_roles_and_grant_no_wildcard",
            "a_node_does_its_own_work_and_nothing_else",
            "an_overprivileged_role_is_still_denied_by_policy",
            "node_labels_are_set_by_the_operator_only",
            "every_write_verb_is_admitted_and_denied_writes_not_stored",
            "replicas_follow_demand_and_sleep_without_it",
        ],
    },
    Invariant {
        title: "A rank is disposable",
        rule: "A lost or hung rank raises the epoch of its group. A rank of an older epoch is killed or \
               joins the next formation, as its agent learns.",
        executors: &[
            "any_loss_begins_a_new_epoch_without_peers",
            "watchdog_detects_hangs_in_time_without_false_positives",
            "healthy_batches_stay_within_five_times_their_estimate",
            "hung_engine_is_killed_and_its_group_reforms",
            "silent_peer_fails_a_busy_rank_soon_and_an_idle_one_later",
            "dead_or_frozen_rank_fails_the_stream_with_a_typed_error",
            "losing_rank_0_breaks_no_stream_and_the_group_reforms",
            "losing_rank_0_to_a_freeze_breaks_no_stream",
            "losing_any_rank_while_it_loads_breaks_no_stream",
            "losing_any_rank_while_it_joins_breaks_no_stream",
            "losing_the_cable_breaks_no_stream_and_the_group_reforms",
            "losing_the_ring_breaks_no_stream_and_the_group_reforms",
            "losing_an_agents_network_alone_disturbs_no_stream",
            "every_shard_state_has_one_next_action",
            "surviving_rank_reforms_its_group_without_loading_weights",
            "rank_rejoins_once_and_only_with_a_compatible_config",
            "engine_rejoins_the_reformed_group_or_is_replaced",
            "nothing_computed_without_a_neighbour_is_cached",
        ],
    },
    Invariant {
        title: "Only a node's agent grants its memory",
        rule: "A node's memory is granted by its agent alone. It is reused only after the agent has \
               released it. Every fault of the end-to-end suite adds up what living engines were \
               granted.",
        executors: &[
            "memory_is_free_only_when_the_agent_has_released_it",
            "renewed_grant_with_a_live_process_counts_once",
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
            "model_folder_is_published_atomically_and_verified",
            "bytes_with_a_wrong_digest_are_never_published",
            "chunk_hashes_combine_to_the_blake3_file_hash",
            "peer_manifest_is_checked_against_its_id",
            "corrupt_bytes_are_detected_and_fetched_from_another_peer",
            "pinned_sha256_is_verified_against_peer_claims",
            "every_bit_flip_in_transit_is_detected",
            "store_killed_while_receiving_resumes_verified_chunks",
            "store_killed_while_fetching_resumes",
            "object_replaced_mid_download_is_relisted_never_mixed",
            "corrupt_layers_and_non_model_manifests_are_refused",
        ],
    },
    Invariant {
        title: "Weights are data",
        rule: "No code of a model runs. Chat templates render with limits on work and output.",
        executors: &[
            "only_allowed_data_files_of_the_model_are_fetched",
            "hostile_and_broken_templates_end_with_an_error",
            "object_names_outside_the_folder_are_never_written",
        ],
    },
    Invariant {
        title: "Private data stays home",
        rule: "A request goes to a provider only where its route, its rule, the namespaces of route and key, the key and \
               the request itself allow that zone; the narrowest counts, and nothing is the default. One function clears \
               it, the client takes no other, and connects to addresses of the zone alone.",
        executors: &[
            "no_way_leads_a_request_beyond_its_zone",
            "no_target_of_a_route_leads_beyond_any_of_its_limits",
            "an_address_of_another_zone_is_not_connected_to",
        ],
    },
    Invariant {
        title: "A stream never just ends",
        rule: "Every stream ends with a finish reason or a typed error. A lost engine ends no stream \
               that another engine can resume: each token is sent once, and greedy answers are what \
               they would have been.",
        executors: &[
            "resumed_output_equals_uninterrupted_output",
            "every_engine_error_has_a_status_and_a_stream_error_code",
            "a_bug_ends_streams_and_rank_alike",
            "random_requests_each_end_once_with_their_solo_output",
            "answer_resumed_after_any_token_equals_the_unbroken_one",
            "another_group_resumes_an_answer_unchanged",
            "response_that_cannot_resume_ends_with_a_typed_error",
            "losing_rank_1_breaks_no_stream_and_the_group_reforms",
            "losing_any_rank_in_a_prompt_breaks_no_stream",
            "losing_any_rank_in_answers_breaks_no_stream",
            "random_clients_get_their_solo_answers_and_nothing_leaks",
            "nan_logits_fail_one_request_and_leave_nothing_cached",
            "losing_a_plan_to_an_edit_breaks_no_stream",
            "losing_a_deployment_ends_its_streams_with_typed_errors",
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
            "unauthorised_clients_are_rejected",
            "only_the_pinned_ca_is_trusted_for_its_own_addresses",
            "loopback_is_open_until_a_key_exists_and_the_network_never_is",
            "a_user_may_do_what_a_role_says_and_nothing_else",
            "join_token_serves_one_machine_only",
            "csr_is_approved_only_when_exact_and_for_its_own_subject",
            "streams_outlive_certificates_and_new_connections_reload",
            "missing_fields_are_errors_and_never_false",
            "tunnel_rejects_strangers_and_still_accepts_its_neighbour",
            "certificate_renews_only_within_its_node_incarnation",
            "approved_join_is_signed_only_for_the_tokens_recorded_node",
            "authority_key_must_match_its_first_certificate",
            "certificate_join_creates_no_account_or_role_binding",
            "ca_rotation_needs_no_node_to_rejoin",
            "silent_handshake_is_evicted_and_delays_no_other",
            "one_machine_cannot_take_every_connection",
            "busiest_host_loses_its_oldest_handshake",
            "one_key_cannot_use_the_byte_budget_of_others",
            "fetching_node_may_read_the_source_secret_until_done",
        ],
    },
    Invariant {
        title: "Status is not telemetry",
        rule: "Copy progress is written at most once in 2 s. Other figures are written on change, or \
               seldom; that half has no executor yet.",
        executors: &["progress_is_reported_at_most_every_two_seconds"],
    },
    Invariant {
        title: "Acknowledged writes are durable",
        rule: "What the store acknowledged survives kill -9 of its process, a full disk and the loss of \
               etcd's network.",
        executors: &[
            "acknowledged_writes_survive_reopening",
            "kill_during_writes_loses_nothing_acknowledged",
            "losing_disk_space_of_the_store_loses_nothing_acknowledged",
            "losing_the_network_of_etcd_disturbs_no_stream",
            "retried_write_keeps_its_deadline",
            "no_request_is_sent_to_etcd_after_the_deadline",
            "acknowledged_responses_survive_a_kill",
            "a_full_disk_refuses_and_loses_nothing",
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
            "unknown_failure_maps_to_internal_and_keeps_its_message",
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
            "node_leaving_its_pool_keeps_replicas_until_an_edit",
            "deployment_runs_in_its_pool_and_stays_if_its_node_leaves",
        ],
    },
    Invariant {
        title: "A rank's reservation covers MLX's peak",
        rule: "MLX never takes more memory than the planner reserved. Models over a gigabyte are judged \
               by `cargo xtask proof memory`.",
        executors: &[
            "engines_never_take_more_than_was_planned",
            "kv_budget_is_never_exceeded_and_every_sequence_ends",
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
            "workload_groups_get_own_nodes_that_hold_all_of_them",
            "workload_group_keeps_its_nodes_and_grows",
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
            "approved_preemption_stops_lower_priority_replicas",
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
            "preloaded_files_arrive_early_and_are_evicted_in_order",
        ],
    },
    Invariant {
        title: "A model that will answer rejects no request",
        rule: "The gateway holds requests within bounds until a replica answers. Held requests wake a \
               sleeping model.",
        executors: &[
            "request_is_held_and_counted_until_a_replica_is_ready",
            "held_requests_are_limited_and_a_disconnect_frees_a_place",
            "held_requests_survive_an_overloaded_replica",
            "a_sleeping_model_is_woken_by_a_request_that_is_held",
        ],
    },
    Invariant {
        title: "A machine outlives its models",
        rule: "An agent kills a rank before the kernel has to kill anything. One deployment does not \
               bring a machine down three times.",
        executors: &[
            "engine_far_over_its_grant_is_killed",
            "rank_far_over_its_grant_is_killed",
            "memory_shortage_kills_one_offending_rank_at_a_time",
            "deployment_is_held_on_a_node_after_two_kernel_panics",
        ],
    },
    Invariant {
        title: "Only the root helper changes the network",
        rule: "The helper stays within its owner's bounds and can undo each change: the way back is on \
               disk before the change is made.",
        executors: &[
            "helper_killed_at_any_step_can_revert_everything",
            "helper_refuses_requests_outside_its_policy",
            "helper_refuses_other_users",
            "helper_changes_apply_once_and_revert_completely",
            "reboot_drops_temporary_settings_and_reapplies_kept_ones",
            "node_network_spec_is_applied_and_removed_settings_revert",
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
