"""Measure the training speed of a Llama with 1B parameters on one GPU, with samples padded and packed.

- *padded*: samples in their order, as many rows as fit the budget, each as long as the longest of them;
- *greedy*: packs in their order (``packer: concatenative``), what does not fit opens the next one;
- *streampack*: ``exact_fill``, the default. Both are served by ``streampack.local``: broker and producer in threads of
  the very process that trains, which is the worst place for them.
- *block masks*: the same packs with FlexAttention, compiled, under the masks that batches bring; a dense mask on a CPU.

An update is one micro-batch. *tokens/s* counts real tokens; *MFU* what these need alone: 6 FLOPs a parameter and token,
and causal attention inside each sample, over what the GPU's data sheet says of dense bf16; *next()* the time in it over
all the time. Weights, gradients and AdamW are in bf16 and nothing is compiled: it is the ways that are compared. MFU is
given on a GPU alone; the CPU, with ``--quick``, shows that the script works. Each round has samples of its own. Padded
rows come in ever new shapes, for each of which cuDNN plans its kernels first; packs have one shape.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import streampack
from benchmarks.lengths import I64, SHIFTING, STATIONARY, lengths_of
from benchmarks.report import arguments, head, say
from streampack.training.attention import Backend

PEAKS = {
    "GB200": 2500.0, "B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0,
    "A100": 312.0, "L40S": 362.0, "A10G": 70.0, "A10": 125.0, "RTX 4090": 165.0,
}  # fmt: skip
"""TFLOP/s of dense bf16 by what the name of a device holds, the first that does; of the makers' data sheets."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    mlp: int = 8192
    vocabulary: int = 32_768


TINY = Size(layers=2, hidden=64, heads=4, kv_heads=2, mlp=128, vocabulary=512)


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.dim = size.hidden // size.heads
        self.heads, self.kv_heads = size.heads, size.kv_heads
        self.before, self.between = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.qkv = nn.Linear(size.hidden, (size.heads + 2 * size.kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.gate_up, self.down = (
            nn.Linear(size.hidden, 2 * size.mlp, bias=False),
            nn.Linear(size.mlp, size.hidden, bias=False),
        )

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        qkv = self.qkv(self.before(x)).unflatten(-1, (-1, self.dim))
        q, k, v = torch.split_with_sizes(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=-2)
        x = x + self.out(attend(turned(q, turns), turned(k, turns), v).flatten(-2))
        gate, up = self.gate_up(self.between(x)).chunk(2, dim=-1)
        found: Tensor = x + self.down(functional.silu(gate) * up)
        return found


class Llama(nn.Module):
    """Rotary positions, RMSNorm, SwiGLU, grouped queries; the head is the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocabulary, size.hidden)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers, self.norm = nn.ModuleList(Layer(size) for _ in range(size.layers)), nn.RMSNorm(size.hidden)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [..., T, vocabulary] of ids and positions [..., T]."""
        x, dim = self.embed(ids), self.size.hidden // self.size.heads
        angles = positions[..., None, None] * 500_000.0 ** -(torch.arange(0, dim, 2, device=ids.device) / dim)
        turns = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, turns, attend)
        return functional.linear(self.norm(x), self.embed.weight)

    def flops(self, lengths: I64) -> float:
        """Of an update on samples of these lengths, forward and backward."""
        parameters = sum(each.numel() for each in self.parameters())
        squares = float((lengths.astype(np.float64) ** 2).sum())
        return 6.0 * parameters * int(lengths.sum()) + 6.0 * self.size.layers * self.size.hidden * squares


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    (a, b), (cos, sin) = x.chunk(2, dim=-1), turns
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass(frozen=True)
class Batch:
    """A micro-batch: ids, positions and shifted labels [..., T] on the device; ``lengths`` of its samples."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    attend: Attend
    lengths: I64

    def loss(self, model: Llama) -> Tensor:
        logits = model(self.ids, self.positions, self.attend).flatten(0, -2)
        summed = functional.cross_entropy(logits.float(), self.labels.flatten(), reduction="sum")
        return summed / max(int((self.lengths - 1).sum()), 1)


# The ways


def packed(
    samples: list[I64], budget: int, device: str, packer: str, masks: Literal["flex"] | None = None,
    backend: Backend | None = None,
) -> Iterator[Batch]:  # fmt: skip
    with streampack.local(
        samples, packer=packer, budget=budget, shuffle=False, device=device, format="thd", masks=masks
    ) as loader:
        for pack in loader:
            attend = partial(under_mask, pack) if masks else partial(within, pack, backend)
            assert pack.canonical is not None, "a loader's view has its pack"
            lengths = np.diff(pack.canonical.cu_seqlens)[: pack.num_samples].astype(np.int64)
            yield Batch(pack.input_ids, pack.position_ids, pack.labels, attend, lengths)


def within(pack: Any, backend: Backend | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return streampack.varlen_attention(q, k, v, pack, backend=backend)


def under_mask(pack: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    if q.is_cuda:
        out: Tensor = compiled_flex()(q, k, v, block_mask=pack.block_mask, enable_gqa=True)
    else:  # FlexAttention has no backward pass there
        mask = streampack.block_causal_mask(pack)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


@cache
def compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def padded(samples: list[I64], budget: int, device: str) -> Iterator[Batch]:
    """As a collate function does it, from pinned memory where there is a GPU."""
    rows: list[I64] = []
    for sample in samples:
        longest = max(len(each) for each in (*rows, sample))
        if (len(rows) + 1) * longest > budget:
            yield _collated(rows, device)
            rows = []
        rows.append(sample)


def _collated(rows: list[I64], device: str) -> Batch:
    lengths = np.array([len(row) for row in rows])
    ids, labels = np.zeros((2, len(rows), lengths.max()), np.int64)
    labels[:] = -100
    for i, row in enumerate(rows):
        ids[i, : len(row)], labels[i, : len(row) - 1] = row, row[1:]
    both = torch.from_numpy(np.stack([ids, labels]))
    on_device = (both.pin_memory() if device == "cuda" else both).to(device, non_blocking=True)
    return Batch(on_device[0], torch.arange(ids.shape[1], device=device), on_device[1], causal, lengths)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of rows, whose padding stands behind them."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


WAYS: dict[str, Callable[..., Iterator[Batch]]] = {
    "padded": padded,
    "greedy": partial(packed, packer="concatenative"),
    "streampack": partial(packed, packer="exact_fill"),
    "block masks": partial(packed, packer="exact_fill", masks="flex"),
}


# A run


def measured(model: Llama, batches: Iterator[Batch], updates: int, warm: int, device: str) -> dict[str, float]:
    """Of ``updates`` behind ``warm`` ones."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    begun = waited = flops = tokens = computed = 0.0
    for update in range(warm + updates):
        if update == warm:
            _wait_for(device)
            begun, waited, flops, tokens, computed = time.perf_counter(), 0.0, 0.0, 0.0, 0.0
        before = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - before
        batch.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        flops += model.flops(batch.lengths)
        tokens += float(batch.lengths.sum())
        computed += batch.ids.numel()
    _wait_for(device)
    seconds = time.perf_counter() - begun
    return {
        "tokens_per_s": tokens / seconds, "flops_per_s": flops / seconds, "next_share": waited / seconds,
        "step_ms": 1e3 * seconds / updates, "utilization": tokens / computed,
    }  # fmt: skip


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def samples_of(kind: str, budget: int, updates: int, vocabulary: int, part: int = 0) -> list[I64]:
    """Samples of random tokens, more than ``updates`` and a window need; others for each ``part``."""
    lengths = lengths_of(kind, budget)
    count = 2048 + int(np.searchsorted(np.cumsum(lengths), 2 * updates * budget))
    lengths = np.roll(lengths, -part * count)[:count]
    ids = np.random.default_rng(part).integers(vocabulary, size=int(lengths.sum()))
    return np.split(ids, np.cumsum(lengths)[:-1])


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, "a tiny model, a few updates, once")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch (8192; 512 with --quick)")
    parser.add_argument("--updates", type=int, help="of each way and round (40; 6 with --quick)")
    parser.add_argument("--rounds", type=int, help="of all ways in turns (3; 1 with --quick)")
    kinds = (*STATIONARY, *SHIFTING)
    parser.add_argument("--lengths", choices=kinds, help="(source_code, which are real; short_sft with --quick)")
    parser.add_argument("--backend", choices=get_args(Backend), help="attention of packs (the first that is installed)")
    parser.add_argument("--peak-tflops", type=float, help="of the device in dense bf16, where it is not known here")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("got no GPU that torch can use, expected one: or --device cpu --quick, which gives no MFU")
    budget, updates = args.budget or (512 if args.quick else 8192), args.updates or (6 if args.quick else 40)
    kind = args.lengths or ("short_sft" if args.quick else "source_code")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    peak = args.peak_tflops or next((value for each, value in PEAKS.items() if each in name), None)
    torch.manual_seed(0)
    model = Llama(TINY if args.quick else Size()).to(args.device, torch.bfloat16 if args.device == "cuda" else None)
    parameters = sum(each.numel() for each in model.parameters())
    report = head(
        "train_gpu", device=name, torch=torch.__version__, parameters=parameters, budget=budget, updates=updates,
        lengths=kind, peak_tflops=peak, backend=args.backend,
    )  # fmt: skip
    print(f"{name}, {parameters / 1e6:,.1f}M parameters, {budget} tokens a micro-batch, lengths: {kind}")
    rounds = [
        _round(model, samples_of(kind, budget, updates, model.size.vocabulary, part), budget, updates, args)
        for part in range(args.rounds or (1 if args.quick else 3))
    ]
    ways = {way: [each[way] for each in rounds] for way in WAYS}
    print("way         real tokens/s  of padded    MFU   next()  utilization  ms a step")
    rows = {way: _row(found, peak) for way, found in ways.items()}
    for way, row in rows.items():
        gain, mfu = row["tokens_per_s"] / rows["padded"]["tokens_per_s"], row["mfu"]
        shown = "on a GPU" if args.device == "cpu" else "unknown" if mfu is None else f"{mfu:.1%}"
        print(
            f"{way:<11} {row['tokens_per_s']:>13,.0f} {gain:>9.2f}x {shown:>8} {row['next_share']:>7.3%} "
            f"{row['utilization']:>11.2%} {row['step_ms']:>10.1f}"
        )
    say(report | {"ways": rows, "rounds": rounds}, args.json)


def _round(model: Llama, samples: list[I64], budget: int, updates: int, args: Any) -> dict[str, dict[str, float]]:
    warm = 1 if args.quick else 10
    found = {}
    for way, batches_of in WAYS.items():
        kernel = {} if way == "padded" else {"backend": args.backend}
        batches = batches_of(samples, budget, args.device, **kernel)
        found[way] = measured(model, batches, updates, warm, args.device)
        batches.close()  # type: ignore[attr-defined]  # its broker, too
    return found


def _row(rounds: list[dict[str, float]], peak: float | None) -> dict[str, Any]:
    """Medians over the rounds."""
    row: dict[str, Any] = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return row | {"mfu": None if peak is None else row["flops_per_s"] / (1e12 * peak)}


if __name__ == "__main__":
    main()
