"""What a rank does in the proofs: it reads its shards from the broker, and trains ``Tiny`` with them as users would."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

import streampack
from streampack.training.attention import varlen_attention
from streampack.training.loss import packed_loss
from tests.training.proofs.ring import by_positions, ring_attention, zigzag
from tests.training.proofs.tiny import Attention, Found, Tiny, found, summed_loss

EVERY = 3
"""Steps between two checkpoints."""


def mesh_of(rank: int, cp: int) -> dict[str, int]:
    dp = dist.get_world_size() // cp
    return {"dp": dp, "cp": cp, "dp_rank": rank // cp, "cp_rank": rank % cp}


def cp_group(rank: int, cp: int) -> Any:
    """The ranks that share packs with this one."""
    groups = [dist.new_group(range(first, first + cp)) for first in range(0, dist.get_world_size(), cp)]
    return groups[rank // cp]


def attention_of(batch: Any, group: Any) -> Attention:
    """Over the shards of a pack, as its layout says; over a whole pack where there is one rank."""
    if batch.cp == 1:
        return partial(varlen_attention, pack=batch)
    if batch.layout == "zigzag":
        masks = zigzag(batch.cu_seqlens_padded, batch.cp_rank, batch.cp)
    else:
        masks = by_positions(torch.as_tensor(batch.canonical.positions()), batch.cu_seqlens_padded, group)
    return ring_attention(group, masks)


@dataclass(frozen=True)
class Seen:
    """A step: its digest, the rows and the lengths of the packs that this rank had, and what was found over all."""

    digest: str
    rows: list[int]
    lengths: list[int]
    found: Found


def summed(rank: int, endpoint: str, feeds: Sequence[str], cp: int) -> dict[str, list[Seen]]:
    """Every step of some feeds, gradients summed over ranks: losses are parts of the step's, and no more."""
    net, group = Tiny(), cp_group(rank, cp)

    def found_over_all(total: float) -> Found:
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        return found(net, summed_over(total))

    return {feed: list(steps(endpoint, feed, mesh_of(rank, cp), group, net, 1, found_over_all)) for feed in feeds}


def in_groups(rank: int, endpoint: str, feed: str, cp: int) -> list[tuple[Seen, list[tuple[int, int, int]]]]:
    """Every step of a feed with dynamic context parallelism, and of each batch (step, pack, ranks that share it)."""
    net, groups, seen = Tiny(), streampack.cp_groups(), list[tuple[Seen, list[tuple[int, int, int]]]]()
    mesh = mesh_of(rank, cp)
    with streampack.connect(endpoint, feed=feed, mesh=mesh, format="thd", verify=True, cp_groups=groups) as loader:
        for step in loader.steps():
            total, rows, packs = 0.0, list[int](), list[tuple[int, int, int]]()
            for batch in step:
                logits = net(batch.input_ids, batch.position_ids, attention_of(batch, batch.cp_group))
                loss = loss_of(logits, batch, step, 1)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
                packs.append((step.index, batch.pack, batch.cp_size))
                rows += batch.row.tolist() if batch.cp_rank == 0 else []
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
            seen.append((Seen(step.digest, rows, [], found(net, summed_over(total))), packs))
    return seen


def averaged(rank: int, endpoint: str, feed: str, cp: int) -> list[Seen]:
    """Every step of a feed with DDP, which averages over dp x cp ranks: losses are multiplied by them."""
    net, group = Tiny(), cp_group(rank, cp)
    ddp, ranks = DistributedDataParallel(net), dist.get_world_size()
    return list(
        steps(endpoint, feed, mesh_of(rank, cp), group, ddp, ranks, lambda total: found(net, summed_over(total)))
    )


def steps(
    endpoint: str, feed: str, mesh: dict[str, int], group: Any, net: nn.Module, averaged_over: int,
    over_all: Callable[[float], Found],
) -> Iterator[Seen]:  # fmt: skip
    with streampack.connect(endpoint, feed=feed, mesh=mesh, format="thd", verify=True) as loader:
        for step in loader.steps():
            total = 0.0
            for batch in step:
                logits = net(batch.input_ids, batch.position_ids, attention_of(batch, group))
                loss = loss_of(logits, batch, step, averaged_over)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item() / averaged_over
            of = [row for batch in step for row in batch.row.tolist()]
            yield Seen(step.digest, of, [int(batch.cu_seqlens_padded[-1]) for batch in step], over_all(total))


def loss_of(logits: Tensor, batch: Any, step: streampack.Step, averaged_over: int) -> Tensor:
    """This rank's part of the step's mean loss over learned tokens."""
    return packed_loss(
        summed_loss, logits, batch, batch.labels,
        denominator=step.num_loss_tokens, averaged_over=averaged_over, token_sum=True,
    )  # fmt: skip


def summed_over(value: float) -> float:
    """Over all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


class Training:
    """Model and optimizer, as torch's checkpoints want them."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def train(
    rank: int, endpoint: str, folder: Path, steps: int, dies_at: tuple[int, int] | None = None
) -> tuple[list[tuple[int, str, float]], dict[str, Tensor]]:
    """From the newest checkpoint on each step's index, digest and loss over all ranks; and the trained parameters.

    ``dies_at``: the rank that is killed, and in which step: behind its first backward pass, before the optimizer.
    """
    net = Tiny()
    ddp, ranks = DistributedDataParallel(net), dist.get_world_size()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    lines = []
    with streampack.connect(endpoint, feed="train", mesh=mesh_of(rank, 1), format="thd", verify=True) as loader:
        state = {"training": Training(ddp, optimizer), "loader": loader}
        if saved := sorted(folder.glob("*/.metadata")):
            load(state, checkpoint_id=saved[-1].parent)
        for step in loader.steps():
            total = 0.0
            for batch in step:
                logits = ddp(batch.input_ids, batch.position_ids, partial(varlen_attention, pack=batch))
                loss = loss_of(logits, batch, step, ranks)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item() / ranks
                if dies_at == (rank, step.index):
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            lines.append((step.index, step.digest, summed_over(total)))
            if (step.index + 1) % EVERY == 0:
                save(state, checkpoint_id=folder / f"{step.index:03}")
                if rank == 0:
                    loader.commit(step.index)
            if step.index + 1 == steps:
                break
    return lines, {name: each.detach() for name, each in net.named_parameters()}
