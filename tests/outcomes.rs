//! Every buyer row of `docs/outcomes.md` has a test that plays it, or stands among those that a later part owes.

use std::collections::BTreeMap;

use super::pay::{after, before, lookup, recover, reserve};

const TABLE: &str = include_str!("../docs/outcomes.md");

/// (row, a word of its code cell, the tests that play it).
type Case = (u32, &'static str, &'static [fn()]);

const CASES: &[Case] = &[
    (1, "INVALID_ARGUMENT", &[before::wrong_arguments_are_refused_by_name]),
    (2, "scheme_unavailable", &[before::a_scheme_that_cannot_be_paid_is_refused_before_anybody_is_asked]),
    (3, "network_disabled", &[before::a_network_that_is_not_enabled_is_refused_before_anybody_is_asked]),
    (4, "the stored outcome", &[lookup::the_same_key_gets_the_same_bytes_and_pays_once]),
    (
        5,
        "undelivered",
        &[
            lookup::an_output_that_never_came_is_answered_with_the_receipt,
            recover::an_output_that_never_came_is_fetched_with_the_identical_bytes,
            recover::what_a_settled_payments_seller_gives_is_its_output_and_the_receipt_is_the_ledgers,
            recover::a_settled_payment_without_a_usable_answer_is_its_receipt,
            recover::nothing_is_sent_for_a_suspended_agent,
            recover::an_address_that_todays_rules_refuse_is_not_dialled_again,
        ],
    ),
    (6, "evicted", &[lookup::a_settled_payment_of_which_nothing_is_stored_is_answered_with_the_receipt]),
    (7, "in_flight", &[lookup::a_call_that_is_in_flight_elsewhere_is_waited_for_and_then_reported]),
    (
        8,
        "as the next two rows",
        &[
            lookup::a_row_whose_owner_is_gone_is_in_doubt,
            recover::a_killed_process_leaves_a_payment_that_the_next_one_recovers,
        ],
    ),
    (
        9,
        "the identical bytes",
        &[
            recover::a_payment_in_doubt_is_ended_by_the_identical_bytes,
            recover::a_recovery_without_a_usable_answer_is_judged_as_the_first_sending,
            recover::a_recovery_that_is_killed_is_taken_up_by_the_next_one,
            recover::a_caller_that_goes_away_does_not_stop_a_recovery,
            recover::a_recovered_settlement_that_cannot_be_recorded_reaches_the_agent,
        ],
    ),
    (
        10,
        "in_flight",
        &[
            recover::a_recovery_that_lasts_is_reported_as_in_flight,
            recover::callers_at_once_are_one_sending_and_all_get_the_output,
        ],
    ),
    (
        11,
        "in_doubt",
        &[
            lookup::a_payment_in_doubt_is_not_paid_again,
            recover::nothing_is_sent_for_a_suspended_agent,
            recover::a_dead_authorization_is_not_sent_and_a_used_one_is,
            recover::an_address_that_todays_rules_refuse_is_not_dialled_again,
            recover::a_network_that_is_no_longer_paid_on_is_not_sent_to,
        ],
    ),
    (12, "the release reason", &[lookup::a_released_payment_is_answered_with_its_reason]),
    (13, "idempotency_conflict", &[lookup::a_key_belongs_to_one_call]),
    (14, "not_listed", &[before::what_the_catalog_does_not_list_is_not_called]),
    (15, "catalog", &[before::a_catalog_that_fails_is_the_catalogs_failure]),
    (16, "version", &[before::another_version_than_the_expected_is_refused_before_the_seller_is_asked]),
    (17, "which rule", &[before::an_address_against_the_rules_is_not_dialled]),
    (
        18,
        "not_allowed",
        &[
            before::an_origin_that_the_operator_does_not_allow_is_not_dialled,
            before::an_asset_or_a_recipient_that_the_operator_does_not_allow_is_not_paid,
            before::a_seller_is_paid_where_its_first_settled_payment_went,
            recover::what_todays_lists_do_not_allow_is_not_sent_again,
        ],
    ),
    (19, "UPSTREAM_TIMEOUT", &[before::a_seller_that_gives_no_usable_answer_is_not_paid]),
    (20, "receipt: null", &[before::a_free_tool_is_answered_without_a_payment]),
    (21, "isError", &[before::the_tools_own_error_is_handed_on]),
    (22, "requestState", &[before::a_question_before_the_payment_is_handed_on_and_its_answer_accepted]),
    (23, "copies_differ", &[before::a_broken_challenge_is_not_paid]),
    (24, "RESOURCE_CHANGED", &[before::terms_other_than_the_catalogs_are_refused_with_their_members]),
    (25, "offer", &[before::an_offer_that_nobody_makes_is_an_argument_error]),
    (26, "scheme_unavailable", &[before::an_offer_that_this_build_cannot_pay_is_refused]),
    (27, "quote", &[before::a_maximum_of_zero_asks_for_the_price]),
    (28, "insufficient_funds", &[before::a_balance_that_does_not_cover_it_is_read_again_before_the_refusal]),
    (29, "signer_unavailable", &[before::without_the_payers_address_nothing_is_reserved]),
    (30, "chain_rpc", &[before::without_a_believable_chain_nothing_is_reserved]),
    (
        31,
        "as in the next row",
        &[
            reserve::a_keyless_call_about_to_be_refused_is_its_open_twin,
            recover::a_question_without_a_receipt_goes_on_with_the_same_bytes,
        ],
    ),
    (
        32,
        "this call's payment",
        &[
            reserve::a_keyless_twin_pays_once_until_it_is_answered,
            reserve::a_first_answer_that_arrived_ends_the_twin_and_a_keyed_or_open_one_marks_nothing,
        ],
    ),
    (33, "duplicate_in_doubt", &[reserve::a_keyless_call_beside_an_open_keyed_one_is_refused]),
    (34, "BUDGET_EXCEEDED", &[reserve::the_smallest_ceiling_binds_and_is_named]),
    (35, "suspended", &[reserve::a_suspended_agent_pays_nothing]),
    (36, "-32603", &[reserve::a_ledger_that_fails_is_a_fault_of_ours]),
    (37, "sign_window_missed", &[reserve::a_signature_that_would_come_too_late_is_not_made]),
    (38, "in_doubt", &[reserve::without_the_lease_nothing_is_signed]),
    (39, "signer_refused", &[reserve::a_signers_no_releases_the_money]),
    (40, "signer_unavailable", &[reserve::a_signer_that_cannot_be_reached_releases_the_money]),
    (41, "signer_failed", &[reserve::a_signers_lost_or_wrong_answer_keeps_the_hold]),
    (42, "chain_rpc", &[after::a_simulation_that_answers_about_another_payment_is_a_lie]),
    (43, "simulation_failed", &[after::a_simulation_that_fails_or_is_lost_keeps_the_hold]),
    (44, "no_answer", &[after::no_usable_answer_to_the_paid_call_keeps_the_hold]),
    (45, "identical bytes once more", &[after::a_forgotten_session_gets_the_identical_bytes_once_more]),
    (
        46,
        "challenged_again",
        &[
            after::another_challenge_after_the_payment_is_not_paid,
            after::an_output_that_talks_about_payments_is_an_output_where_its_receipt_is_right,
        ],
    ),
    (
        47,
        "receipt: null",
        &[
            after::a_question_without_a_receipt_keeps_the_hold,
            recover::a_question_without_a_receipt_goes_on_with_the_same_bytes,
            recover::new_answers_to_a_question_are_stored_before_they_are_sent,
        ],
    ),
    (
        48,
        "the receipt",
        &[
            after::a_question_with_a_right_receipt_is_settled_and_unfinished,
            recover::a_question_of_a_settled_payment_goes_on_with_the_same_bytes,
        ],
    ),
    (49, "no_receipt", &[after::an_output_without_a_receipt_keeps_the_hold_and_is_handed_on]),
    (50, "settlement_pending", &[after::a_sellers_no_frees_nothing]),
    (51, "receipt_mismatch", &[after::a_receipt_that_is_wrong_anywhere_settles_nothing]),
    (
        52,
        "success with receipt",
        &[
            after::a_right_receipt_settles_with_two_calls_and_two_transactions,
            after::a_failing_tools_receipt_settles_wherever_the_error_carries_it,
        ],
    ),
    (
        53,
        "recorded: false",
        &[
            after::paid_output_reaches_the_agent_when_the_ledger_fails,
            after::a_ledger_that_is_busy_for_a_moment_loses_no_receipt,
        ],
    ),
    (
        54,
        "success with receipt",
        &[
            after::a_row_that_somebody_settled_meanwhile_stays_settled,
            after::a_receipt_with_another_transaction_than_the_booked_one_names_the_booked_one,
            after::a_settled_payment_does_not_take_anothers_transaction_and_its_output_is_kept,
        ],
    ),
    (55, "receipt_mismatch", &[after::a_receipt_for_a_released_row_is_a_mismatch]),
    (
        56,
        "as the lookup rows",
        &[
            after::a_row_that_is_no_longer_ours_answers_for_itself,
            after::an_output_without_a_receipt_is_that_of_a_row_that_was_settled_meanwhile,
            after::a_late_owner_of_a_row_in_doubt_still_hands_over_what_came,
            recover::an_owner_that_is_late_changes_nothing_and_says_what_the_row_says,
        ],
    ),
    (57, "–", &[reserve::a_cancelled_call_is_released_before_the_signature]),
    (
        58,
        "–",
        &[
            after::a_caller_that_goes_away_after_the_signature_does_not_stop_the_bookkeeping,
            recover::a_recovered_answer_that_arrived_ends_the_twin,
        ],
    ),
    (59, "in_doubt", &[after::a_story_that_ends_without_an_answer_is_unknown]),
    (60, "internal error", &[lookup::a_ledger_that_fails_after_the_row_was_seen_does_not_say_that_nothing_moved]),
    (61, "undelivered", &[after::an_answered_question_of_a_settled_payment_is_not_paid_again]),
];

/// (row, what is owed). A row may also have a case, for what is there already.
const OWED: &[(u32, &str)] = &[];

/// Row number to its cells: phase, event, row, code, moved, next.
fn buyer_rows() -> BTreeMap<u32, Vec<&'static str>> {
    let part = TABLE.split("## Buyer").nth(1).unwrap().split("\n## ").next().unwrap();
    part.lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.strip_prefix('|')?.strip_suffix('|')?.split('|').map(str::trim).collect();
            let number = cells.first()?.parse().ok()?;
            Some((number, cells[1..].to_vec()))
        })
        .collect()
}

#[test]
fn every_buyer_row_has_a_case_or_is_owed() {
    let rows = buyer_rows();
    assert!(rows.len() >= 55, "only {} rows were read", rows.len());
    assert_eq!(rows.keys().copied().collect::<Vec<_>>(), (1..=u32::try_from(rows.len()).unwrap()).collect::<Vec<_>>());
    let mut wrong = Vec::new();
    for (number, cells) in &rows {
        if cells.len() != 6 || cells.iter().any(|cell| cell.is_empty()) {
            wrong.push(format!("row {number} has an empty cell"));
        }
        let case = CASES.iter().any(|(row, _, tests)| row == number && !tests.is_empty());
        let owed = OWED.iter().any(|(row, _)| row == number);
        if !case && !owed {
            wrong.push(format!("row {number} ({}: {}) has no case and is not owed", cells[0], cells[1]));
        }
    }
    for (number, word, _) in CASES {
        match rows.get(number) {
            Some(cells) if cells[3].contains(word) => {}
            _ => wrong.push(format!("row {number} of the table does not say {word:?}: the numbers have moved")),
        }
    }
    for (number, _) in OWED {
        if !rows.contains_key(number) {
            wrong.push(format!("row {number} is owed and not in the table"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
