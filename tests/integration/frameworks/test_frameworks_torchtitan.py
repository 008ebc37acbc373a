"""torchtitan: its own Trainer, killed in the middle and started again, has the losses of one that was not; and what its
dataloader refuses.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streampack import integrations
from streampack.core.model.keys.planning_keys import Warmup
from streampack.core.model.rules import Batch, Rules
from streampack.errors import UserError
from tests.integration.frameworks.example_runs import (
    EXAMPLES,
    RULES,
    Run,
    check_the_same_losses,
    killed_and_resumed_is_the_same,
    run,
    serving,
)
from tests.integration.running import RunningBroker, forked, until


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with serving() as running:
        yield running


def loader(broker: RunningBroker, *, dp: int = 1, dp_rank: int = 0, seq_len: int = 128, **kwargs: Any) -> Any:
    """As torchtitan's Trainer builds it."""
    config = integrations.torchtitan.StreampackDataLoader.Config(endpoint=broker.trainers)
    return config.build(dp_world_size=dp, dp_rank=dp_rank, tokenizer=None, seq_len=seq_len, **kwargs)


def test_torchtitans_trainer_goes_on_where_it_was_killed(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")  # it imports another example
    killed_and_resumed_is_the_same("torchtitan_trainer", broker, tmp_path)
    until(lambda: broker.feed()["committed"] == 3)  # of checkpoints after 4 and 8 updates; the one after 8 was the last


def test_two_ranks_with_fsdp_go_on_from_one_and_have_its_losses(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 steps on two ranks, killed once; and the words with which torchtitan refuses cp 2 with packs."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    script, one = str(Path(__file__).with_name("torchtitan_doubles")), tmp_path / "one"
    begun, cut, rest, whole = run(
        broker,
        Run(script, tmp_path / "ranks", dies_at=4, steps=24),
        Run(script, tmp_path / "ranks", dies_at=13, ranks=2, steps=24),
        Run(script, tmp_path / "ranks", ranks=2, steps=24),
        Run(script, one, steps=24),
    )
    assert whole.pop() == rest.pop() == {"step": 24, "error": "Variable-length attention CP is not yet supported"}
    assert begun == whole[:5]
    assert cut[0]["step"] == 4
    check_the_same_losses(whole, cut, rest, begins=12)


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


def test_each_loader_that_a_validator_builds_begins_at_the_first_step(broker: RunningBroker) -> None:
    config = replace(integrations.torchtitan.StreampackDataLoader.Config(endpoint=broker.trainers), infinite=False)
    built = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": None, "seq_len": 128, "local_batch_size": 2}
    first, second = (
        [inputs["input"].tolist() for inputs, _ in itertools.islice(config.build(**built), 3)] for _ in range(2)
    )
    assert first == second


TWO_OF_ONE_DP_RANK = """
import itertools, json, os, sys
import torch.distributed as dist
from streampack.integrations.torchtitan import StreampackDataLoader

child = os.fork()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=int(child == 0), world_size=2)
data = StreampackDataLoader.Config().build(dp_world_size=1, dp_rank=0, seq_len=128, local_batch_size=1)
had = [inputs["input"].tolist() for inputs, _ in itertools.islice(data, 8)]
both = [None, None]
dist.all_gather_object(both, (data._loader.mesh.tp_rank, had))
if child:
    os.waitpid(child, 0)
    print(json.dumps(both))
"""


def test_ranks_that_share_a_data_parallel_rank_read_the_same(broker: RunningBroker, tmp_path: Path) -> None:
    """As those of tensor, context and pipeline parallelism do."""
    (tmp_path / "read.py").write_text(TWO_OF_ONE_DP_RANK)
    told = {"STREAMPACK_ENDPOINT": broker.trainers}
    done = forked("tests.integration.scripts", tmp_path / "read.py", tmp_path, environment=told)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (first[0], second[0]) == (0, 1)
    assert first[1] == second[1]
    assert len(first[1]) == 8


def test_a_checkpoint_within_a_step_is_refused(broker: RunningBroker) -> None:
    data = loader(broker, local_batch_size=1)
    batches = iter(data)
    for _ in range(4):
        next(batches)
    state = data.state_dict()
    next(batches)
    with pytest.raises(UserError, match=r"within step 1, 3 packs before its end.*Set training.global_batch_size to 4"):
        data.state_dict()
    data.load_state_dict(state)
    assert data.state_dict() == state
    data.close()
    other = loader(broker, local_batch_size=4)
    other.load_state_dict({})
    other.load_state_dict(state)
    assert other.state_dict() == state
    other.close()


def test_settings_that_would_train_on_other_updates_are_refused_at_once(broker: RunningBroker) -> None:
    with pytest.raises(
        UserError, match=r"got packs of 128 tokens, expected packs of seq_len=256 tokens. Set training.seq_len"
    ):
        loader(broker, local_batch_size=1, seq_len=256)
    with pytest.raises(UserError, match="batches of 3 packs on each rank, expected whole steps of 4"):
        loader(broker, local_batch_size=3)
    with pytest.raises(UserError, match=r"checkpoints every 6 packs.*Set training.global_batch_size to 4"):
        loader(broker, local_batch_size=1, snapshot_every_n_steps=6)


def test_packs_that_are_no_rows_are_refused() -> None:
    check_rules = integrations.torchtitan.check_rules
    check_rules(Rules(budget=128, packs=4), 2, seq_len=128, rows=2, snapshot=None)
    with pytest.raises(UserError, match="got steps with a varying number of packs"):
        check_rules(Rules(budget=128, batch=Batch(samples=8)), 2, seq_len=128, rows=2, snapshot=None)
    with pytest.raises(UserError, match="got packs of a growing budget"):
        check_rules(Rules(budget=128, packs=4, warmup=Warmup(init=64, steps=4)), 2, seq_len=128, rows=2, snapshot=None)
    for rows in (0, -1):
        with pytest.raises(UserError, match=f"got batches of {rows} packs"):
            check_rules(Rules(budget=128, packs=4), 2, seq_len=128, rows=rows, snapshot=None)


def test_the_rules_have_the_sizes_of_the_example() -> None:
    text = (EXAMPLES / "torchtitan_trainer.py").read_text()
    assert f"seq_len={RULES['budget']}, local_batch_size=1, global_batch_size={RULES['step']['packs']}" in text
