"""Shared prefixes: the tokens that a model computes for groups of RL, beside plain rows and a trie in each micro-batch.

    python -m benchmarks.training.shared_prefixes [--only math] [--json]

Three synthetic sets: ``math`` has 16 answers to a prompt, ``agents`` trajectories that branch, ``system`` a long system
prompt. A step is a batch of whole groups for 8 data-parallel ranks, formed and dealt by the broker's core.

Beside it are tries that a trainer builds. It may batch first, by whole lengths, and share within each micro-batch. Or
it adds rows to a trie, in order, until the trie is full.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.deal.assignment import deal_step
from streampack.core.deal.deal_stats import DealtFigures
from streampack.core.deal.dealt_steps import dealer_of
from streampack.core.form.former import Former
from streampack.core.intake.overlong import apply_terms
from streampack.core.model.keys.planning_keys import Balance
from streampack.core.model.lease_terms import terms_of
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Batch, Rules, StreamRules
from streampack.core.model.samples import I64, STEP, SampleTable
from streampack.core.packers.closed import pack_lengths
from streampack.core.trees.chunk_trees import ChunkTree
from streampack.core.trees.shared_prefixes import prefix_order

Rows = list[NDArray[np.int32]]
BUDGET, DP, STEPS = 32_768, 8, 4
SIZES = {"math": 64, "agents": 64, "system": 16}
"""Groups of a step."""
ONLY_PAIRS = Balance(a=0, b=1)
"""Costs that count the pairs of tokens that attend, twice."""


def math_group(draw: np.random.Generator) -> Rows:
    """Sixteen answers of about 1,000 tokens to a prompt of about 512."""
    prompt = ids(draw, int(draw.normal(512, 100)))
    lengths = np.clip(draw.lognormal(np.log(800), 0.7, 16), 16, 8192).astype(int)
    return [np.concatenate([prompt, ids(draw, length)]) for length in lengths]


def agents_group(draw: np.random.Generator) -> Rows:
    """Eight trajectories of up to 20 turns; each goes on from a turn of one before it."""
    turns = [[ids(draw, int(draw.integers(100, 400))) for _ in range(20)]]
    for _ in range(7):
        of = turns[int(draw.integers(0, len(turns)))]
        kept = of[: int(draw.integers(1, len(of) + 1))]
        more = int(draw.integers(1, max(21 - len(kept), 2)))
        turns.append([*kept, *(ids(draw, int(draw.integers(100, 400))) for _ in range(more))])
    return [np.concatenate(each) for each in turns]


def system_group(draw: np.random.Generator) -> Rows:
    """Sixty-four answers to eight questions under one system prompt of 8,192 tokens."""
    system = ids(draw, 8192)
    rows = []
    for _ in range(8):
        question = ids(draw, int(draw.integers(50, 200)))
        rows += [np.concatenate([system, question, ids(draw, int(draw.integers(100, 500)))]) for _ in range(8)]
    return rows


GROUPS: dict[str, Callable[[np.random.Generator], Rows]] = {
    "math": math_group, "agents": agents_group, "system": system_group,
}  # fmt: skip


def ids(draw: np.random.Generator, count: int) -> NDArray[np.int32]:
    """Random token ids."""
    return draw.integers(1, 50_000, max(count, 1)).astype(np.int32)


def rules_of(samples: int, share: bool) -> Rules:
    """Rules for steps of so many samples."""
    return Rules(
        budget=BUDGET, batch=Batch(samples=samples), merge="arrival", share="prefix" if share else None,
        balance=ONLY_PAIRS, streams=(StreamRules("rollouts", 1.0, 1, pushed=True),),
    )  # fmt: skip


def formed(batches: Sequence[Sequence[Rows]], share: bool) -> dict[str, float]:
    """Form and deal a step of each batch, as a broker does; count what ranks compute."""
    tokens = packs = cost = 0
    step_load = load = 0.0
    began, ordering = time.perf_counter(), 0.0
    for groups in batches:
        rules = rules_of(sum(map(len, groups)), share)
        table, terms = SampleTable(), terms_of(rules)[0]
        former = Former(rules, table)
        for rows in groups:
            lengths, tree = np.array([len(row) for row in rows], np.int64), None
            if share:
                at = time.perf_counter()
                order, shared = prefix_order(rows)
                ordering += time.perf_counter() - at
                lengths = lengths[order]
                tree = ChunkTree(shared, lengths)
            pieces = apply_terms(terms, lengths, "step", 0, tree)
            handles = table.take(len(rows))
            table.length[handles], table.keep[handles] = lengths, STEP
            table.index[handles] = former.num_samples + np.arange(len(rows))
            if pieces.tree is not None:
                table.put(handles, pieces.tree.enter(table, handles, pieces.length > 0))
            table.keep[handles[-1]] = 0
            former.admit(handles, table.own_lengths(handles))
        former.closed = True
        request = former.request()
        assert request is not None
        (step,) = former.apply(request.choose())
        figures = DealtFigures()
        dealer_of(rules, table, figures).deal(step, Mesh(dp=DP), True)
        tokens, packs = tokens + int(step.packs.tokens.sum()), packs + len(step.packs)
        cost += int(step.packs.costs.sum())
        load += figures.cost_max_over_mean / len(batches)
        step_load += figures.step_cost_max_over_mean / len(batches)
    return {
        "tokens": tokens, "packs": packs, "fill": tokens / (packs * BUDGET), "pairs": cost, "micro_batch_load": load,
        "step_load": step_load, "order_s": ordering, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def trie_in_each_micro_batch(batches: Sequence[Sequence[Rows]], longest_first: bool) -> dict[str, float]:
    """Pack rows by whole lengths, one after another or longest first, and then share within each micro-batch.

    A trainer that batches first balances by the lengths that it knows.
    """
    found = []
    for groups in batches:
        rows = [row for group in groups for row in group]
        lengths = np.array([len(row) for row in rows], np.int64)
        packer = "first_fit_decreasing" if longest_first else "concatenative"
        packs = [list(pack) for pack in pack_lengths(lengths, BUDGET, packer=packer)]
        made = []
        for pack in packs:
            order, shared = prefix_order([rows[i] for i in pack])
            made.append((lengths[pack][order] - shared, shared))
        found.append((made, np.array([int((lengths[pack] ** 2).sum()) for pack in packs])))
    return computed(found)


def tries_filled_greedily(batches: Sequence[Sequence[Rows]]) -> dict[str, float]:
    """Add rows, one after another, to the trie of a micro-batch until it is full; balance by what tries cost."""
    found = []
    for groups in batches:
        made, own, shared = list[tuple[I64, I64]](), list[int](), list[int]()
        for rows in groups:
            order, of_rows = prefix_order(rows)
            for first, (i, share) in enumerate(zip(order, of_rows.tolist(), strict=True)):
                share = share if own and first else 0
                if sum(own) + len(rows[i]) - share > BUDGET:
                    made.append((np.array(own), np.array(shared)))
                    own, shared, share = [], [], 0
                own.append(len(rows[i]) - share)
                shared.append(share)
        made.append((np.array(own), np.array(shared)))
        found.append((made, np.array([int(ONLY_PAIRS.costs(*each).sum()) for each in made])))
    return computed(found)


def computed(steps: Sequence[tuple[list[tuple[I64, I64]], I64]]) -> dict[str, float]:
    """Return the figures of steps: (own and shared tokens of the rows of each micro-batch, costs to balance by)."""
    tokens = packs = cost = 0
    load = step_load = 0.0
    for made, known in steps:
        costs, expected = np.zeros((2, -(-len(made) // DP) * DP), np.int64)
        costs[: len(made)] = [int(ONLY_PAIRS.costs(own, shared).sum()) for own, shared in made]
        expected[: len(made)] = known
        each = costs[deal_step(rules_of(1, False), expected, DP)]
        by_rank = each.sum(axis=0)
        tokens += sum(int(own.sum()) for own, _ in made)
        packs, cost = packs + len(made), cost + int(costs.sum())
        step_load += by_rank.max() / by_rank.mean() / len(steps)
        load += float(np.mean(each.max(axis=1) / each.mean(axis=1))) / len(steps)
    return {
        "tokens": tokens, "packs": packs, "fill": tokens / (packs * BUDGET), "pairs": cost, "micro_batch_load": load,
        "step_load": step_load,
    }  # fmt: skip


def measured(name: str, seed: int) -> dict[str, Any]:
    """Compare the ways on one set."""
    draw = np.random.default_rng(seed)
    batches = [[GROUPS[name](draw) for _ in range(SIZES[name])] for _ in range(STEPS)]
    lengths = [len(row) for groups in batches for rows in groups for row in rows]
    shared = sum(int(prefix_order(rows)[1].sum()) for groups in batches for rows in groups)
    plain = formed(batches, share=False)
    ways = {
        "plain rows": plain,
        "trie in each micro-batch": trie_in_each_micro_batch(batches, longest_first=False),
        "the same, longest first": trie_in_each_micro_batch(batches, longest_first=True),
        "tries filled greedily": tries_filled_greedily(batches),
        "streampack": formed(batches, share=True),
    }
    for way in ways.values():
        way["tokens_saved"] = 1 - way["tokens"] / plain["tokens"]
        way["packs_to_plain"] = way["packs"] / plain["packs"]
        way["pairs_to_plain"] = way["pairs"] / plain["pairs"]
    return {
        "set": name,
        "samples": len(lengths),
        "tokens": sum(lengths),
        "unique_tokens": sum(lengths) - shared,
        "ways": ways,
    }


def show(found: dict[str, Any]) -> None:
    """Print one set as a table."""
    print(
        f"{found['set']}: {found['samples']:,} samples, {found['tokens']:,} tokens, {found['unique_tokens']:,} unique"
    )
    heads = ("", "tokens", "saved", "packs", "fill", "pairs", "load, micro-batch", "load, step")
    rows = [
        (name, f"{way['tokens']:,}", f"{way['tokens_saved']:.1%}", f"{way['packs']}", f"{way['fill']:.1%}",
         f"{way['pairs_to_plain']:.3f}", f"{way['micro_batch_load']:.3f}", f"{way['step_load']:.4f}")
        for name, way in found["ways"].items()
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    for first, *row in (heads, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))
    ours = found["ways"]["streampack"]
    print(f"order of the samples: {1e6 * ours['order_s'] / found['tokens']:.3f} s for a million tokens\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(GROUPS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    found = [measured(name, asked.seed) for name in GROUPS if asked.only in (None, name)]
    if asked.json:
        print(json.dumps(found))
        return
    for each in found:
        show(each)


if __name__ == "__main__":
    main()
