"""Frameworks over a run whose rules change: what they can follow they follow, and elsewhere training ends cleanly."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import streampack
from streampack import integrations
from streampack.config.typed_yaml import convert
from streampack.errors import UserError
from streampack.integrations.checks import megatron_checks
from streampack.sources import SourceSettings, open_source
from tests.integration.frameworks.megatron_lm.megatron_ranks import arguments, train_iterator
from tests.integration.frameworks.megatron_lm.megatron_ranks import ranks as ranks
from tests.integration.running import RunningBroker, producing_here, running_broker, write_jsonl

SETTINGS: dict[str, Any] = {
    "rules": {"budget": 128, "window": {"samples": 16}, "step": {"packs": 2}},
    "streams": {"text": {"repeat": True}},
    "stages": [
        {"name": "more", "at": {"step": 3}, "rules": {"step": {"packs": 4}}},
        {"name": "long", "at": {"step": 5}, "rules": {"budget": 256}},
    ],
}
PACKS = [2, 2, 2, 4, 4, 4]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    rows = [{"text": "t" * (1 + i * 7 % 90)} for i in range(60)]
    file = write_jsonl(tmp_path_factory.mktemp("data") / "a.jsonl", rows)
    source = open_source(convert({"source": "jsonl", "shards": str(file)}, SourceSettings))
    with running_broker(SETTINGS) as running, producing_here(running.producers, {"text": source}):
        yield running


def of_torchtitan(broker: RunningBroker, rows: int) -> Any:
    config = integrations.torchtitan.StreampackDataLoader.Config(endpoint=broker.trainers)
    return config.build(dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=128, local_batch_size=rows)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]


def test_lightning_goes_on_from_the_checkpoint_with_the_packs_of_the_new_stage(
    broker: RunningBroker, tmp_path: Path
) -> None:
    from tests.integration.frameworks import fits

    def of(steps: range) -> list[Any]:
        return [each for k in steps for each in (*((k, m) for m in range(PACKS[k])), "update")]

    path = tmp_path / "saved.ckpt"
    with pytest.warns(
        UserWarning, match=r"training stops.*step 3, which is in stage 'more'.*accumulate_grad_batches=4"
    ):
        first = fits.fit(broker, fits.Saving(path), max_epochs=3)
    assert first.noted == of(range(3))
    rest = fits.fit(broker, resume=path, max_epochs=2, accumulate_grad_batches=4, max_steps=6)
    assert rest.noted == of(range(3, 6))
    in_steps = fits.fit(broker, model=fits.InSteps(), accumulate_grad_batches=1, max_steps=6)
    assert in_steps.noted == of(range(6))
    for name, value in in_steps.state_dict().items():
        torch.testing.assert_close(value, rest.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_megatron_ends_where_a_stage_has_other_packs_and_says_what_to_set(
    broker: RunningBroker, caplog: pytest.LogCaptureFixture
) -> None:
    train = train_iterator(broker, arguments(global_batch_size=2))
    first, second = warned(caplog)
    assert first.startswith("training ends with StageEnds where stage 'more' begins (step 3): got steps of 4 packs")
    assert "where stage 'long' begins (step 5)" in second
    assert [next(train)["tokens"].shape for _ in range(6)] == [(1, 128)] * 6
    for _ in range(2):
        with pytest.raises(streampack.StageEnds, match=r"step 3, .* Set global_batch_size to rules.step.packs"):
            next(train)
    assert train.save_state()["next_step"] == 3
    train.close()


def test_stages_follow_megatrons_rampup_of_the_batch_size(
    broker: RunningBroker, caplog: pytest.LogCaptureFixture
) -> None:
    train = train_iterator(broker, arguments(global_batch_size=4, rampup_batch_size=[2, 2, 6]))
    assert len(warned(caplog)) == 1
    assert len([next(train) for _ in range(2 * 3 + 4 * 2)]) == 14
    with pytest.raises(streampack.StageEnds, match=r"step 5, which is in stage 'long': got packs of 256 tokens"):
        next(train)
    train.close()
    with pytest.raises(UserError) as error:
        train_iterator(broker, arguments(global_batch_size=6, rampup_batch_size=[2, 2, 16]))
    assert "`rules.step.packs: 2`" in str(error.value)
    assert "  - {name: batch-4, at: {step: 4}, rules: {step: {packs: 4}}}\n" in str(error.value)


@pytest.mark.parametrize(
    ("ramp", "size"), [([2, 2, 6], 4), ([8, 4, 1000], 32), ([16, 16, 100_000], 256), ([3, 1, 5], 7)]
)
def test_sizes_of_a_rampup_are_those_of_megatron(ramp: list[int], size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator as Calculator
    sizes = megatron_checks.rampup_sizes(arguments(global_batch_size=size, rampup_batch_size=ramp))
    calculator, consumed, expected = Calculator(size, 1, 1, False, 1, *ramp), 0, list[tuple[int, int]]()
    for iteration in range(sizes[-1][0] + 3):
        calculator.update(consumed, False)
        consumed += calculator.current_global_batch_size
        if not expected or expected[-1][1] != calculator.current_global_batch_size:
            expected.append((iteration, calculator.current_global_batch_size))
    assert sizes == expected


def test_torchtitan_ends_where_a_stage_has_other_packs_and_says_what_to_set(
    broker: RunningBroker, caplog: pytest.LogCaptureFixture
) -> None:
    data = of_torchtitan(broker, 2)
    assert "Set training.steps to that step" in warned(caplog)[0]
    batches = iter(data)
    assert [next(batches)[1].shape for _ in range(3)] == [(2, 128)] * 3
    with pytest.raises(streampack.StageEnds, match=r"step 3, .*Set training.global_batch_size to 4"):
        next(batches)
    state = data.state_dict()
    assert state["next_step"] == 3
    data.close()
    data = of_torchtitan(broker, 4)
    data.load_state_dict(state)
    batches = iter(data)
    assert [next(batches)[1].shape for _ in range(2)] == [(4, 128)] * 2
    with pytest.raises(streampack.StageEnds, match=r"step 5, .*got packs of 256 tokens, expected packs of seq_len=128"):
        next(batches)
    data.close()
