"""One rank of the demo's mesh: it trains nothing, and checks every pack.

Each context-parallel rank sends its shards to rank 0 of its context-parallel group. Rank 0 puts every pack together
again, checks labels, positions and boundaries, and takes the checksum of each sample.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np

from streampack.client.connect import Client, connect
from streampack.core.model.mesh import Mesh
from streampack.core.model.samples import I64, IGNORE_INDEX
from streampack.errors import StreampackError
from streampack.packs.pack import Pack
from streampack.packs.step import Step
from streampack.transport.relay_socket import ENVIRONMENT
from streampack.wire.checksums import crc32c

REPORT_EVERY_S = 0.1
Shard = tuple[I64, I64, I64, I64]
"""One rank's part of a pack: positions in the pack, input_ids, labels, position_ids; each int64 [tokens]."""


@dataclass(slots=True)
class RankReport:
    """Steps, packs, samples and waiting times of one rank, and its error."""

    error: str = ""
    tp_rank: int = 0
    steps: int = 0
    samples: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(stream, index, part, crc32c of the tokens) of each sample; only rank 0 of each context-parallel group has it."""
    packs: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(step, micro-batch, tokens without padding, number in the step) of each pack; only on rank 0 of a group."""
    slots: list[list[int]] = field(default_factory=list)
    """Tokens with padding of each sample, one list per pack; only on rank 0 of a group."""
    shards_verified: int = 0
    next_ms: list[float] = field(default_factory=list)
    """Milliseconds that each next() took after the second step."""
    chain: str = ""
    stats: dict[str, float] = field(default_factory=dict)


def run_rank(
    endpoint: str, key_file: str, relay: str, mesh: Mesh, work_ms: float, peers: list[Connection], pipe: Connection
) -> None:
    """Read and check all steps as one rank, in a process of its own; send a RankReport through ``pipe``.

    ``relay``: the address of the relay to read through, or ``off``.
    ``peers``: on rank 0 of a context-parallel group, the pipes to all other ranks of the group; on the other ranks, the
    pipe to rank 0.
    """
    os.environ[ENVIRONMENT] = relay
    if mesh.dp_rank or mesh.cp_rank or mesh.tp_rank:
        logging.getLogger("streampack.kernels").setLevel(logging.ERROR)  # the first rank says it for all
    report = RankReport(tp_rank=mesh.tp_rank)
    try:
        with connect(endpoint, mesh=mesh, format="numpy", key_file=key_file) as loader:
            _train(loader, mesh, work_ms / 1000, peers, pipe, report)
    except (StreampackError, AssertionError, EOFError, BrokenPipeError) as error:
        report.error = f"rank {mesh}: {error or type(error).__name__}"
    pipe.send(report)
    pipe.close()


def _train(
    loader: Client, mesh: Mesh, work_s: float, peers: list[Connection], pipe: Connection, report: RankReport
) -> None:
    """Read and check all steps of ``loader`` into ``report``; send the number of steps to ``pipe`` now and then."""
    sent_at = 0.0
    steps = loader.steps()
    while True:
        began = time.perf_counter()
        step = next(steps, None)
        waited = time.perf_counter() - began
        if step is None:
            break
        if report.steps >= 2:
            report.next_ms += [waited * 1000] + [0.0] * (len(step) - 1)  # a step's other packs need no wait
        for pack in step:
            busy = time.perf_counter()
            _check(pack, step, mesh, peers, report)
            time.sleep(max(0.0, work_s - (time.perf_counter() - busy)))
        report.steps += 1
        report.chain = step.chain
        if time.monotonic() - sent_at > REPORT_EVERY_S:
            sent_at = time.monotonic()
            pipe.send(report.steps)
    report.stats = loader.stats()


def _check(pack: Pack, step: Step, mesh: Mesh, peers: list[Connection], report: RankReport) -> None:
    """Send the pack's shard to rank 0 of the group, which collects the shards and adds the checked pack to ``report``.

    Raises AssertionError if the ranks read different packs or the pack is wrong.
    """
    shard: Shard = (pack.positions(), pack.input_ids, pack.labels, pack.position_ids)
    if mesh.cp_rank:
        peers[0].send((step.index, pack.micro_batch, step.digest, shard))
        report.shards_verified += 1
        return
    shards = [shard]
    for peer in peers:
        index, micro_batch, digest, expected = peer.recv()
        _expect(
            (index, micro_batch, digest) == (step.index, pack.micro_batch, step.digest),
            "the ranks of a group read different packs",
        )
        shards.append(expected)
    report.samples += _reassemble(pack, shards)
    report.packs.append((step.index, pack.micro_batch, int(pack.cu_seqlens[-1]), pack.pack))
    report.slots.append(np.diff(pack.cu_seqlens_padded)[: pack.num_samples].tolist())
    report.shards_verified += 1


def _reassemble(pack: Pack, shards: list[Shard]) -> list[tuple[int, int, int, int]]:
    """Put a pack together from its shards and check it; return (stream, index, part, crc32c) of each sample.

    Raises AssertionError if tokens, labels or positions do not fit the pack's boundaries.
    """
    total = int(pack.cu_seqlens_padded[-1])
    positions = np.concatenate([shard[0] for shard in shards])
    _expect(
        len(positions) == total and len(np.unique(positions)) == total, "the shards do not cover the pack exactly once"
    )
    ids, labels, inner = (np.empty(total, np.int64) for _ in range(3))
    for at, shard_ids, shard_labels, shard_inner in shards:
        ids[at], labels[at], inner[at] = shard_ids, shard_labels, shard_inner
    rows: list[tuple[int, int, int, int]] = []
    expected = np.full(total, IGNORE_INDEX, np.int64)
    lengths = np.diff(pack.cu_seqlens)
    for i, start in enumerate(pack.cu_seqlens_padded[:-1].tolist()):
        stop = start + int(lengths[i])
        end = int(pack.cu_seqlens_padded[i + 1])
        if stop > start:
            expected[start : stop - 1] = ids[start + 1 : stop]
        _expect(not ids[stop:end].any(), "the padding after a sample is not 0")
        _expect(
            bool((inner[start:end] == np.arange(end - start)).all()), "positions do not restart at 0 with each sample"
        )
        if i < pack.num_samples:
            stream, index, part = pack.sample_ids[i].tolist()
            rows.append((stream, index, part, crc32c(ids[start:stop].astype("<i4").tobytes())))
    _expect(bool((labels == expected).all()), "a label is not the next token of the same sample")
    return rows


def _expect(condition: bool, error: str) -> None:
    """Raise AssertionError with the text ``error`` unless ``condition`` holds."""
    if not condition:
        raise AssertionError(error)
