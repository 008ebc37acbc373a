"""Images beside tokens: how even the ranks' work is by axis, and how full packs are, with and without limits and costs.

    python -m benchmarks.packing.axes [--dp 8] [--json]

Samples are chats with 1 to 20 images of 200 x 200 to 3,840 x 2,160 pixels, and texts. An image has a patch for 14 x 14
pixels, and a token for four patches. A step is formed and dealt by the broker's core. The language model's work is
that of Qwen2-VL 7B: ``24576 * s + s * s`` for s tokens. Its encoder's work for an image of p patches is ``3600 * p +
0.5 * p * p`` in the same unit. Beside it is what trainers do: samples are split over ranks by tokens
(verl's partition), and each rank packs its own with first-fit decreasing. *joint* has limits and costs, too.

*encoder*, *model* and *both* are the work of the costliest rank over the mean of all ranks, for each micro-batch, in
which ranks wait for each other.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.deal.deal_stats import DealtFigures
from streampack.core.deal.dealt_steps import dealer_of
from streampack.core.form.former import Former
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import Balance, MediaLimits
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import I64, SampleTable
from streampack.core.packers.closed import pack_lengths

BUDGET, LIMIT, STEPS = 16_384, 49_152, 6
MODEL, ENCODER = (24_576, 1), (3_600, 0.5)
SIZES = ((200, 200), (512, 512), (640, 480), (1024, 768), (1280, 960), (1920, 1080), (2560, 1440), (3840, 2160))
SHARES = (0.25, 0.2, 0.2, 0.12, 0.1, 0.08, 0.03, 0.02)


def dataset(count: int, seed: int = 0) -> tuple[I64, list[I64]]:
    """Return the tokens of samples, and the patches of each one's images."""
    draw = np.random.default_rng(seed)
    patches_of = np.array([(w // 28 * 2) * (h // 28 * 2) for w, h in SIZES])
    lengths, patches = np.empty(count, np.int64), list[I64]()
    for at in range(count):
        text = int(np.clip(draw.lognormal(6, 1), 16, 8192))
        images = 0 if draw.random() < 0.4 else int(np.clip(draw.geometric(0.45), 1, 20))
        mine = patches_of[draw.choice(len(SIZES), images, p=SHARES)]
        while len(mine) and (mine.sum() > LIMIT or text + mine.sum() // 4 > BUDGET):
            mine = mine[:-1]
        lengths[at] = text + mine.sum() // 4
        patches.append(mine.astype(np.int64))
    return lengths, patches


def formed(lengths: I64, patches: list[I64], dp: int, way: str) -> tuple[list[list[I64]], float]:
    """Form and deal steps as the broker does; return the samples of each pack by [micro-batch][rank], and seconds."""
    limits = MediaLimits(patches=LIMIT) if way != "tokens alone" else None
    media = (Field(name="image", dtype="uint8", axis="item"),)
    balance = Balance(a=2 * MODEL[0], b=2 * MODEL[1])  # twice, since factors are whole numbers
    if way in ("limits and costs", "joint"):
        balance = Balance(a=2 * MODEL[0], b=2 * MODEL[1], patches=(2 * ENCODER[0], int(2 * ENCODER[1])))
    if way == "joint":
        balance = msgspec.structs.replace(balance, kind="joint", group=dp)
    rules = Rules(
        budget=BUDGET, packs=4 * dp, window=max(1024, 32 * dp), media_fields=media, limits=limits, balance=balance,
        streams=(StreamRules("chats"),),
    )  # fmt: skip
    table = SampleTable(len(lengths))
    handles = table.take(len(lengths))
    table.length[handles], table.index[handles] = lengths, np.arange(len(lengths))
    a, b, _ = balance.media_factors
    costs = [int((a * each + b * each * each).sum()) for each in patches]
    columns = {"items": list(map(len, patches)), "patches": [int(each.sum()) for each in patches], "extra_cost": costs}
    table.put(handles, {name: np.array(column) for name, column in columns.items()})
    former, dealer = Former(rules, table), dealer_of(rules, table, DealtFigures())
    former.admit(handles, lengths)
    began, found = time.perf_counter(), list[list[I64]]()
    while len(found) < 4 * STEPS and (request := former.request()) is not None:
        for step in former.apply(request.choose()):
            dealt = dealer.deal(step, Mesh(dp=dp), True)
            at = np.array(dealt.bounds)
            packs = [table.index[dealt.contents.handles[i:j]] for i, j in pairwise(at)]
            found += [packs[number :: dealt.each] for number in range(dealt.each)]
    return found, time.perf_counter() - began


def split_by_tokens(lengths: I64, dp: int, per_step: int) -> list[list[I64]]:
    """Split each step's samples over ranks by tokens, as verl does, and pack each rank's with first-fit decreasing."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    found = []
    for step in range(STEPS):
        mine = np.arange(step * per_step, (step + 1) * per_step)
        parts = get_seqlen_balanced_partitions(lengths[mine].tolist(), dp, equal_size=False)
        packs = [
            [mine[np.array(part)][np.array(pack)] for pack in
             pack_lengths(lengths[mine[np.array(part)]], BUDGET, "first_fit_decreasing")]
            for part in parts
        ]  # fmt: skip
        none = np.zeros(0, np.int64)
        most = max(map(len, packs))
        found += [[rank[number] if number < len(rank) else none for rank in packs] for number in range(most)]
    return found


def figures(micro_batches: list[list[I64]], lengths: I64, patches: list[I64]) -> dict[str, float]:
    """Return how even and how full packs are, by [micro-batch][rank]."""
    model = np.array([[work(lengths[pack], *MODEL) for pack in ranks] for ranks in micro_batches])
    encoder = np.array(
        [[sum(work(patches[i], *ENCODER) for i in pack.tolist()) for pack in ranks] for ranks in micro_batches]
    )
    held = np.array([[sum(int(patches[i].sum()) for i in pack.tolist()) for pack in ranks] for ranks in micro_batches])
    tokens = sum(int(lengths[pack].sum()) for ranks in micro_batches for pack in ranks)
    each = {"encoder": encoder, "model": model, "both": encoder + model}
    return {
        **{name: float(np.mean(of.max(axis=1) / np.maximum(of.mean(axis=1), 1))) for name, of in each.items()},
        "most_patches": float(held.max()),
        "fill": tokens / (model.size * BUDGET),
        "tokens": float(tokens),
    }  # fmt: skip


def work(sizes: NDArray[Any], a: float, b: float) -> float:
    """Return the work for sequences of these sizes."""
    each = sizes.astype(np.float64)
    return float((a * each + b * each * each).sum())


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, nargs="*", default=[8, 64], help="data-parallel ranks (8 and 64)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    report = []
    for dp in args.dp:
        lengths, patches = dataset(30 * 4 * STEPS * dp)
        per_step = int(np.searchsorted(np.cumsum(lengths), 4 * dp * BUDGET * 0.97))
        ways: dict[str, dict[str, float]] = {
            "split by tokens, then packed": figures(split_by_tokens(lengths, dp, per_step), lengths, patches)
        }
        for way in ("tokens alone", "limits", "limits and costs", "joint"):
            found, seconds = formed(lengths, patches, dp, way)
            ways[f"streampack, {way}"] = figures(found, lengths, patches) | {"seconds": seconds}
        report.append({"dp": dp, "ways": ways})
        if not args.json:
            print(f"dp {dp}: work of the costliest rank / mean")
            print(f"{'':32} encoder  model   both  most patches   fill")
            for way, each in ways.items():
                print(
                    f"{way:32} {each['encoder']:7.2f} {each['model']:6.2f} {each['both']:6.2f} "
                    f"{each['most_patches']:13,.0f} {each['fill']:6.1%}"
                )
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
