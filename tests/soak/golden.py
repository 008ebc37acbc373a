"""The golden run: a job's steps, packed offline from the same files by the pure core, with no service at all.

What a rank must be given is derived here a second time, token by token, and not by ``core.layout``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.form.former import Former
from streampack.core.intake.overlong import apply_overlong
from streampack.core.merge.schedule import AnyMerge, merge_of
from streampack.core.model.rules import Rules, RulesChange
from streampack.core.model.samples import I64, IGNORE_INDEX, SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.sources import Source, SourceSettings, open_source
from streampack.sources.walk import ShardedSource
from tests.soak import sample_media
from tests.soak.checksum import crc_of
from tests.soak.job import Job
from tests.soak.sample_media import SampleMedia
from tests.world.staged import Staged

Id = tuple[int, int, int]
"""(stream, index, part)."""


@dataclass(frozen=True)
class GoldenPack:
    ids: list[Id]
    tokens: list[NDArray[Any]]
    values: dict[str, NDArray[Any]] | None = None
    """Values of each field, one for each sample or for the media of all; None in a run without fields."""
    shared: list[int] | None = None
    """Tokens that each sample shares with the one before it; None in a run without trees."""


@dataclass(frozen=True)
class GoldenStep:
    """Digests in hex."""

    digest: str
    chain: str
    num_loss_tokens: int
    num_samples: int
    packs: tuple[GoldenPack, ...]
    rules: Rules
    """The rules under which the step was formed."""


@dataclass(frozen=True, eq=False)
class Golden:
    """``expected``: every sample that must be in a step, once."""

    rules: Rules
    steps: tuple[GoldenStep, ...]
    expected: frozenset[Id]

    @lru_cache  # noqa: B019 - one a run
    def crcs(self, step: int, pack: int, cp: int, cp_rank: int) -> dict[str, int]:
        """Of every array that the rank must get of this pack, by name."""
        return {name: crc_of(array) for name, array in self._arrays(step, pack, cp, cp_rank).items()}

    def _arrays(self, step: int, pack: int, cp: int, cp_rank: int) -> dict[str, NDArray[Any]]:
        rules = self.steps[step].rules
        this, align, total = self.steps[step].packs[pack], rules.align.sample, rules.budget
        if this.shared is not None:
            return _of_trees(this, this.shared, total)
        ids, labels = np.zeros(total, np.int64), np.full(total, IGNORE_INDEX, np.int64)
        places, padding = np.zeros(total, np.int64), np.ones(total, np.bool_)
        real, padded, held = [0], [0], []
        for tokens in this.tokens:
            begin, slot = padded[-1], -(-len(tokens) // align) * align
            ids[begin : begin + len(tokens)] = tokens
            labels[begin : begin + len(tokens) - 1] = tokens[1:]
            places[begin : begin + slot] = np.arange(slot)
            padding[begin : begin + len(tokens)] = False
            held += _chunks(begin, begin + slot, cp, cp_rank)
            real.append(real[-1] + len(tokens))
            padded.append(begin + slot)
        if padded[-1] < total:
            places[padded[-1] :] = np.arange(total - padded[-1])
            held += _chunks(padded[-1], total, cp, cp_rank)
            real.append(real[-1])
            padded.append(total)
        mine = np.array(held, np.int64)
        return {
            "input_ids": ids[mine], "labels": labels[mine], "position_ids": places[mine],
            "padding_mask": padding[mine], "positions": mine, "cu_seqlens": np.array(real, np.int32),
            "cu_seqlens_padded": np.array(padded, np.int32), "sample_ids": np.array(this.ids, np.int64).reshape(-1, 3),
            **(this.values or {}),
        }  # fmt: skip


def _of_trees(this: GoldenPack, shared: list[int], total: int) -> dict[str, NDArray[Any]]:
    """The arrays of a whole pack whose samples share tokens, each path written out by itself."""
    ids, places, padding = np.zeros(total, np.int64), np.zeros(total, np.int64), np.ones(total, np.bool_)
    real, labels, paths, at = [0], list[int](), list[list[int]](), 0
    for tokens, share in zip(this.tokens, shared, strict=True):
        own = len(tokens) - share
        ids[at : at + own], places[at : at + own] = tokens[share:], np.arange(share, len(tokens))
        padding[at : at + own] = False
        paths.append([*(paths[-1][:share] if share else []), *range(at, at + own)])
        labels += [*tokens[1:].tolist(), IGNORE_INDEX]
        at += own
        real.append(at)
    padded = list(real)
    if at < total:
        places[at:] = np.arange(total - at)
        real.append(at)
        padded.append(total)
    index = [place for path in paths for place in path]
    extra = [0] * (len(index) == total)
    return {
        "input_ids": ids, "labels": np.array(labels + [IGNORE_INDEX] * len(extra), np.int64), "position_ids": places,
        "padding_mask": padding, "positions": np.arange(total), "cu_seqlens": np.array(real, np.int32),
        "cu_seqlens_padded": np.array(padded, np.int32), "sample_ids": np.array(this.ids, np.int64).reshape(-1, 3),
        "shared": np.array(shared, np.int32), "path_index": np.array(index + extra, np.int64),
        "cu_paths": np.cumsum([0, *map(len, paths)]).astype(np.int32),
    }  # fmt: skip


def _chunks(begin: int, end: int, cp: int, cp_rank: int) -> list[int]:
    """Chunks r and 2W - 1 - r of a segment cut in 2W."""
    if cp == 1:
        return list(range(begin, end))
    size = (end - begin) // (2 * cp)
    first, second = begin + cp_rank * size, begin + (2 * cp - 1 - cp_rank) * size
    return [*range(first, first + size), *range(second, second + size)]


def pack_offline(job: Job, changes: list[RulesChange] | None = None) -> Golden:
    """All steps of a job; every sample is seen to be there exactly once.

    ``changes``: those of the rules that the log has, if people asked for some.
    """
    rules = checked(convert(job.settings, BrokerConfig)).plan()
    table, tokens, media = SampleTable(), dict[int, NDArray[Any]](), dict[int, SampleMedia]()

    def push(rules: Rules, merge: AnyMerge) -> None:
        """Enter all samples that are not merged."""
        place = 0
        for number, stream in enumerate(rules.streams):
            source = open_source(convert(job.streams[stream.name], SourceSettings))
            for partition in range(stream.partitions):
                _enter(job, rules, number, partition, place, source, merge, table, tokens, media)
                place += 1

    if rules.stages:
        staged = Staged(rules, table, push, job.settings["limits"]["sample_tokens"], changes)
        former, steps = staged.former, staged.plan()
    else:
        former, steps, merge = Former(rules, table), [], merge_of(rules)
        push(rules, merge)
        while not merge.closed:
            taken = merge.take(1 << 40)
            former.admit(taken.handles, taken.lengths)
            former.closed = True
            while (request := former.request()) is not None:
                steps += former.apply(request.choose())
            steps += former.cut()
            if merge.between_passes:
                merge.next_pass()
    assert former.finished
    assert former.chain == steps[-1].chain

    def identify(handles: I64) -> list[Id]:
        return [(int(table.stream[h]), int(table.index[h]), int(table.part[h])) for h in handles]

    def pack_of(handles: list[int]) -> GoldenPack:
        values = sample_media.of_pack(job.seed, [media[h] for h in handles]) if job.media else None
        return GoldenPack(identify(np.array(handles, np.int64)), [tokens[h] for h in handles], values)

    def golden(step: PlannedStep) -> GoldenStep:
        packs = (pack_of(pack.handles.tolist()) for pack in step.packs)
        return GoldenStep(
            step.digest.hex(), step.chain.hex(), max(step.num_loss_tokens, 1), step.num_samples, tuple(packs),
            step.rules,
        )  # fmt: skip

    found = tuple(map(golden, steps))
    packed = [one for step in found for pack in step.packs for one in pack.ids]
    dropped = identify(former.dropped)
    assert len(packed) + len(dropped) == len({*packed, *dropped})
    assert rules.stages or len(packed) + len(dropped) == len(tokens)  # with stages, some were cut several times
    return Golden(rules, found, frozenset(packed))


def _enter(
    job: Job, rules: Rules, stream: int, partition: int, place: int, source: Source, merge: AnyMerge,
    table: SampleTable, tokens: dict[int, NDArray[Any]], media: dict[int, SampleMedia],
) -> None:  # fmt: skip
    """All samples of one partition, in all its passes, to the merge."""
    settings = rules.streams[stream]
    seq, merged = 0, int(merge.merged_samples[place])
    for pass_ in range(settings.passes or 0):
        assert isinstance(source, ShardedSource)
        start = source.begin._replace(pass_=source.begin.pass_ + pass_)
        records = source.read(partition, settings.partitions, seed=rules.seed, passes=pass_ + 1, start=start)
        samples = [np.asarray(record.tokens).astype(rules.tokens) for record in records]
        gone = min(max(merged - seq, 0), len(samples))
        samples, seq = samples[gone:], seq + gone
        pieces = apply_overlong(np.array([len(s) for s in samples], np.int64), rules.budget, settings.overlong)
        of_samples = [sample_media.media_of(job.seed, each.tolist()) for each in samples if job.media]
        if job.media:
            pieces = sample_media.drop_unfit(rules, pieces, of_samples, samples)
        handles = np.full(len(pieces.length), -1, np.int64)
        columns = (pieces.source, pieces.offset, pieces.length, pieces.part)
        for i, (at, offset, length, part) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            if not length:
                continue
            h = handles[i] = int(table.take(1)[0])
            tokens[h] = samples[at][offset : offset + length]
            table.stream[h], table.index[h], table.part[h] = stream, (seq + at) * settings.partitions + partition, part
            table.length[h], table.loss_tokens[h] = length, length - 1
            table.crc[h] = crc32c(samples[at].tobytes())
            if job.media:
                media[h] = of_samples[at]
                table.crc[h] = sample_media.sample_crc(rules, job.seed, job.folder, samples[at])
                table.items[h], table.patches[h] = len(media[h].images), sum(media[h].patches)
        merge.push(place, handles, pieces.length, pieces.part)
        seq += len(samples)
        if rules.between_passes == "drain":
            merge.end_pass(place)
    merge.end(place)
