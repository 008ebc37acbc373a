"""ROLL: its actor worker trains on streampack's micro-batches with the losses of its own, and goes on after a kill.

Without a checkout (STREAMPACK_ROLL), the shapes and losses that a run with one has recorded stand for ROLL's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import streampack
from streampack.config.typed_yaml import convert
from streampack.errors import SampleError, UserError
from streampack.integrations import roll as adapter
from streampack.sources import SourceSettings, open_source
from tests.docs.pages import BLOCKS
from tests.integration.frameworks.roll import roll_samples as samples
from tests.integration.running import PATIENCE_S, RunningBroker, producing_here, running_broker, write_jsonl

TINY = {
    "__init__": "", "utils/__init__": "", "distributed/__init__": "", "distributed/scheduler/__init__": "",
    "utils/dynamic_batching": """def dynamic_batching_shard(
    origin_batch, dp_size, max_tokens_per_microbatch, sequence_length_round, pipeline_model_parallel_size,
    virtual_pipeline_model_parallel_size, log_prefix
): ...
""",
    "utils/sequence_packing": """def make_micro_batch_iter_for_sequence_packing(
    mini_batch, tp_size, cp_size, vp_size, is_train, dp_group, micro_batch_size, config
): ...
""",
    "user": "from roll.utils.dynamic_batching import dynamic_batching_shard",
    "platforms": "class current_platform: device_type = 'cpu'",
    "distributed/scheduler/protocol": """class DataProto:
    def __init__(self, batch, meta_info):
        self.batch, self.meta_info = batch, meta_info
    @classmethod
    def from_single_dict(cls, data, meta_info): return cls(data, meta_info)
    def to(self, device): return self
    def __len__(self): return len(self.batch["input_ids"])
    def slice(self): return DataProto(dict(self.batch), self.meta_info)
    def select_idxs(self, rows): return DataProto({k: v[rows] for k, v in self.batch.items()}, {})
    def reorder(self, rows): self.batch = {k: v[rows] for k, v in self.batch.items()}
""",
}  # fmt: skip
"""The names of ROLL that the adapter needs, where no checkout is."""
CHECKOUT = os.environ.get("STREAMPACK_ROLL")
RECORDED = Path(__file__).parent / "recorded.json"
with_roll = pytest.mark.skipif(not CHECKOUT, reason="STREAMPACK_ROLL names no checkout of ROLL")
KINDS = {"padded": True, "packed": False}
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningBroker]]:
    """A broker of padded micro-batches and one of packs."""
    file = write_jsonl(tmp_path_factory.mktemp("data") / "rollouts.jsonl", samples.rows())
    with ExitStack() as stack:
        found = {}
        for name, padded in KINDS.items():
            source = {"source": "jsonl", "shards": str(file), "shuffle": False}
            found[name] = stack.enter_context(running_broker(samples.settings(padded)))
            rollouts = open_source(convert(source, SourceSettings))
            stack.enter_context(producing_here(found[name].producers, {"rollouts": rollouts}))
        yield found


@pytest.fixture(scope="module")
def one_process() -> list[float]:
    return samples.one_process()


@pytest.fixture(scope="module")
def runs(brokers: dict[str, RunningBroker], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lines]:
    """The lines of each run of two ranks; those that read a broker are killed, and go on from their checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    jobs = []
    for name, padded in KINDS.items():
        endpoint = brokers[name].trainers
        for kind, dies_at in (("own", None), ("plan", None), ("feed", 5), ("feed", None)):
            output = str(folder / f"{kind} {name}")
            job = {"kind": kind, "padded": padded, "ranks": 2, "output": output, "dies_at": dies_at}
            jobs.append(job | ({"endpoint": endpoint} if kind == "feed" else {}))
    (file := folder / "jobs.json").write_text(json.dumps(jobs))
    module = "tests.integration.frameworks.roll.roll_ranks"
    root = Path(streampack.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'services'}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(file)], cwd=folder, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    expected = [[-9, -9] if job["dies_at"] else [0, 0] for job in jobs]
    assert done.stdout.splitlines()[-1] == json.dumps(expected), done.stderr
    files = sorted({Path(str(job["output"])) for job in jobs})
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


@pytest.fixture(scope="module")
def recorded() -> dict[str, Lines]:
    """The lines of ROLL's own runs."""
    found: dict[str, Lines] = json.loads(RECORDED.read_text())
    return found


def losses_of(lines: Lines) -> list[float]:
    assert [line["step"] for line in lines] == list(range(samples.STEPS))
    return [line["loss"] for line in lines]


@with_roll
@pytest.mark.parametrize("name", KINDS)
def test_20_steps_have_the_losses_of_one_process(name: str, runs: dict[str, Lines], one_process: list[float]) -> None:
    assert losses_of(runs[f"own {name}"]) == pytest.approx(one_process, abs=1e-6)
    assert losses_of(runs[f"plan {name}"]) == pytest.approx(one_process, abs=1e-6)


@with_roll
@pytest.mark.parametrize("name", KINDS)
def test_ranks_that_read_a_broker_and_are_killed_go_on_with_the_same_steps(
    name: str, runs: dict[str, Lines], one_process: list[float]
) -> None:
    cut, rest = runs[f"feed {name}"][:6], runs[f"feed {name}"][6:]
    assert [line["step"] for line in cut] == [0, 1, 2, 3, 4, 5]
    assert rest[0]["step"] == 4, "the checkpoint is that of step 3"
    assert rest[:2] == cut[4:]
    assert losses_of(cut[:4] + rest) == pytest.approx(one_process, abs=1e-6)


def shapes_of(lines: Lines, phase: str) -> list[Any]:
    return [line[phase] for line in lines]


@with_roll
@pytest.mark.parametrize("phase", ["train", "infer"])
def test_padded_micro_batches_have_the_shapes_of_roll(phase: str, runs: dict[str, Lines]) -> None:
    theirs = shapes_of(runs["own padded"], phase)
    assert shapes_of(runs["plan padded"], phase) == theirs
    assert shapes_of(runs["feed padded"][:4] + runs["feed padded"][6:], phase) == theirs


LIMITS = {"train": samples.TRAIN_TOKENS, "infer": samples.INFER_TOKENS}


@with_roll
@pytest.mark.parametrize("phase", LIMITS)
def test_packs_are_as_many_as_those_of_roll_and_keep_the_limit(phase: str, runs: dict[str, Lines]) -> None:
    theirs = shapes_of(runs["own packed"], phase)
    for lines in (runs["plan packed"], runs["feed packed"][:4] + runs["feed packed"][6:]):
        ours = shapes_of(lines, phase)
        assert [[len(rank) for rank in step] for step in ours] == [[len(rank) for rank in step] for step in theirs]
        assert max(tokens for step in ours for rank in step for _, tokens in rank) <= LIMITS[phase]


@with_roll
def test_the_recorded_runs_are_those_of_this_checkout(runs: dict[str, Lines]) -> None:
    found = {name: runs[name] for name in ("own padded", "own packed")}
    if os.environ.get("STREAMPACK_ROLL_RECORD"):
        parts = [json.dumps(name) + ": [\n" + ",\n".join(map(json.dumps, found[name])) + "\n]" for name in found]
        RECORDED.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    expected = json.loads(RECORDED.read_text())
    for name, lines in found.items():
        assert losses_of(lines) == pytest.approx(losses_of(expected[name]), abs=1e-9)
        assert [line | {"loss": 0} for line in lines] == [line | {"loss": 0} for line in expected[name]]


@pytest.mark.parametrize("name", KINDS)
def test_the_recorded_losses_of_roll_are_those_of_one_process(
    name: str, recorded: dict[str, Lines], one_process: list[float]
) -> None:
    assert losses_of(recorded[f"own {name}"]) == pytest.approx(one_process, abs=1e-6)


def steps_of(broker: RunningBroker, rank: int = 0, ranks: int = 1) -> list[streampack.Step[Any]]:
    mesh = {"dp": ranks, "dp_rank": rank}
    with streampack.connect(broker.trainers, mesh=mesh, format="numpy", timeout_s=PATIENCE_S) as loader:
        return list(islice(loader.steps(), samples.STEPS))


def steps_of_ranks(broker: RunningBroker) -> list[tuple[streampack.Step[Any], ...]]:
    """Each step on two ranks."""
    with ThreadPoolExecutor(2) as threads:
        return list(zip(*threads.map(lambda rank: steps_of(broker, rank, 2), range(2)), strict=True))


def test_padded_steps_of_a_broker_have_the_recorded_shapes_of_roll(
    brokers: dict[str, RunningBroker], recorded: dict[str, Lines]
) -> None:
    def shapes(packs: Any) -> list[list[int]]:
        return [[len(pack.input_ids) // pack.max_seqlen, pack.max_seqlen] for pack in packs]

    steps = steps_of_ranks(brokers["padded"])
    train = [[shapes(step) for step in ranks] for ranks in steps]
    assert train == shapes_of(recorded["own padded"], "train")
    larger = {"budget": samples.INFER_TOKENS, "round": samples.INFER_ROUND}
    infer = [[shapes(step.regroup(**larger)) for step in ranks] for ranks in steps]
    assert infer == shapes_of(recorded["own padded"], "infer")


def test_packed_steps_of_a_broker_have_as_many_packs_as_roll_recorded(
    brokers: dict[str, RunningBroker], recorded: dict[str, Lines]
) -> None:
    """ROLL's own packs exceed the limit of 128 tokens in one step: its largest differencing looks at costs alone."""
    for ranks, line in zip(steps_of_ranks(brokers["packed"]), recorded["own packed"], strict=True):
        assert [len(step) for step in ranks] == [len(rank) for rank in line["train"]]
        forward = [step.regroup(samples.INFER_TOKENS) for step in ranks]
        assert [len(packs) for packs in forward] == [len(rank) for rank in line["infer"]]
    theirs = shapes_of(recorded["own packed"], "train")
    assert max(tokens for step in theirs for rank in step for _, tokens in rank) == samples.TRAIN_TOKENS + 16


@pytest.fixture
def roll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter, beside modules that have ROLL's names."""
    for name, code in TINY.items():
        file = tmp_path / "roll" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield adapter
    for name in [each for each in sys.modules if each.partition(".")[0] == "roll"]:
        del sys.modules[name]


def batch_of_lengths(lengths: list[int]) -> Any:
    protocol: Any = import_module("roll.distributed.scheduler.protocol")
    mask = (torch.arange(samples.SEQUENCE) < torch.tensor(lengths)[:, None]).long()
    return protocol.DataProto({"input_ids": torch.arange(len(lengths)), "attention_mask": mask}, {"kept": 1})


def test_planned_batches_have_the_recorded_shapes_of_roll(roll: Any, recorded: dict[str, Lines]) -> None:
    sizes = [len(row["tokens"]) for row in samples.rows()]
    for step in range(samples.STEPS):
        lengths = sizes[step * samples.SAMPLES : (step + 1) * samples.SAMPLES]
        padded = recorded["own padded"][step]
        for phase, limit, align in (
            ("train", samples.TRAIN_TOKENS, samples.TRAIN_ROUND), ("infer", samples.INFER_TOKENS, samples.INFER_ROUND),
        ):  # fmt: skip
            batch, metrics = roll.dynamic_batching_shard(batch_of_lengths(lengths), 2, limit, align, 1, None, phase)
            meta, order = batch.meta_info, batch.batch["input_ids"]
            spans = zip(meta["micro_batch_indices"], meta["micro_batch_lengths"], strict=True)
            assert [[stop - start, length] for (start, stop), length in spans] == padded[phase][0]
            assert sorted(order.tolist()) == list(range(samples.SAMPLES))
            assert meta["kept"] == 1
            assert metrics[f"dynamic_batching/{phase}/valid_tokens"] == sum(lengths)
        config = SimpleNamespace(
            algorithm="load_balance", max_packed_sequence_length_forward=limit, min_num_micro_batches_forward=1
        )
        half = lengths[: samples.SAMPLES // 2]
        packs = list(roll.make_micro_batch_iter_for_sequence_packing(batch_of_lengths(half), 1, 1, 1, config=config))
        places = [row for pack in packs for row in pack.meta_info["partition_indices"]]
        assert sorted(places) == list(range(len(half)))
        tokens = [(-(-pack.batch["attention_mask"].sum(1) // 16) * 16).sum() for pack in packs]
        assert max(tokens) <= limit
    with pytest.raises(SampleError, match="got 15 samples, expected a multiple of 2, the data-parallel ranks"):
        roll.dynamic_batching_shard(batch_of_lengths(lengths[1:]), 2, 128, 16, 1, None, None)


def strategy(padded: bool, **changed: Any) -> Any:
    config = {"use_dynamic_batching_in_train": padded, "use_dynamic_batching_in_infer": padded, "infer_batch_size": 4}
    given = {"strategy_name": "megatron_train", "use_sequence_packing": not padded, "seq_length": samples.SEQUENCE}
    return SimpleNamespace(worker_config=SimpleNamespace(**config), **given | changed)


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_has_the_rows_of_a_step_and_results_come_back_to_them(
    name: str, roll: Any, brokers: dict[str, RunningBroker]
) -> None:
    padded, fields = KINDS[name], ("advantages", "ref_log_probs")
    step = steps_of(brokers[name])[3]
    forward = step.regroup(samples.INFER_TOKENS)
    batch = roll.batch_of(step, strategy(padded), fields)
    passed = roll.batch_of(step, strategy(padded), forward=forward)
    assert torch.equal(roll.rows_back(forward, passed.batch["input_ids"]), batch.batch["input_ids"])
    rows = [samples.rows()[index] for index in step.sample_ids[:, 1].tolist()]
    for at, row in enumerate(rows):
        size = len(row["tokens"])
        assert batch.batch["input_ids"][at].tolist() == row["tokens"] + [0] * (samples.SEQUENCE - size)
        assert batch.batch["response_mask"][at, :size].tolist() == row["loss_mask"]
        for field in fields:
            assert batch.batch[field].shape == (len(rows), samples.SEQUENCE - 1)
            assert batch.batch[field][at, : size - 1].tolist() == row[field][1:]
    if padded:
        spans = batch.meta_info["micro_batch_indices"]
        assert [stop - start for start, stop in spans] == [pack.num_samples for pack in step]
    else:
        packs = list(roll.make_micro_batch_iter_for_sequence_packing(batch, 1, 1, 1, is_train=True))
        assert [len(pack) for pack in packs] == [pack.num_samples for pack in step]
        assert torch.equal(torch.cat([pack.batch["input_ids"] for pack in packs]), batch.batch["input_ids"])
        with pytest.raises(UserError, match=r"got 1 rows of a step with 16, expected all of them"):
            roll.make_micro_batch_iter_for_sequence_packing(
                packs[0].__class__({"input_ids": [0], "attention_mask": torch.ones(1, 4)}, batch.meta_info), 1, 1, 1
            )


def test_what_roll_would_split_in_another_way_is_rejected(roll: Any, brokers: dict[str, RunningBroker]) -> None:
    packed, padded = steps_of(brokers["packed"])[0], steps_of(brokers["padded"])[0]
    for step, given, message in (
        (packed, strategy(False, strategy_name="fsdp2_train"), "got strategy fsdp2_train, expected megatron_train or"),
        (packed, strategy(True), "got a feed of packs, expected use_sequence_packing: true"),
        (padded, strategy(False), "with `padded: true`, expected use_dynamic_batching_in_train: true"),
        (packed, strategy(False, seq_length=16), r"got a sample of \d+ tokens, expected at most 16"),
        (padded, strategy(True, seq_length=16), r"got a sample of \d+ tokens, expected at most 16"),
    ):
        with pytest.raises(UserError, match=message):
            roll.batch_of(step, given)
    batch = roll.batch_of(packed, strategy(False))
    config = SimpleNamespace(max_packed_sequence_length_train=64)
    with pytest.raises(
        UserError, match=r"got a pack of \d+ tokens, .* at most 64, the max_packed_sequence_length_train"
    ):
        roll.make_micro_batch_iter_for_sequence_packing(batch, 1, 1, 1, is_train=True, config=config)
    with pytest.raises(UserError, match="packs, expected a multiple of 64"):
        roll.make_micro_batch_iter_for_sequence_packing(batch, 1, 1, 64)


def test_install_replaces_the_functions_where_they_are_used_and_warns_once(
    roll: Any, caplog: pytest.LogCaptureFixture
) -> None:
    user = import_module("roll.user")
    roll.install()
    roll.install()
    assert user.dynamic_batching_shard is roll.dynamic_batching_shard
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} differs from ROLL at commit 8eb27cc, with which streampack was tested"
        for name in ("roll.utils.dynamic_batching", "roll.utils.sequence_packing")
    ]
    changed: Any = import_module("roll.utils.sequence_packing")
    changed.make_micro_batch_iter_for_sequence_packing = lambda batch: batch
    with pytest.raises(UserError, match=r"has no make_micro_batch_iter_for_sequence_packing\(mini_batch, .*8eb27cc"):
        roll.install()


def test_the_rows_that_the_page_pushes_are_the_samples() -> None:
    rows, names = samples.rows()[:3], dict[str, Any]()
    exec(next(code for code in (block.code for block in BLOCKS) if "def push_rollouts" in code), names)

    def padded(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values + [0] * (samples.SEQUENCE - len(values)))

    batch = [
        {"input_ids": padded(row["tokens"]), "attention_mask": padded([1] * len(row["tokens"])),
         "response_mask": padded(row["loss_mask"])}
        | {name: padded(row[name])[1:] for name in ("advantages", "ref_log_probs")}
        for row in rows
    ]  # fmt: skip
    sent: list[Any] = []
    rollouts = SimpleNamespace(send_many=lambda rows, policy_version: sent.extend(rows))
    names["push_rollouts"](rollouts, SimpleNamespace(batch=batch), 3)
    for found, row in zip(sent, rows, strict=True):
        assert (found["input_ids"], found["loss_mask"]) == (row["tokens"], row["loss_mask"])
        assert found["advantages"][1:] == row["advantages"][1:]
        assert len(found["ref_log_probs"]) == len(row["tokens"])
