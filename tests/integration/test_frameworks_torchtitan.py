"""torchtitan: its own Trainer, killed in the middle and started again, has the losses of one that was not; and what its
dataloader refuses."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from streampack.core.rules import Batch, Rules, Warmup
from streampack.errors import UserError
from streampack.integrations.torchtitan import StreampackDataLoader, check_rules
from tests.integration.frameworks import EXAMPLES, RULES, killed_and_resumed_is_the_same, serving
from tests.integration.running import RunningBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with serving() as running:
        yield running


def loader(broker: RunningBroker, *, dp: int = 1, dp_rank: int = 0, seq_len: int = 128, **kwargs: Any) -> Any:
    """As torchtitan's Trainer builds it."""
    config = StreampackDataLoader.Config(endpoint=broker.trainers)
    return config.build(dp_world_size=dp, dp_rank=dp_rank, tokenizer=None, seq_len=seq_len, **kwargs)


def test_torchtitans_trainer_goes_on_where_it_was_killed(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")  # it imports another example
    killed_and_resumed_is_the_same("torchtitan_trainer", broker, tmp_path)


def test_the_ranks_have_every_sample_once_a_pass_and_end_together() -> None:
    with serving() as broker:
        both = [loader(broker, dp=2, dp_rank=rank, local_batch_size=2) for rank in (0, 1)]
        with ThreadPoolExecutor(2) as threads:
            batches: list[list[Any]] = list(threads.map(list, both))
    assert len(batches[0]) == len(batches[1]) > 20
    samples: Counter[tuple[int, ...]] = Counter()
    for inputs, labels in itertools.chain(*batches):
        assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (2, 128)
        for ids, positions, targets in zip(inputs["input"], inputs["positions"], labels, strict=True):
            starts = [*torch.nonzero(positions == 0)[:, 0].tolist(), 128]
            for a, b in itertools.pairwise(starts):
                assert targets[a:b].tolist() in ([*ids[a + 1 : b].tolist(), -100], [-100] * (b - a))
                samples[tuple(ids[a:b].tolist())] += targets[a] != -100
    assert sum(samples.values()) == 3 * 400
    assert len([sample for sample in samples if samples[sample]]) == 45, "texts that differ"


def test_a_checkpoint_within_a_step_is_refused(broker: RunningBroker) -> None:
    data = loader(broker, local_batch_size=1)
    batches = iter(data)
    for _ in range(4):
        next(batches)
    state = data.state_dict()
    next(batches)
    with pytest.raises(UserError, match=r"within step 1, 3 packs before its end.*set training.global_batch_size to 4"):
        data.state_dict()
    data.close()
    other = loader(broker, local_batch_size=4)
    other.load_state_dict(state)
    assert other.state_dict() == state
    other.close()


def test_what_would_train_on_other_updates_is_refused_at_once(broker: RunningBroker) -> None:
    with pytest.raises(UserError, match=r"got packs of 128 tokens, expected all of seq_len=256: set training.seq_len"):
        loader(broker, local_batch_size=1, seq_len=256)
    with pytest.raises(UserError, match="batches of 3 packs on each rank, expected them to make whole steps of 4"):
        loader(broker, local_batch_size=3)
    with pytest.raises(UserError, match=r"checkpoints every 6 packs.*set training.global_batch_size to 4"):
        loader(broker, local_batch_size=1, snapshot_every_n_steps=6)


def test_packs_that_are_no_rows_are_refused() -> None:
    check_rules(Rules(budget=128, packs=4), 2, seq_len=128, rows=2, snapshot=None)
    with pytest.raises(UserError, match="got steps that are batches"):
        check_rules(Rules(budget=128, batch=Batch(samples=8)), 2, seq_len=128, rows=2, snapshot=None)
    with pytest.raises(UserError, match="got packs of a budget that grows"):
        check_rules(Rules(budget=128, packs=4, warmup=Warmup(init=64, steps=4)), 2, seq_len=128, rows=2, snapshot=None)


def test_rules_of_the_example() -> None:
    text = (EXAMPLES / "torchtitan_trainer.py").read_text()
    assert f"seq_len={RULES['budget']}, local_batch_size=1, global_batch_size={RULES['step']['packs']}" in text
