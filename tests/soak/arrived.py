"""The golden run of a job whose order only the log knows: ``merge: arrival``, with samples that were pushed.

Which samples are in which pack is taken from what the ranks wrote down first; all else is worked out again from the
samples themselves: digests, chains, and every array of every rank. That each is in exactly one step is ``accounts``'s.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from msgspec import UNSET
from numpy.typing import NDArray

from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.intake.overlong import apply_overlong
from streampack.core.model.rules import Rules
from streampack.core.model.samples import ROW
from streampack.core.model.steps import chain_digest, pack_digests, step_digest
from streampack.core.trees.shared_prefixes import cut_trees
from streampack.sources import SourceSettings, open_source
from tests.soak import sample_media
from tests.soak.golden import Golden, GoldenPack, GoldenStep, Id
from tests.soak.job import Job
from tests.soak.members import lines_of
from tests.soak.pusher import GROUP, STREAM, prompt_of, tokens_of
from tests.soak.sample_media import SampleMedia
from tests.soak.values import reward_of

Columns = Callable[[list[Id]], dict[str, NDArray[Any]]]
"""Returns the fields of a pack with these samples."""


class Sample(NamedTuple):
    """A sample or a part of one: its tokens, the checksum of the whole sample, and its media in a run with media."""

    tokens: NDArray[Any]
    crc: int
    media: SampleMedia | None = None


def pack_as_it_came(job: Job) -> Golden:
    """Steps with the samples that the ranks had in them first."""
    rules = checked(convert(job.settings, BrokerConfig)).plan()
    came: dict[int, dict[int, list[Id]]] = {}
    numbers: dict[Id, int] = {}
    for rank in range(len(job.meshes)):
        for line in lines_of(job, rank):
            if line["kind"] == "step":
                for pack in line["packs"]:
                    ids = [(row[0], row[1], row[2]) for row in pack["ids"]]
                    came.setdefault(line["index"], {}).setdefault(pack["pack"], ids)
                    numbers |= dict(zip(ids, pack.get("numbers", ()), strict=False))
    samples = _samples(job, rules, numbers)
    columns: Columns | None = None
    if job.late:
        stream = next(number for number, each in enumerate(rules.streams) if each.name == STREAM)
        values = {each: _values(job, stream, each, numbers) for each in samples}
        columns = partial(_columns, values=values)
    elif job.media:
        columns = partial(_media_columns, seed=job.seed, samples=samples)
    steps: list[GoldenStep] = []
    chain = bytes(16)
    for number in range(len(came)):
        packs = [came.get(number, {}).get(pack, []) for pack in range(rules.packs)]
        step = _step(number, packs, samples, chain, rules, _shared_of(job, rules), columns)
        chain = bytes.fromhex(step.chain)
        steps.append(step)
    return Golden(rules, tuple(steps), frozenset(samples))


def broken_promises(job: Job) -> list[str]:
    """Where a program that pushed was sent back before what it had been told is safe, or did not come to the end."""
    found = []
    for partition in range(job.pushers):
        path = job.folder / f"pusher-{partition}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found += [
            f"partition {partition}: begun at {line['begun']}, where {line['known']} were safe"
            for line in lines
            if "begun" in line and line["begun"] < line["known"]
        ]
        if max((line.get("safe", 0) for line in lines), default=0) != job.pushed:
            found.append(f"partition {partition}: not all of {job.pushed} samples are safe")
    return found


def _shared_of(job: Job, rules: Rules) -> Callable[[list[Id]], list[int]] | None:
    """A function of a pack's samples: the tokens that each shares with the one before it; None without trees.

    A tree is cut into runs that fill packs well. Two of its runs may follow each other in a pack, and share nothing.
    """
    if not job.trees:
        return None
    stream = next(number for number, each in enumerate(rules.streams) if each.name == STREAM)
    cuts = [_cut_trees(job, partition, rules.budget) for partition in range(job.pushers)]

    def shared(ids: list[Id]) -> list[int]:
        found = [0] * len(ids)
        for i, (before, id_) in enumerate(pairwise(ids), 1):
            seq, partition = divmod(id_[1], job.pushers)
            follows = before == (stream, id_[1] - job.pushers, 0) and id_[0] == stream
            if follows:
                found[i] = cuts[partition][seq]
        return found

    return shared


def _cut_trees(job: Job, partition: int, budget: int) -> list[int]:
    """The tokens that each sample of a partition shares with the one before it, once its group's tree was cut."""
    found: list[int] = []
    for first in range(0, job.pushed, GROUP):
        group = range(first, min(first + GROUP, job.pushed))
        lengths = np.array([len(tokens_of(job.seed, partition, seq, trees=True)) for seq in group])
        prompt = len(prompt_of(job.seed, partition, first))
        one = np.arange(len(group))
        shared = np.where(one > 0, prompt, 0)
        found += cut_trees(one, lengths, np.zeros_like(one), shared, budget, None).shared.tolist()
    return found


def _step(
    number: int, packs: list[list[Id]], samples: dict[Id, Sample], chain: bytes, rules: Rules,
    shared_of: Callable[[list[Id]], list[int]] | None, columns: Columns | None,
) -> GoldenStep:  # fmt: skip
    ids = [each for pack in packs for each in pack]
    rows = np.zeros(len(ids), ROW)
    for row, each in zip(rows, ids, strict=True):
        sample = samples.get(each, Sample(np.zeros(1, np.int32), 0))  # a foreign one: accounts says so
        row["stream"], row["index"], row["part"] = each
        row["length"], row["loss_tokens"], row["crc"] = len(sample.tokens), len(sample.tokens) - 1, sample.crc
    bounds = np.cumsum([0, *map(len, packs)])
    loss = int(rows["loss_tokens"].sum())
    shared = None if shared_of is None else [shared_of(pack) for pack in packs]
    column = np.array([each for pack in shared or () for each in pack], "<u4")
    digests = pack_digests(rows, bounds, column.tobytes() if column.any() else UNSET)
    digest = step_digest(number, loss, len(ids), digests)
    contents = [
        GoldenPack(
            pack, [samples[each].tokens for each in pack if each in samples],
            None if columns is None else columns(pack), None if shared is None else shared[i],
        )
        for i, pack in enumerate(packs)
    ]  # fmt: skip
    return GoldenStep(digest.hex(), chain_digest(chain, digest).hex(), loss, len(ids), tuple(contents), rules)


def _pushed(job: Job, partition: int) -> list[list[int]]:
    """The samples that one program pushes."""
    return [tokens_of(job.seed, partition, seq, job.trees) for seq in range(job.pushed)]


def _values(job: Job, stream: int, one: Id, numbers: dict[Id, int]) -> tuple[int, float]:
    """The number and the reward of a sample; those that are read have defaults."""
    number = numbers.get(one, -1)
    return (number, reward_of(job.seed, one[1] % job.pushers, number)) if one[0] == stream else (-1, -1.0)


def _columns(pack: list[Id], values: dict[Id, tuple[int, float]]) -> dict[str, NDArray[Any]]:
    """The fields of a pack."""
    rows = [values.get(each, (-1, -1.0)) for each in pack]
    return {
        "number": np.array([number for number, _ in rows], np.int64),
        "reward": np.array([reward for _, reward in rows], np.float64),
    }


def _media_columns(pack: list[Id], seed: int, samples: dict[Id, Sample]) -> dict[str, NDArray[Any]]:
    """The media of a pack."""
    found = (samples[each].media for each in pack if each in samples)
    return sample_media.of_pack(seed, [media for media in found if media is not None])


def _crc(job: Job, rules: Rules, whole: NDArray[Any], values: tuple[int, float], pushed: bool) -> int:
    """The checksum of a sample with its fields, if the run has any."""
    crc = int(crc32c(whole.tobytes()))
    if job.media:
        return sample_media.sample_crc(rules, job.seed, job.folder, whole)
    if not job.late:
        return crc
    number, reward = np.array([values[0]], "<i8").tobytes(), np.array([values[1]], "<f8").tobytes()
    crc = int(crc32c(number, crc))
    return zlib.crc32(np.array([crc32c(reward)], "<u4").tobytes(), crc) if pushed else int(crc32c(reward, crc))


def _samples(job: Job, rules: Rules, numbers: dict[Id, int]) -> dict[Id, Sample]:
    """All that must be in a step, by id. Samples with late values have the ``numbers`` with which they were sent."""
    found: dict[Id, Sample] = {}
    for number, stream in enumerate(rules.streams):
        for partition in range(stream.partitions):
            if stream.name == STREAM:
                sequence = [np.array(each, rules.tokens) for each in _pushed(job, partition)]
                ids = [(number, seq * stream.partitions + partition, 0) for seq in range(job.pushed)]
                if job.late:
                    sequence = [sequence[numbers.get(each, 0)] for each in ids]
            else:
                source = open_source(convert(job.streams[stream.name], SourceSettings))
                records = source.read(partition, stream.partitions, seed=rules.seed, passes=stream.passes)
                sequence = [np.asarray(record.tokens).astype(rules.tokens) for record in records]
            pieces = apply_overlong(np.array([len(s) for s in sequence], np.int64), rules.budget, stream.overlong)
            media = [sample_media.media_of(job.seed, each.tolist()) for each in sequence if job.media]
            if job.media:
                pieces = sample_media.drop_unfit(rules, pieces, media, sequence)
            columns = (pieces.source, pieces.offset, pieces.length, pieces.part)
            for seq, offset, length, part in zip(*(c.tolist() for c in columns), strict=True):
                if length:
                    whole = sequence[seq]
                    id_ = (number, seq * stream.partitions + partition, part)
                    pushed = stream.name == STREAM
                    values = _values(job, number if pushed else -1, id_, numbers)
                    crc = _crc(job, rules, whole, values, pushed)
                    found[id_] = Sample(whole[offset : offset + length], crc, media[seq] if job.media else None)
    return found
