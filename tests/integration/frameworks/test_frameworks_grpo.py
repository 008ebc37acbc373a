"""TRL's GRPOTrainer: with our micro-batches it has the losses and the gradients of its own, with less padding."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import UserError
from streampack.integrations import trl_grpo
from tests.integration.running import forked

if TYPE_CHECKING:
    from tests.integration.frameworks.grpo_trainers import Run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers warns of names that TRL uses

ROUNDING = 1e-6
"""Rotary positions are float32, also in a model of float64, and other padding moves tokens."""

grpo: Any
"""``grpo_trainers``, once tests run: it imports TRL, which takes seconds."""


@pytest.fixture(autouse=True, scope="module")
def _trl() -> None:
    global grpo
    grpo = import_module("tests.integration.frameworks.grpo_trainers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grpo")


def check_equal(theirs: Run, ours: Run) -> None:
    """The same losses and weights after each step; gradients, too, since the optimizer is SGD."""
    assert np.linalg.norm(theirs.change) > 1e-4, "the model has learned"
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=ROUNDING, atol=ROUNDING)
    assert np.linalg.norm(np.subtract(ours.change, theirs.change)) < ROUNDING * np.linalg.norm(theirs.change)


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo", "luspo", "dapo", "cispo", "vespo"])
def test_each_loss_is_that_of_trl(folder: Path, loss_type: str) -> None:
    theirs, ours = grpo.both(folder, loss_type=loss_type)
    check_equal(theirs, ours)
    assert sorted(ours.rollouts) == sorted(theirs.rollouts), "each rollout once"
    assert ours.tokens < 0.7 * theirs.tokens
    assert max(rows * length for rows, length in ours.shapes) < max(rows * length for rows, length in theirs.shapes)
    assert len({rows for rows, _ in ours.shapes}) > 1, "micro-batches of different sizes"


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo", "steps_per_generation": 8, "num_iterations": 2, "beta": 0.1, "pad_to_multiple_of": 8},
        {"loss_type": "dapo", "steps_per_generation": 6, "beta": 0.05},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "steps_per_generation": 2},
        {"loss_type": "grpo", "mask_truncated_completions": True, "off_policy_mask_threshold": 0.01},
        {"loss_type": "grpo", "vllm_importance_sampling_mode": "sequence_truncate", "off_policy_mask_threshold": 0.5},
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate", "pad_to_multiple_of": 8},
        {"loss_type": "vespo", "steps_per_generation": 8, "per_device_train_batch_size": 1},
    ],
    ids=[
        "iterations",
        "steps-of-two-generations",
        "sequence-weights",
        "masks",
        "vllm-sequences",
        "vllm-tokens",
        "one-rollout",
    ],
)
def test_an_optimizer_step_has_the_rollouts_that_it_has_in_trl(folder: Path, settings: dict[str, Any]) -> None:
    theirs, ours = grpo.both(folder, max_steps=4, **settings)
    check_equal(theirs, ours)
    assert ours.tokens < theirs.tokens


def test_two_ranks_exchange_rollouts(folder: Path) -> None:
    grpo.model_in(folder)
    job = [grpo.__file__, [str(folder)], None, 2, str(folder / "output")]
    environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = forked("tests.integration.forks", json.dumps([job]), environment=environment)
    assert done.stdout == "[0]\n", done.stderr
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for case in range(len(grpo.ON_RANKS)):
        theirs, ours = ([grpo.Run(**rank[case][way]) for rank in ranks] for way in (0, 1))
        for own, planned in zip(theirs, ours, strict=True):
            check_equal(own, planned)
        assert sorted(theirs[0].rollouts + theirs[1].rollouts) == sorted(ours[0].rollouts + ours[1].rollouts)
        assert sorted(ours[0].rollouts) != sorted(theirs[0].rollouts), "rollouts have moved"
        assert [rows for rows, _ in ours[0].shapes] == [rows for rows, _ in ours[1].shapes]
        assert critical(ours) < 0.7 * critical(theirs)


def critical(ranks: list[Run]) -> int:
    """Tokens of the larger rank of each micro-batch, summed: for these the other rank waits."""
    return sum(max(rows * length for rows, length in shapes) for shapes in zip(*(r.shapes for r in ranks), strict=True))


def test_evaluation_stays_as_it_is(folder: Path) -> None:
    trainer = grpo.trainer_of(folder, loss_type="grpo")
    trl_grpo.install(trainer)
    data = trainer.train_dataset.select(range(2))
    planned = trainer.evaluate(data)["eval_loss"]
    assert planned == pytest.approx(grpo.trainer_of(folder, loss_type="grpo").evaluate(data)["eval_loss"])


def test_losses_that_would_change_are_rejected(folder: Path) -> None:
    for settings, message in (
        ({"loss_type": "bnpo"}, "got loss_type='bnpo', expected one of cispo, dapo, dr_grpo, grpo, luspo, sapo, vespo"),
        ({"entropy_coef": 0.1}, "got an entropy bonus, expected entropy_coef=0"),
        ({"use_adaptive_entropy": True}, "got an entropy bonus"),
        ({"top_entropy_quantile": 0.5}, "got top_entropy_quantile=0.5, expected 1.0"),
    ):
        with pytest.raises(UserError, match=message):
            trl_grpo.install(grpo.trainer_of(folder, **settings))
    with pytest.raises(UserError, match="got a trainer of type object, expected a GRPOTrainer"):
        trl_grpo.install(object())


def test_models_whose_positions_depend_on_padding_are_rejected(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    small = {"vocab_size": grpo.VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for model in (
        GPT2LMHeadModel(GPT2Config(vocab_size=grpo.VOCAB, n_embd=32, n_layer=1, n_head=2)),
        LlamaForCausalLM(LlamaConfig(num_attention_heads=2, rope_parameters=dynamic, **small)),
    ):
        with pytest.raises(UserError, match=f"got a model of type '{model.config.model_type}' with absolute positions"):
            trl_grpo.install(grpo.trainer_of(folder, model))


def test_rollouts_with_unknown_fields_are_rejected(folder: Path) -> None:
    trainer = grpo.trainer_of(folder)
    score = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda rows: (made := score(rows)) | {"pixels": made["prompt_ids"]}
    trl_grpo.install(trainer)
    with pytest.raises(UserError, match="got rollouts with pixels, expected rollouts of text"):
        grpo.trained(trainer)


@given(
    lengths=st.lists(st.integers(1, 500), min_size=24, max_size=24),
    micro_batches=st.integers(1, 4),
    ranks=st.sampled_from([1, 2, 3, 6]),
)
def test_plans_have_all_rollouts_and_no_empty_micro_batch(lengths: list[int], micro_batches: int, ranks: int) -> None:
    plan = trl_grpo.plan_micro_batches(lengths, micro_batches, ranks)
    assert plan.num_micro_batches == micro_batches
    assert sorted(plan.order()) == list(range(24))
    for packs in zip(*plan.packs, strict=True):
        assert len({len(pack) for pack in packs}) == 1, "as many rows on each rank"
        assert packs[0]
    even = max(lengths) * -(-24 // ranks // micro_batches)
    assert max(rows * length for rows, length in plan.shapes) <= even, "no larger than that of an even split"
