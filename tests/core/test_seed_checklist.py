"""The features of public systems that this one has to have, row by row, and the tests that show each.

Rows are those of the checklist of packing, batching and balancing in NeMo-RL, ROLL, AutoModel, VeOmni, TRL, Axolotl
and LLaMA-Factory: A packing, B alignment, D balance and dynamic batching, E VeOmni's dynamic batches, F figures. A
row is in ``TESTED``, with tests by module and name, or in ``NOT_DONE``, with the reason.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
GROUPS = {"A": 19, "B": 15, "D": 14, "E": 10, "F": 8}
"""How many rows each has."""

_PACKERS, _PEERS, _CLOSED = "core/test_packers", "core/test_peer_packers", "core/test_closed_packs"
_DEAL, _KARP = "core/test_deal", "core/test_karmarkar_karp"
_BATCHES = "core/test_batches"
_PLAN, _PADDED = "core/test_planning", "core/test_padded"
_ROWS, _PADDED_RUN = "core/test_padded_steps", "integration/test_padded"
_LAYOUT, _RULES, _SHAPES = "core/test_layout", "core/test_rules_config", "core/test_shapes"
_REGROUPED = "core/test_regrouping"
_FIGURES, _WASTE = "core/test_figures", "core/test_waste"
_SYSTEMS = f"{_PEERS}::test_packs_are_those_of_the_system_whose_packer_it_is"
_DEFINED = f"{_PEERS}::test_packs_are_what_the_definition_says_for_samples_and_for_groups"

TESTED: dict[str, tuple[str, ...]] = {
    # concatenative, with a cap on samples
    "A1": (
        f"{_PACKERS}::test_concatenative_gives_the_golden_packs",
        f"{_PACKERS}::test_concatenative_keeps_to_its_cap_on_samples",
        _SYSTEMS,
    ),
    # first fit decreasing, ties to the later sample
    "A2": (_SYSTEMS, _DEFINED, f"{_PACKERS}::test_first_fit_decreasing_takes_the_later_of_two_equals_first"),
    # first fit shuffle, here with a seed
    "A3": (f"{_PEERS}::test_the_shuffle_is_held_still_by_its_seed",),
    # modified first fit decreasing, both rules for leftovers
    "A4": (_SYSTEMS, _DEFINED, f"{_PEERS}::test_modified_first_fit_decreasing_packs_its_leftovers_as_it_is_told"),
    # that it is the best is not so
    "A5": (f"{_PEERS}::test_modified_first_fit_decreasing_is_now_and_then_better_and_now_and_then_worse",),
    # over-long samples
    "A6": (f"{_PACKERS}::test_every_packer_refuses_a_length_that_no_pack_can_hold_and_names_its_sample",),
    # min_bin_count, bin_count_multiple
    "A7": (
        f"{_CLOSED}::test_more_packs_are_split_off_those_with_most_samples_as_nemo_rl_does",
        f"{_CLOSED}::test_the_count_is_as_asked_for_and_no_pack_grows",
        f"{_CLOSED}::test_too_few_samples_are_an_error_or_empty_packs_at_the_end",
    ),
    # a packer by its name; of one spelling, where NeMo-RL takes upper case too
    "A8": (f"{_PACKERS}::test_an_unknown_packer_lists_those_there_are",),
    # packs to ranks: by cost, or in order
    "A9": ("core/test_deal::test_a_step_dealt_by_hand", "core/test_deal::test_every_pack_is_dealt_once"),
    # the order of a rank's micro-batches
    "A10": (
        f"{_DEAL}::test_an_order_moves_whole_micro_batches",
        f"{_BATCHES}::test_the_order_of_micro_batches_is_the_one_asked_for",
    ),
    # packing inside a global batch: what is given is one, and all of it is one step
    "A11": (
        f"{_PLAN}::test_denominators_and_samples_are_the_same_on_any_mesh",
        f"{_BATCHES}::test_step_k_is_the_kth_batch_of_samples_whatever_comes_when",
    ),
    # the way back to the order of samples
    "A12": (f"{_CLOSED}::test_the_way_back_restores_the_order_of_samples",),
    # AutoModel's pack_dataset: next fit
    "A13": (f"{_PACKERS}::test_concatenative_gives_the_golden_packs",),
    # Axolotl's first fit, with bin_size
    "A14": (_SYSTEMS, _DEFINED),
    # neat packing and LLaMA-Factory's greedy knapsack
    "A15": (_SYSTEMS, _DEFINED),
    # VeOmni's buffer
    "A16": (_SYSTEMS, _DEFINED),
    # Karmarkar-Karp
    "A17": (f"{_KARP}::test_a_partition_by_hand", f"{_KARP}::test_every_item_is_in_one_part"),
    # ROLL's none
    "A18": (f"{_PEERS}::test_none_makes_the_packs_of_roll_and_heeds_the_budget_too",),
    # ROLL's load_balance
    "A19": (f"{_PLAN}::test_karmarkar_karp_packs_are_as_few_as_fit_then_a_multiple",),
    # a sample's multiple, ROLL's 16 included; one that the mesh does not divide is refused
    "B1": (
        f"{_RULES}::test_the_alignment_is_derived_from_the_planned_mesh",
        f"{_RULES}::test_the_alignment_follows_from_mesh_and_precision",
        f"{_RULES}::test_a_planned_mesh_that_the_alignment_does_not_suit_is_refused_naming_both",
    ),
    # without tp
    "B2": (f"{_RULES}::test_the_alignment_follows_from_mesh_and_precision",),
    # the pack's multiple with FP8; the excess is the tail's here, no sample's
    "B3": (
        f"{_RULES}::test_the_alignment_follows_from_mesh_and_precision",
        f"{_RULES}::test_what_is_derived_suits_the_mesh_and_every_rank_s_products",
    ),
    # packs of one length in a pipeline
    "B4": (
        f"{_SHAPES}::test_a_pack_has_the_least_length_that_holds_it_and_in_a_pipeline_that_of_the_longest",
        "integration/test_shapes::test_packs_of_every_shape_hold_the_samples_of_fixed_ones",
    ),
    # zigzag, by TransformerEngine's index
    "B5": (
        f"{_LAYOUT}::test_two_samples_of_eight_over_two_ranks",
        f"{_LAYOUT}::test_shards_hold_what_transformer_engine_would_take",
    ),
    # NeMo-RL's and ROLL's drawings
    "B6": (f"{_LAYOUT}::test_nemo_rl_draws_lengths_5_8_1_3_so",),
    "B7": (f"{_LAYOUT}::test_roll_draws_lengths_2_4_6_1_so",),
    # where a sample lies on a rank
    "B8": (f"{_LAYOUT}::test_a_sample_lies_in_its_own_part_of_every_shard",),
    # both boundary arrays
    "B9": (
        f"{_LAYOUT}::test_automodel_stores_lengths_3_and_5_in_4_and_8",
        f"{_LAYOUT}::test_boundaries_keep_the_invariants",
    ),
    # the widest slot
    "B10": (f"{_LAYOUT}::test_boundaries_keep_the_invariants",),
    # which sample a token is of, for state-space layers (seq_idx of hf), and where boundaries end (total_tokens)
    "B11": (
        "core/test_formats::test_hf_is_what_a_model_shifts_back_to_the_pack",
        "training/test_transformers::test_200_packs_are_what_the_flattening_collator_returns",
        f"{_LAYOUT}::test_boundaries_keep_the_invariants",
    ),
    # what a split in stretches costs
    "B12": (f"{_LAYOUT}::test_stretches_of_a_sample_cost_ranks_6_and_15_where_zigzag_costs_them_alike",),
    # multiples of micro-batches for a pipeline, by splitting the dearest packs
    "B13": (
        f"{_DEAL}::test_the_number_of_packs_is_the_least_that_will_do",
        f"{_DEAL}::test_the_dearest_pack_is_split_first_and_evenly",
        "core/test_batches::test_every_rank_gets_as_many_packs_and_every_sample_is_dealt_once",
    ),
    # one shape on all ranks: fixed, or of a step in a pipeline
    "B14": ("integration/test_shapes::test_packs_of_every_shape_hold_the_samples_of_fixed_ones",),
    # sizes that the mesh does not divide are refused
    "B15": (
        f"{_RULES}::test_a_mistake_names_its_key_and_what_was_expected",
        f"{_SHAPES}::test_a_mesh_whose_needs_do_not_divide_every_length_is_refused_naming_both",
    ),
    # the workload, on padded lengths
    "D1": (f"{_PLAN}::test_costs_are_of_padded_lengths",),
    # how many micro-batches
    "D2": (
        f"{_PLAN}::test_karmarkar_karp_packs_are_as_few_as_fit_then_a_multiple",
        f"{_PLAN}::test_all_ranks_have_as_many_micro_batches_and_no_pack_is_over_budget",
    ),
    # the mistake not to be made: the budget is a cap, and few samples are no crash
    "D3": (
        f"{_KARP}::test_rolls_pack_over_budget_is_not_repeated",
        f"{_KARP}::test_no_pack_is_over_its_budget_or_cap",
        f"{_PLAN}::test_too_few_samples_are_empty_packs_or_an_error",
    ),
    # small micro-batches at both ends
    "D4": (f"{_DEAL}::test_small_micro_batches_are_at_both_edges_as_in_roll_and_verl",),
    # restore_results_order: of a planned step, and of log-prob passes
    "D5": (
        f"{_PLAN}::test_the_way_back_restores_the_order",
        f"{_REGROUPED}::test_the_way_back_is_the_identity",
    ),
    # batch_balance and what it says of the ranks' tokens
    "D6": (f"{_PLAN}::test_ranks_are_balanced_by_largest_differencing_and_the_spread_says_so",),
    # updates keep their samples: balancing moves none to another
    "D7": (f"{_PLAN}::test_denominators_and_samples_are_the_same_on_any_mesh",),
    # denominators over all ranks
    "D8": (f"{_PLAN}::test_denominators_and_samples_are_the_same_on_any_mesh",),
    # its knobs, a budget and least number of micro-batches of their own for forward passes among them; a sample that no
    # pack can hold is refused
    "D9": (
        f"{_PLAN}::test_what_cannot_be_is_refused",
        f"{_REGROUPED}::test_a_forward_pack_is_the_pack_that_one_would_build_by_hand_of_its_samples",
        f"{_REGROUPED}::test_what_cannot_be_regrouped_is_said",
    ),
    # dynamic batching
    "D10": (
        f"{_PADDED}::test_samples_are_dealt_by_length_in_turn",
        f"{_PADDED}::test_a_micro_batch_is_closed_only_when_the_next_sample_would_not_fit",
        f"{_PADDED}::test_a_sample_that_does_not_fit_once_padded_is_named",
        f"{_ROWS}::test_every_sample_is_a_row_of_one_micro_batch_and_all_ranks_have_the_same_shapes",
        f"{_ROWS}::test_a_batch_is_the_same_on_any_mesh_and_reading_it_again_gives_the_same_bytes",
    ),
    # the example of its documentation, corrected
    "D11": (
        f"{_PADDED}::test_rolls_example_within_its_budget",
        f"{_PADDED_RUN}::test_the_example_of_roll_comes_to_two_ranks_within_its_budget",
    ),
    # its figures
    "D12": (
        f"{_PADDED}::test_rolls_example_within_its_budget",
        f"{_PADDED}::test_figures_are_against_the_batch_as_wide_as_it_is",
        f"{_ROWS}::test_the_causes_of_waste_and_the_real_tokens_are_all_that_is_computed",
        f"{_PADDED_RUN}::test_status_and_metrics_say_what_padding_was_removed",
    ),
    # its knobs: one key, the budget, and the alignment for sequence_length_round; a feed of its own for each use
    "D13": (
        f"{_PADDED}::test_numbers_that_cannot_be_are_refused",
        f"{_ROWS}::test_a_broker_yaml_asks_for_it_with_one_key",
    ),
    # NeMo-RL's, and what it refuses
    "D14": (
        f"{_PADDED}::test_a_pipeline_is_refused_unless_its_trainer_takes_any_length",
        f"{_PLAN}::test_what_cannot_be_is_refused",
        f"{_ROWS}::test_what_speaks_of_packs_is_refused_beside_padded",
        f"{_PADDED_RUN}::test_a_pipeline_is_served_where_its_trainer_declares_variable_lengths",
        f"{_PADDED_RUN}::test_a_format_that_the_feed_has_not_is_refused_and_what_compilers_must_know_is_said",
    ),
    # on: the stream cut by tokens; off: so many samples, packed all the same, as long as they are
    "E1": (
        "core/test_form::test_steps_do_not_depend_on_arrivals_or_on_how_many_are_asked_for",
        f"{_BATCHES}::test_step_k_is_the_kth_batch_of_samples_whatever_comes_when",
        f"{_SHAPES}::test_the_lengths_of_packs_by_hand",
    ),
    # when its buffer is ready: enough samples, and tokens
    "E2": (f"{_PACKERS}::test_the_window_holds_enough_samples_and_two_budgets_and_its_ages_say_so",),
    # the budget as it warms up
    "E3": (
        f"{_BATCHES}::test_the_budget_grows_evenly_and_is_rounded_to_the_alignment",
        f"{_BATCHES}::test_packs_keep_to_the_budget_of_their_step_but_for_one_long_sample_alone",
    ),
    # its checkpoint by index: samples are references in snapshots
    "E5": (
        "core/test_snapshot::test_a_snapshot_costs_28_bytes_a_sample",
        f"{_BATCHES}::test_a_former_restored_between_any_two_steps_goes_on_the_same",
    ),
    # a sample over the budget is alone, where the budget is yet to grow; else it is the over-long policy's
    "E6": (f"{_BATCHES}::test_packs_keep_to_the_budget_of_their_step_but_for_one_long_sample_alone",),
    # the end of the data
    "E7": (
        "core/test_form::test_a_padded_tail_is_filled_with_empty_packs",
        "core/test_form::test_a_dropped_tail_is_named",
    ),
    # how many steps a pass is
    "E8": ("core/test_forecast::test_the_interval_of_a_sample_holds_the_steps_of_the_whole",),
    # samples of no tokens
    "E9": ("core/test_tokenizers::test_an_empty_text_is_rejected_even_when_an_end_would_be_appended",),
    # shapes that do not change, for torch.compile: the default
    "E10": (f"{_SHAPES}::test_the_lengths_of_packs_by_hand",),
    # counts and sums
    "F1": (
        f"{_FIGURES}::test_the_figures_of_a_worked_example",
        f"{_WASTE}::test_the_parts_of_the_waste_add_up_to_what_was_delivered",
    ),
    # utilisation and waste by tokens
    "F2": (f"{_FIGURES}::test_the_figures_of_a_worked_example",),
    "F3": (f"{_FIGURES}::test_the_figures_follow_their_definitions",),
    # bin balance, which may be negative
    "F4": (
        f"{_FIGURES}::test_one_pack_is_balanced",
        f"{_FIGURES}::test_balance_may_be_negative_and_empty_packs_have_none",
    ),
    # the least packs
    "F5": (f"{_FIGURES}::test_the_figures_follow_their_definitions",),
    # no packs
    "F6": (f"{_FIGURES}::test_no_packs_have_no_figures",),
    # over a run; of all packs, where NeMo-RL has averages of calls
    "F7": ("integration/test_http::test_the_figures_are_those_of_the_packs_that_a_reader_got",),
    # on real lengths and on padded ones
    "F8": (
        f"{_WASTE}::test_the_waste_of_a_step_by_hand",
        f"{_PLAN}::test_figures_are_of_real_and_of_aligned_tokens",
        "integration/test_http::test_metrics_count_what_was_packed_and_waste_adds_up",
    ),
}

NOT_DONE: dict[str, str] = {
    # packs counted by their loss tokens, with a cap on all
    "E4": "a pack's budget is what a GPU computes and holds; loss tokens are counted for the denominators alone",
}


@cache
def _tests_of(module: str) -> set[str]:
    tree = ast.parse((TESTS / f"{module}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("row", TESTED)
def test_the_tests_of_a_row_are_there(row: str) -> None:
    for test in TESTED[row]:
        module, _, name = test.partition("::")
        assert name in _tests_of(module), test


def test_every_row_is_tested_or_has_a_reason() -> None:
    rows = [f"{group}{number}" for group, count in GROUPS.items() for number in range(1, count + 1)]
    assert sorted([*TESTED, *NOT_DONE]) == sorted(rows)
    assert all(NOT_DONE.values())
    assert all(TESTED.values())
