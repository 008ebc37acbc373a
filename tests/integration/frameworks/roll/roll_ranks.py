"""Ranks that train with ROLL: ``python -m tests.integration.frameworks.roll.roll_ranks JOBS``, a file of JSON.

Jobs run one after another, each in forked ranks. Rank 0 writes a line of JSON a step to ``output``: ``loss`` over all
ranks, and the shapes of ``train`` and ``infer`` micro-batches of each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.docs.pages import BLOCKS
from tests.integration.frameworks.roll import roll_samples as samples
from tests.integration.frameworks.roll import roll_stand_ins as stand_ins

PAGE = [block.code for block in BLOCKS if block.page == "docs/how-to/roll.md" and block.language == "python"]


@dataclass(frozen=True)
class Job:
    """A run: ``own`` plans with ROLL, ``plan`` with ``plan_step``, ``feed`` reads a broker; see the module."""

    kind: str
    padded: bool
    ranks: int
    output: str
    endpoint: str = ""
    dies_at: int | None = None


class AllSteps(Exception):
    """All steps are trained; the feed goes on."""


@dataclass
class Rank:
    """A rank's worker, and what it has noted of the step in progress."""

    job: Job
    shapes: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    infer: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = stand_ins.actor(self.shapes, self.job.padded)
        loss_func = self.worker.loss_func

        def noted(data: Any, output: torch.Tensor) -> Any:
            if not self.losses:
                self.infer, self.shapes[:] = self.shapes[:-1], self.shapes[-1:]
            loss, metrics = loss_func(data, output)
            self.losses.append(float(loss.detach()))
            return loss, metrics

        self.worker.loss_func = noted

    def write(self, step: int) -> None:
        """Write the line of a step, and die behind it if the job says so."""
        total = torch.tensor(sum(self.losses), dtype=torch.float64)
        dist.all_reduce(total)
        found: list[Any] = [None] * self.job.ranks
        dist.all_gather_object(found, [[*self.shapes], [*self.infer]])
        if dist.get_rank() == 0:
            line = {
                "step": step,
                "loss": float(total),
                "train": [of[0] for of in found],
                "infer": [of[1] for of in found],
            }
            with Path(self.job.output).open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.losses.clear()
        self.shapes.clear()
        dist.barrier()
        if step == self.job.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


def whole(step: int) -> Any:
    """The batch of a step as ROLL's pipeline has it, for all ranks."""
    from roll.distributed.scheduler.protocol import DataProto

    rows = samples.rows()[step * samples.SAMPLES : (step + 1) * samples.SAMPLES]

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        found = torch.zeros(len(rows), samples.SEQUENCE, dtype=dtype)
        for at, row in enumerate(rows):
            found[at, : len(row[name])] = torch.tensor(row[name], dtype=dtype)
        return found

    ids = column("tokens", torch.int64)
    batch = {
        "input_ids": ids, "attention_mask": (ids > 0).long(), "number": torch.arange(len(rows)),
        "position_ids": torch.arange(samples.SEQUENCE).expand_as(ids) * (ids > 0),
        "response_mask": column("loss_mask", torch.int64),
    }  # fmt: skip
    batch |= {name: column(name, torch.float32)[:, 1:] for name in ("advantages", "ref_log_probs")}
    return DataProto.from_single_dict(batch, meta_info={"loss_mask_keys": ["response_mask"]})


def train_by_batches(rank: Rank) -> None:
    """What ROLL's pipeline does with each batch: log-probs, then an update, with the worker's own methods."""
    from roll.utils import dynamic_batching
    from roll.utils.functionals import batch_balance

    job, worker = rank.job, rank.worker

    def part(batch: Any, tokens: int, round: int) -> Any:
        """This rank's part, as the driver deals it."""
        batch_balance(batch, job.ranks, len(batch))
        if job.padded:
            batch, _ = dynamic_batching.dynamic_batching_shard(batch, job.ranks, tokens, round)
        return batch.chunk(job.ranks)[dist.get_rank()]

    for step in range(samples.STEPS):
        batch = whole(step)
        own = part(whole(step), samples.INFER_TOKENS, samples.INFER_ROUND)
        passed = worker.compute_log_probs(own).batch["log_probs"]
        found: list[Any] = [None] * job.ranks
        dist.all_gather_object(found, (own.batch["number"], passed))
        numbers, values = (torch.cat(of) for of in zip(*found, strict=True))
        batch.batch["old_log_probs"] = values[numbers.argsort()]
        worker.train_step(part(batch, samples.TRAIN_TOKENS, samples.TRAIN_ROUND))
        rank.write(step)


def train_by_steps(rank: Rank) -> None:
    """The loop of the page over a broker's steps, which goes on from the checkpoint beside the output."""
    names: dict[str, Any] = {}
    for code in PAGE:
        exec(compile(code, "roll.md", "exec"), names)
    strategy, job = rank.worker.strategy, rank.job
    checkpoint = Path(job.output).with_suffix(".pt")
    parts = (*strategy.models_unwrapped, strategy.optimizer, strategy.scheduler)
    resume = None
    if checkpoint.exists():
        *states, resume = torch.load(checkpoint, weights_only=False)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)

    def save(step: int, state: Any) -> None:
        if dist.get_rank() == 0 and step % 4 == 3:
            torch.save([*(part.state_dict() for part in parts), state], checkpoint)
        rank.write(step)
        if step + 1 == samples.STEPS:
            raise AllSteps

    more = {"round": samples.INFER_ROUND} if job.padded else {}
    with contextlib.suppress(AllSteps):
        names["train_on_feed"](rank.worker, job.endpoint, samples.INFER_TOKENS, save, resume=resume, **more)


def run(job: Job, number: int) -> None:
    """Run a rank to its end."""
    meeting = f"{job.output}.{job.dies_at}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=job.ranks)
    from megatron.core import mpu

    mpu.initialize_model_parallel()
    if job.kind == "plan":
        from streampack.integrations import roll

        roll.install()
    train = train_by_steps if job.kind == "feed" else train_by_batches
    train(Rank(job))
    dist.destroy_process_group()


def main(jobs: list[Job], checkout: str) -> None:
    """Run the jobs; print how the ranks of each have ended."""
    stand_ins.prepare(checkout)
    from roll.pipeline import base_worker  # each rank begins with it

    base_worker.tqdm = lambda batches, **_: batches

    ended = []
    for job in jobs:
        pids = []
        for number in range(job.ranks):
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    run(job, number)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        ended.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
    print(json.dumps(ended))


if __name__ == "__main__":
    main([Job(**each) for each in json.loads(Path(sys.argv[1]).read_text())], os.environ["STREAMPACK_ROLL"])
