"""NeMo-RL's micro-batches and losses: by its own worker from a checkout, and as it has once computed them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import streampack
from streampack.config.typed_yaml import convert
from streampack.core.model.fields import Field
from streampack.core.model.mesh import Mesh
from streampack.errors import UserError
from streampack.integrations.nemo_rl import rows_of
from streampack.packs.step import Step
from streampack.sources import SourceSettings, open_source
from streampack.views.formats import view
from tests.integration.frameworks.nemo_rl import rollouts
from tests.integration.frameworks.nemo_rl.rollouts import DP, GOLDEN, MODES, STEPS
from tests.integration.running import PATIENCE_S, producing_here, running_broker, write_jsonl
from tests.packs.cases import Case, built, parts

CHECKOUT = os.environ.get("STREAMPACK_NEMO_RL")


@contextmanager
def broker_of(mode: str, path: Path) -> Iterator[str]:
    """A broker that serves the rollouts as micro-batches of ``mode``; yields the trainers' endpoint."""
    write_jsonl(path / f"{mode}.jsonl", [rollouts.rollout(number) for number in range(400)])
    source = open_source(convert({"source": "jsonl", "shards": str(path / f"{mode}.jsonl")}, SourceSettings))
    with running_broker(rollouts.settings(mode)) as broker, producing_here(broker.producers, {"rollouts": source}):
        yield broker.trainers


def run_ranks(path: Path, arguments: list[str], code: int) -> None:
    """Run all ranks of NeMo-RL's worker until they end with this exit code."""
    assert CHECKOUT is not None
    program = "tests.integration.frameworks.nemo_rl.worker_rank"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen([sys.executable, "-m", program, CHECKOUT, str(rank), port, str(path / "rank"), *arguments])
        for rank in range(DP)
    ]
    try:
        assert [rank.wait(600) for rank in ranks] == [code] * DP
    finally:
        for each in ranks:
            each.kill()


@pytest.mark.skipif(CHECKOUT is None, reason="set STREAMPACK_NEMO_RL to a checkout of NVIDIA-NeMo/RL")
def test_the_worker_of_nemo_rl_has_the_micro_batches_and_losses_of_its_own_split(tmp_path: Path) -> None:
    """With STREAMPACK_WRITE_GOLDEN=1, also store what NeMo-RL's own split has."""
    with ExitStack() as stack:
        modes = [f"{mode}={stack.enter_context(broker_of(mode, tmp_path))}" for mode in MODES]
        run_ranks(tmp_path, modes, 0)
        feeds = dict(each.split("=", 1) for each in modes)
        for mode, endpoint in feeds.items():
            run_ranks(tmp_path, ["dies_at=9", f"{mode}={endpoint}"], -signal.SIGKILL)
            run_ranks(tmp_path, ["dies_at=-1", f"{mode}={endpoint}"], 0)
    found = [rollouts.results_of(tmp_path / f"rank.{rank}.json") for rank in range(DP)]
    golden: dict[str, Any] = {}
    for mode in MODES:
        ours, theirs = ([one[f"{mode} {source}"] for one in found] for source in ("ours", "theirs"))
        for number in range(STEPS):
            check_train(mode, *([one["train"][number] for one in each] for each in (ours, theirs)))
        if mode == "padded":
            assert [one["logprobs"] for one in ours] == [one["logprobs"] for one in theirs]
        np.testing.assert_allclose(ours[0]["losses"], theirs[0]["losses"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours[0]["losses"], found[0][f"{mode} alone"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours[0]["logprobs_sum"], theirs[0]["logprobs_sum"], rtol=1e-6)
        lines = [json.loads(line) for line in (tmp_path / f"rank.{mode}.lines").read_text().splitlines()]
        assert [step for step, _ in lines] == [*range(10), *range(8, STEPS)], "killed after step 9, saved after step 7"
        by_page = [loss for _, loss in lines]
        np.testing.assert_allclose(by_page[:8] + by_page[10:], ours[0]["losses"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(by_page[8:10], by_page[10:12], rtol=0, atol=1e-12)
        golden[mode] = {
            "losses": theirs[0]["losses"], "logprobs_sum": theirs[0]["logprobs_sum"],
            **{name: [one[name] for one in theirs] for name in ("train", "logprobs")},
        }  # fmt: skip
    if os.environ.get("STREAMPACK_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(golden) + "\n")


def check_train(mode: str, ours: list[list[Any]], theirs: list[list[Any]]) -> None:
    """One step's micro-batches of all ranks. NeMo-RL's packer makes a multiple of the ranks; here packs are split."""
    assert [len(rank) for rank in ours] == [len(rank) for rank in theirs]
    if mode == "packs":
        lengths = sorted(length for rank in theirs for micro_batch in rank for length in micro_batch)
        assert sorted(length for rank in ours for micro_batch in rank for length in micro_batch) == lengths
        plan = streampack.plan_step(
            lengths, rollouts.BUDGET, 1, packer="modified_first_fit_decreasing", leftovers="emptiest",
            align=rollouts.MULTIPLE, balance="none", order="packer",
        )  # fmt: skip
        if len(plan.packs[0]) % DP:
            return
    assert ours == theirs


def loss_of(model: Any, batch: dict[str, torch.Tensor], count: float) -> torch.Tensor:
    """The loss of GRPO as NeMo-RL's ``ClippedPGLossFn`` defines it, of rows [B, S] and over ``count`` tokens."""
    now = logprobs_of(model, batch["input_ids"])
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    before, reference, advantages = (
        batch[name][:, 1:] for name in ("prev_logprobs", "reference_policy_logprobs", "advantages")
    )
    ratio = (now - before).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    apart = (reference - now).clamp(-20, 20)
    penalty = ((now - now.detach()).exp() * (apart.exp() - apart - 1)).clamp(-10, 10)
    return ((clipped + rollouts.KL * penalty) * mask).sum() / count


def logprobs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    logprobs: torch.Tensor = logits.gather(-1, ids[:, 1:, None])[..., 0]
    return logprobs


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_and_losses_are_those_that_nemo_rl_has_computed(mode: str, tmp_path: Path) -> None:
    golden, steps = rollouts.results_of(GOLDEN)[mode], [list[Step[Any]]() for _ in range(DP)]

    def read(rank: int, endpoint: str) -> None:
        mesh = {"dp": DP, "dp_rank": rank}
        with streampack.connect(endpoint, mesh=mesh, format="numpy", verify=True) as loader:
            steps[rank] += itertools.islice(loader.steps(), STEPS)

    with broker_of(mode, tmp_path) as endpoint:
        ranks = [threading.Thread(target=read, args=(rank, endpoint)) for rank in range(DP)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(PATIENCE_S)
    model, losses, sums = rollouts.model(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=rollouts.LR)
    for number, of_ranks in enumerate(zip(*steps, strict=True)):
        loss, total, trained = 0.0, 0.0, list[list[Any]]()
        for rank, step in enumerate(of_ranks):
            assert step.rules is not None
            forward = rows_of(step.regroup(rollouts.FORWARD_BUDGET, **rollouts.ROUND[mode]), step.rules)
            columns, bounds, widths = rows_of(step, step.rules)
            lengths = columns["input_lengths"]
            trained.append(rollouts.micro_batches(lengths, bounds, widths, mode))
            if mode == "padded":
                found = rollouts.micro_batches(lengths, *forward[1:], mode)
                assert found == golden["logprobs"][rank][number]
            with torch.no_grad():
                before = logprobs_of(model, columns["input_ids"])
            before = before * (torch.arange(1, before.shape[1] + 1) < lengths[:, None])
            columns["prev_logprobs"] = torch.nn.functional.pad(before, (1, 0))
            total += float(before.sum())
            for begin, end in bounds:
                one = loss_of(model, {name: rows[begin:end] for name, rows in columns.items()}, step.num_loss_tokens)
                one.backward()  # type: ignore[no-untyped-call]
                loss += float(one.detach())
        check_train(mode, trained, [golden["train"][rank][number] for rank in range(DP)])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        sums.append(total)
    np.testing.assert_allclose(losses, golden["losses"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(sums, golden["logprobs_sum"], rtol=1e-6)


def step_of(case: Case) -> Step[Any]:
    """The step as the first context-parallel rank gets it."""
    return built(parts(case, 0, [len(case.packs)], 0), case, Mesh(cp=case.cp))


def test_steps_that_rows_of_nemo_rl_cannot_hold_are_refused_with_their_cause() -> None:
    case = Case([[[5, 6, 7], [8, 9]], [[3]]], align=2, budget=8, cp=1)
    step = step_of(case)
    assert step.rules is not None
    assert rows_of(step, step.rules)[0]["input_lengths"].tolist() == [3, 2, 1]
    idle = step_of(Case([[], []], align=2, budget=8, cp=1))
    with pytest.raises(UserError, match="got 0 samples and 0 rows of padding on this rank, expected more samples"):
        rows_of(idle, step.rules)
    with pytest.raises(UserError, match='expected a loader with format="numpy"'):
        rows_of([view(step[0], "thd", step.rules)], step.rules)
    half = step_of(Case([[[1] * 8]], align=4, budget=8, cp=2))
    with pytest.raises(UserError, match="got packs with `cp_layout: zigzag`, expected whole"):
        rows_of(half, step.rules)
    labeled = step_of(
        Case(case.packs, 2, 8, 1, fields=(Field(name="labels", dtype="int64", align="target", pad=-100),))
    )
    assert labeled.rules is not None
    with pytest.raises(UserError, match="got a field labels, which NeMo-RL derives from tokens"):
        rows_of(labeled, labeled.rules)
