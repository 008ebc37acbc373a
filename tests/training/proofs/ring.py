"""Ring attention over context-parallel ranks, forward and backward: what a trainer does with the shards it is given.

Keys and values go round the ring; each rank adds what its queries see of them by an online softmax (Liu et al., 2023,
"Ring Attention with Blockwise Transformers"). Backward their gradients go round with them, and come home. What queries
see is a mask for each rank that keys came from. ``zigzag`` makes it as the kernels do, of the halves of each sample's
local slot alone: it is right only where the broker has cut as they expect. ``by_positions`` is for every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.training.proofs.tiny import DIM, HEADS, KV_HEADS, Attention

Masks = Sequence[Tensor]
"""By rank of the ring that keys came from: bool [T', T'], which of them each query sees."""


def ring_attention(group: Any, masks: Masks) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=-2) for each in (k, v))
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        found: Tensor = Ring.apply(q, k, v, group, masks)  # type: ignore[no-untyped-call]
        return found.transpose(0, 1)

    return attend


def zigzag(cu_seqlens_padded: Tensor, rank: int, ranks: int) -> Masks:
    """A rank has chunks ``rank`` and 2 * ranks - 1 - ``rank`` of each sample, the front and the back half of its local
    slot: of earlier ranks it sees the fronts, of later ones all with its backs, of its own what came before.
    """
    local = cu_seqlens_padded.long() // ranks
    places = torch.arange(int(local[-1]))
    slot = torch.searchsorted(local, places, right=True)
    front = places < (local[slot - 1] + local[slot]) // 2
    same = slot[:, None] == slot
    own = same & (places[:, None] >= places)
    return [own if of == rank else same & front if of < rank else same & ~front[:, None] for of in range(ranks)]


def by_positions(positions: Tensor, cu_seqlens_padded: Tensor, group: Any) -> Masks:
    """From where in the whole pack the tokens of all ranks lie, ``positions`` being this one's [T']."""
    every = [torch.empty_like(positions) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, positions, group=group)
    slot = torch.searchsorted(cu_seqlens_padded.long(), positions, right=True)[:, None]
    begin = cu_seqlens_padded[slot - 1]
    return [(begin <= keys) & (keys <= positions[:, None]) for keys in every]


class Ring(torch.autograd.Function):
    """Queries, keys and values [HEADS, T', DIM] of this rank, to [HEADS, T', DIM]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, masks: Masks) -> Tensor:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        out, total = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
        block = torch.stack([k, v])
        for turn in range(ranks):
            block = passed_on(block, group) if turn else block
            scores = scored(q, block[0], masks[(rank - turn) % ranks])
            both = torch.logaddexp(total, scores.logsumexp(-1))  # its own come first: every query sees one of them
            out = out * (total - both).exp()[..., None] + (scores - both[..., None]).exp() @ block[1]
            total = both
        ctx.save_for_backward(q, k, v, out, total)
        ctx.group, ctx.masks = group, masks
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (of_out,) = gradients
        q, k, v, out, total = ctx.saved_tensors
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        of_q, inner = torch.zeros_like(q), (of_out * out).sum(-1, keepdim=True)
        block = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
        for turn in range(ranks):
            keys, values = block[0], block[1]
            share = (scored(q, keys, ctx.masks[(rank - turn) % ranks]) - total[..., None]).exp()
            of_scores = share * (of_out @ values.mT - inner) * DIM**-0.5
            of_q += of_scores @ keys
            block[2] += of_scores.mT @ q
            block[3] += share.mT @ of_out
            block = passed_on(block, ctx.group)
        return of_q, block[2], block[3], None, None


def scored(q: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    scores: Tensor = q @ keys.mT * DIM**-0.5
    return scores.masked_fill(~mask, -torch.inf)


def passed_on(block: Tensor, group: Any) -> Tensor:
    """What the rank before has, while this one's goes to the next."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    came = torch.empty_like(block)
    after, before = (dist.get_global_rank(group, (rank + by) % ranks) for by in (1, -1))
    sent = dist.isend(block.contiguous(), after, group)
    dist.recv(came, before, group)
    assert sent is not None
    sent.wait()
    return came
