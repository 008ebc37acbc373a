"""The demo's verdict: compare the ranks' reports with the source, sample by sample, and compute the packing's figures.

This module starts no process and opens no socket.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from streampack.config.typed_yaml import convert
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import index_of
from streampack.core.stats.fill import figures
from streampack.errors import UserError
from streampack.sources import SourceSettings, TokenizerSettings, open_source, open_tokenizer
from streampack.tokenizers.bytes_tokenizer import UnnamedTokenizer
from streampack.tokenizers.token_ids import Encoded
from streampack.wire.checksums import crc32c
from streampack_services.demo.demo_rank import RankReport

Expected = dict[tuple[int, int, int], tuple[int, int]]
"""Checksum (crc32c) and length in tokens of each sample, by its (stream, index, part)."""


class _NoTokenizer(UnnamedTokenizer):
    """A tokenizer that turns texts into bytes, and rejects chats with an error that names the demo's option."""

    def encode_chat(
        self, messages: object, tools: object = None, variables: Mapping[str, Any] | None = None
    ) -> Encoded | str:
        """Raise UserError: a chat needs a tokenizer that the user names."""
        raise UserError(
            "The files of --source hold chats, which need a tokenizer. "
            "Pass --tokenizer with the folder of your model's tokenizer.json and chat template, or --tokenizer bytes."
        )


def expected_samples(settings: dict[str, Any], budget: int, partitions: int, seed: int) -> Expected:
    """Read the whole source directly; return the checksum and length of every sample, cut to ``budget`` tokens.

    Raises UserError if the source has no valid sample.
    """
    settings = dict(settings)
    named = settings.pop("tokenizer", None)
    tokenizer = open_tokenizer(convert(named, TokenizerSettings, "tokenizer")) if named else _NoTokenizer()
    source = open_source(convert(settings, SourceSettings), tokenizer)
    expected = {}
    for partition in range(partitions):
        for seq, record in enumerate(source.read(partition, partitions, seed=seed, passes=1)):
            if record.reason is None:
                tokens = record.tokens[:budget]
                index = int(index_of(seq, partition, partitions))
                expected[0, index, 0] = crc32c(tokens.astype("<i4").tobytes()), len(tokens)
    if not expected:
        raise UserError(f"{settings['shards']} has no valid sample. Pass files with valid samples to --source.")
    return expected


def judged(reports: list[RankReport], expected: Expected, rules: Rules, mesh: Mesh, seconds: float) -> dict[str, Any]:
    """Return the demo's result: counts of lost, repeated and damaged samples, and figures of the packing.

    ``ok`` is True if every expected sample arrived exactly once, all ranks of ``mesh`` read the same steps, and
    tensor-parallel ranks read the same samples. ``seconds``: time during which the ranks read.
    """
    errors = [report.error for report in reports if report.error]
    verified = sum(report.shards_verified for report in reports)
    same = len({(report.chain, report.steps) for report in reports}) == 1 and len(reports) == math.prod(mesh.sizes)
    by_tp_rank = [sorted(s for r in reports if r.tp_rank == rank for s in r.samples) for rank in range(mesh.tp)]
    same = same and all(samples == by_tp_rank[0] for samples in by_tp_rank)
    all_reports, reports = reports, [report for report in reports if report.tp_rank == 0]
    arrived = Counter((stream, index, part) for report in reports for stream, index, part, _ in report.samples)
    wrong = sum(
        expected.get((stream, index, part), (None, 0))[0] != crc
        for report in reports for stream, index, part, crc in report.samples
    )  # fmt: skip
    lost = sum(key not in arrived for key in expected)
    repeated = sum(count - 1 for count in arrived.values())
    real = np.array([row[2] for report in reports for row in report.packs], np.int64)
    slots = np.array([sum(row) for report in reports for row in report.slots], np.int64)
    full = figures(real, rules.budget)
    capacity = max(full.packs * rules.budget, 1)
    empty = int((real == 0).sum())
    waits = np.array([ms for report in all_reports for ms in report.next_ms] or [0.0])
    chains = {report.chain for report in reports}
    steps = max((report.steps for report in reports), default=0)
    starved = max((report.stats.get("starved_fraction", 1.0) for report in all_reports), default=1.0)
    return {
        "ok": not (errors or lost or repeated or wrong) and same and verified == full.packs * mesh.cp * mesh.tp,
        "error": errors[0] if errors else "",
        "samples_produced": len(expected),
        "samples_delivered": sum(arrived.values()),
        "samples_lost": lost,
        "samples_duplicated": repeated,
        "samples_damaged": wrong,
        "steps": steps,
        "packs": full.packs,
        "tokens": full.tokens,
        "utilization": full.utilization,
        "waste_ratio": full.waste_ratio,
        "waste": {
            "alignment": float(slots.sum() - real.sum()) / capacity,
            "pack_tail": float(capacity - slots.sum() - empty * rules.budget) / capacity,
            "empty_packs": empty * rules.budget / capacity,
        },
        "packing_efficiency": full.packing_efficiency,
        "bin_balance": full.bin_balance,
        "cost_max_over_mean": _cost_max_over_mean(reports, rules),
        "tokens_per_second": full.tokens / seconds if seconds else 0.0,
        "next_p50_ms": float(np.percentile(waits, 50)),
        "next_p99_ms": float(np.percentile(waits, 99)),
        "starved_fraction": starved,
        "shards_verified": verified,
        "chain": min(chains, default=""),
    }


def _cost_max_over_mean(reports: list[RankReport], rules: Rules) -> float:
    """Return the load imbalance: max / mean cost of the packs of a micro-batch, averaged over all micro-batches."""
    by_time: dict[tuple[int, int], list[int]] = {}
    for report in reports:
        for (step, micro_batch, _, _), slots in zip(report.packs, report.slots, strict=True):
            cost = int(rules.balance.costs(np.array(slots, np.int64)).sum())
            by_time.setdefault((step, micro_batch), []).append(cost)
    ratios = [max(costs) * len(costs) / sum(costs) for costs in by_time.values() if all(costs)]
    return float(np.mean(ratios)) if ratios else 1.0
