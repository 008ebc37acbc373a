"""A tiny transformer in float64, samples to train it on, and what each of them gives alone: what the proofs compare.

Knows no streampack: a sample's loss and gradients are those of its own tokens, its own mask and torch's own causal
attention, summed over samples and divided by the tokens that the rows say are learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, HIDDEN, HEADS, KV_HEADS, DIM, LONGEST = 61, 16, 4, 2, 8, 64
TOLERANCE = 1e-9
FIELDS = {"loss_mask": {}, "row": {"dtype": "int32", "axis": "sample"}}
"""What broker.yaml declares for ``rows``: ``row`` says which of them a sample of a pack is."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [..., T, HEADS, DIM], keys and values [..., T, KV_HEADS, DIM], to [..., T, HEADS, DIM]."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (-1, DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=-2)
        x = x + self.out(attention(rotated(q, positions), rotated(k, positions), v).flatten(-2))
        found: Tensor = x + self.down(functional.silu(self.up(self.between(x))))
        return found


class Tiny(nn.Module):
    """Two layers; grouped queries, RMSNorm, rotary positions. Those are relative, and see nothing of positions that
    begin elsewhere than at 0: learned ones beside them do.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LONGEST, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.double()
        for layer in self.layers:
            nn.init.normal_(layer.qkv.weight, std=0.5)  # type: ignore[arg-type, union-attr]  # attention far from even

    def forward(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Logits [..., T, VOCABULARY] of ids and positions [..., T]."""
        return self.of_embedded(self.embedding(ids), positions, attention)

    def of_embedded(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = x + self.places(positions)
        for layer in self.layers:
            x = layer(x, positions, attention)
        found: Tensor = self.head(self.norm(x))
        return found


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[..., None, None] * 100.0 ** -(torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of samples alone, or of rows whose padding is behind them."""
    q, k, v = (each.transpose(-2, -3) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(-2, -3)


def within(boundaries: Tensor) -> Attention:
    """Causal attention over a pack [..., T], as kernels with one array of boundaries have it: [segments + 1]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[-3])
        segment = torch.searchsorted(boundaries.long(), places, right=True)
        allowed = (segment[:, None] == segment) & (places[:, None] >= places)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=-2) for each in (k, v))
        scores = torch.einsum("...qhd,...khd->...hqk", q, k) * DIM**-0.5
        return torch.einsum("...hqk,...khd->...qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)

    return attend


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def rows(count: int, seed: int = 0, longest: int = LONGEST) -> list[dict[str, Any]]:
    """Samples of 1 to ``longest`` tokens, with some of which nothing is learned."""
    draw = np.random.default_rng(seed)
    lengths = [1, longest, 2, *np.minimum(draw.geometric(0.08, count - 3), longest).tolist()]
    kept = [0.7, 1.0, 1.0, 0.0, *draw.choice([0.0, 0.5, 1.0], count - 4, p=[0.1, 0.5, 0.4]).tolist()]
    tokens = [draw.integers(1, VOCABULARY, length).tolist() for length in lengths]
    masks = [(draw.random(n) < share).astype(int).tolist() for n, share in zip(lengths, kept, strict=True)]
    return [{"tokens": t, "loss_mask": m, "row": i} for i, (t, m) in enumerate(zip(tokens, masks, strict=True))]


@dataclass(frozen=True)
class Found:
    """Of one step: its loss and the gradient of every parameter."""

    loss: float
    gradients: dict[str, Tensor]


def found(net: nn.Module, loss: float) -> Found:
    """``loss`` and the gradients that the parameters have, which then have none."""
    gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
        for name, each in net.named_parameters()
    }
    net.zero_grad()
    return Found(loss, gradients)


class Alone:
    """Samples one by one through ``Tiny``: each one's summed loss, gradients and learned tokens, computed once."""

    def __init__(self, samples: Sequence[dict[str, Any]]) -> None:
        net = Tiny()
        self.samples = samples
        self.by_row = []
        for sample in samples:
            loss = summed_loss(self.logits(net, sample), target(sample))
            loss.backward()  # type: ignore[no-untyped-call]
            self.by_row.append(found(net, loss.item()))

    @staticmethod
    def logits(net: Tiny, sample: dict[str, Any]) -> Tensor:
        """[T, VOCABULARY] of one sample."""
        ids = torch.tensor(sample["tokens"])
        return net(ids, torch.arange(len(ids)), causal)  # type: ignore[no-any-return]

    def step(self, of: Iterable[int]) -> Found:
        """Mean loss over the learned tokens of these rows, and its gradients."""
        of = list(of)
        tokens = learned(self.samples[row] for row in of)
        every = [self.by_row[row] for row in of]
        names = every[0].gradients
        gradients = {name: torch.stack([each.gradients[name] for each in every]).sum(0) / tokens for name in names}
        return Found(sum(each.loss for each in every) / tokens, gradients)


def target(sample: dict[str, Any]) -> Tensor:
    """[T] of each token the one that follows, or its label; -100 where there is none or it is masked out."""
    labels = sample.get("labels", sample["tokens"])
    kept = sample.get("loss_mask", [1] * len(labels))
    return torch.tensor([label if keep else -100 for label, keep in zip(labels[1:], kept[1:], strict=True)] + [-100])


def learned(samples: Iterable[dict[str, Any]]) -> int:
    """Tokens that count."""
    return sum(int((target(sample) != -100).sum()) for sample in samples)


def together(samples: Sequence[dict[str, Any]]) -> Found:
    """One batch of all, padded to the longest, in one pass."""
    net = Tiny()
    ids = nn.utils.rnn.pad_sequence([torch.tensor(sample["tokens"]) for sample in samples], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([target(sample) for sample in samples], batch_first=True, padding_value=-100)
    logits = net(ids, torch.arange(ids.shape[1]).expand_as(ids), causal)
    loss = summed_loss(logits, labels) / learned(samples)
    loss.backward()  # type: ignore[no-untyped-call]
    return found(net, loss.item())


def assert_same(got: Found, expected: Found, tolerance: float = TOLERANCE) -> None:
    """To ``tolerance`` of the loss, and of each parameter's largest gradient."""
    assert abs(got.loss - expected.loss) <= tolerance * abs(expected.loss)
    assert got.gradients.keys() == expected.gradients.keys()
    for name, value in expected.gradients.items():
        largest = value.abs().max().item()
        assert largest > 0, name
        assert (got.gradients[name] - value).abs().max().item() <= tolerance * largest, name
