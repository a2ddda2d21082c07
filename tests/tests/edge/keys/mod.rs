//! Every key of the configuration changes what a replica does: which test shows it, and those tests that no
//! other file has.

mod addresses;
mod choosing;
mod gossip;
mod limits;
mod numbers;
mod pace;

use std::collections::BTreeSet;

use grapevine::config::KEYS;

use crate::{actors, admin, drain, pairs, queue, reload, resume};

/// Which test fails when a key no longer does anything.
const SHOWN_BY: &[(&str, fn())] = &[
    ("listen", addresses::listeners_are_where_they_are_said_to_be),
    ("admin", addresses::listeners_are_where_they_are_said_to_be),
    ("gossip", addresses::listeners_are_where_they_are_said_to_be),
    ("advertise", addresses::a_replica_bound_to_every_address_is_reached_at_the_advertised_one),
    ("seed", gossip::replicas_with_a_seed_find_each_other_and_others_don_t),
    ("replica_id", addresses::listeners_are_where_they_are_said_to_be),
    ("cluster_id", gossip::replicas_of_another_cluster_are_not_listened_to),
    ("cluster_key_file", gossip::replicas_without_the_key_are_not_listened_to),
    ("endpoint", choosing::every_key_of_an_endpoint_is_shown_and_its_role_models_and_ranks_count),
    ("policy", reload::a_reload_changes_policy_filters_numbers_and_endpoints_and_keeps_everything_else),
    ("split", pairs::when::split_says_whether_prompts_are_ever_or_always_split),
    ("prefill_policy", pairs::when::each_leg_is_chosen_by_its_own_policy),
    ("decode_policy", pairs::when::each_leg_is_chosen_by_its_own_policy),
    ("endpoint_filter", choosing::a_filter_leaves_out_the_endpoint_that_queues),
    ("affinity", choosing::an_affinity_before_least_load_brings_a_prompt_back),
    ("session_header", choosing::only_the_configured_header_names_a_session),
    ("session_from_user", choosing::the_user_names_a_session_only_if_it_is_said_so),
    (
        "admin_token_file",
        admin::the_token_file_locks_everything_but_probes_and_the_page_and_sighup_changes_it,
    ),
    ("workers", addresses::as_many_threads_serve_as_workers_are_asked_for),
    ("explain_headers", choosing::replies_say_how_they_were_routed_only_if_asked_to),
    ("log", addresses::the_log_has_the_wanted_lines_in_the_wanted_form),
    ("log_format", addresses::the_log_has_the_wanted_lines_in_the_wanted_form),
    ("body_bytes_max", reload::a_file_with_a_fault_changes_nothing_and_every_fault_is_told),
    ("body_room_bytes", limits::bodies_have_the_room_and_the_time_that_is_said),
    ("body_timeout_ms", limits::bodies_have_the_room_and_the_time_that_is_said),
    ("connect_timeout_ms", limits::a_connection_that_is_not_made_ends_at_its_limit),
    ("first_byte_timeout_ms", limits::each_limit_ends_a_request_and_says_which_it_was),
    ("prefill_timeout_ms", pairs::limits::each_leg_has_a_limit_of_its_own_that_ends_it_alone_or_is_said),
    ("handoff_timeout_ms", pairs::limits::each_leg_has_a_limit_of_its_own_that_ends_it_alone_or_is_said),
    ("idle_timeout_ms", limits::each_limit_ends_a_request_and_says_which_it_was),
    ("quiet_ms", resume::a_silent_engine_is_left_as_soon_as_is_said),
    ("resume", resume::streams_are_resumed_only_if_it_is_said_so_and_only_as_long_as_is_said),
    ("resume_bytes_max", resume::streams_are_resumed_only_if_it_is_said_so_and_only_as_long_as_is_said),
    ("total_timeout_ms", limits::each_limit_ends_a_request_and_says_which_it_was),
    ("total_timeout_whole_ms", limits::each_limit_ends_a_request_and_says_which_it_was),
    ("tries_max", limits::a_request_is_tried_as_often_as_allowed),
    ("running_max", queue::a_request_beyond_running_max_waits_is_shown_and_goes_when_there_is_room),
    (
        "queue_requests_max",
        queue::who_finds_the_queue_full_is_refused_at_once_and_a_higher_class_takes_the_place_of_a_lower,
    ),
    ("queue_bytes_max", queue::bodies_that_wait_are_bounded_together),
    ("queue_wait_ms_max", queue::who_has_waited_for_as_long_as_it_may_is_refused),
    ("index_bytes_max", limits::the_index_stays_within_its_memory),
    (
        "session_table_max",
        actors::of_100_000_sessions_the_table_keeps_its_cap_the_oldest_leave_and_an_idle_one_wakes_at_home,
    ),
    (
        "session_actors_max",
        actors::of_100_000_sessions_the_table_keeps_its_cap_the_oldest_leave_and_an_idle_one_wakes_at_home,
    ),
    ("scrape_every_ms", pace::engines_are_scraped_and_probed_as_often_as_said),
    ("probe_every_ms", pace::engines_are_scraped_and_probed_as_often_as_said),
    ("probe_timeout_ms", pace::a_silent_health_page_is_waited_for_as_long_as_said),
    ("prefill_us_per_token", choosing::assumed_speeds_and_sizes_are_what_costs_are_made_of),
    ("itl_ms", choosing::assumed_speeds_and_sizes_are_what_costs_are_made_of),
    ("bytes_per_token", choosing::assumed_speeds_and_sizes_are_what_costs_are_made_of),
    ("priority_1_ttft_ms", reload::what_each_class_expects_is_what_the_file_says_last),
    ("priority_1_tpot_ms", reload::what_each_class_expects_is_what_the_file_says_last),
    ("priority_2_ttft_ms", reload::what_each_class_expects_is_what_the_file_says_last),
    ("priority_2_tpot_ms", reload::what_each_class_expects_is_what_the_file_says_last),
    ("priority_3_ttft_ms", reload::what_each_class_expects_is_what_the_file_says_last),
    ("priority_3_tpot_ms", reload::what_each_class_expects_is_what_the_file_says_last),
    ("pulse_every_ms", pace::gossip_goes_out_as_often_as_said),
    ("ledger_every_ms", pace::gossip_goes_out_as_often_as_said),
    ("push_every_ms", pace::changes_are_pushed_as_often_as_said),
    ("dead_after_ms", gossip::a_silent_replica_is_dead_when_it_has_been_silent_as_long_as_said),
    ("snapshot_wait_ms", gossip::a_replica_that_finds_nobody_waits_as_long_as_said),
    ("drain_settle_ms", drain::sigterm_ends_50_streams_in_their_own_time_and_then_the_process_with_0),
    (
        "drain_deadline_ms",
        drain::a_stream_that_outlives_the_drain_ends_in_an_error_event_and_the_process_with_0,
    ),
];

#[test]
fn every_key_is_shown_to_do_something() {
    let keys: BTreeSet<&str> = KEYS.iter().map(|key| key.name).collect();
    let shown: BTreeSet<&str> = SHOWN_BY.iter().map(|(key, _)| *key).collect();
    assert_eq!(shown, keys, "each key has a test that fails when it does nothing");
    assert_eq!(SHOWN_BY.len(), KEYS.len(), "and each has one entry");
}
