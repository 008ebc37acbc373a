"""``streampack why --sample``: find the places of a sample, or say why it has none; return trees for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streampack.core.model.samples import ROW
from streampack.errors import UserError
from streampack.sources import OpenedSource
from streampack_services.audit.origins import NO_SOURCES, origin_of, samples_of
from streampack_services.audit.why import Reported, Tree, groups_of, partly, raise_if_damaged, sample_tree
from streampack_services.ledger.ledger import Completion, Gap, Ledger, Placement
from streampack_services.ledger.run_history import LATEST, NEVER, FeedHistory


def why_sample(ledger: Ledger, name: str, sources: Mapping[str, OpenedSource] = NO_SOURCES) -> Tree:
    """Return the places of a sample, and the file and row that ``sources`` read it from.

    ``name`` is STREAM:INDEX, or STREAM:PARTITION:SEQ with the number that a program sent the sample with. ``is`` says
    the sample's state: step, rejected, dropped, unrecorded, waiting or none; ``why`` explains it. Raises UserError for
    a wrong name or an unknown stream, LedgerDamaged for damaged rows.
    """
    stream, *numbers = _numbers_in(ledger, name) or ("",)
    feed = ledger.history.feed_of(stream)
    if not numbers:
        raise UserError(
            f"got sample {name!r}, expected STREAM:INDEX, such as web:1234, STREAM:PARTITION:SEQ, or FILE:ROW"
        )
    if feed is None:
        streams = [name for history in ledger.history.feeds.values() for name in history.streams]
        raise UserError(
            f"got stream {stream!r}, expected one of: {', '.join(streams)}. To look up a row of a file, pass the "
            f"producer.yaml of its stream with -p."
        )
    partitions = feed.streams[stream].partitions
    if len(numbers) == 1:
        seq, partition = divmod(numbers[0], partitions)
        completion = ledger.completion(stream, partition, seq)
    else:
        partition, seq = numbers
        if partition >= partitions:
            raise UserError(f"got partition {partition} of stream {stream!r}, expected a partition below {partitions}")
        waits = waited_for(feed, stream)
        completion = ledger.completion_of(stream, partition, seq) if waits else None
        if waits and completion is None:
            return _why_staged(ledger, feed, stream, partition, seq)
        seq = seq if completion is None else completion.seq
    return _why_admitted(ledger, feed, stream, partition, completion, seq, sources)


def _numbers_in(ledger: Ledger, name: str) -> tuple[Any, ...] | None:
    """Return (stream, index) or (stream, partition, number sent with) from a sample's name; None for another name."""
    stream, *numbers = name.rsplit(":", 2)
    if len(numbers) == 2 and all(map(_is_number, numbers)) and ledger.history.feed_of(stream) is not None:
        return stream, *map(int, numbers)
    stream, _, number = name.rpartition(":")
    return (stream, int(number)) if stream and _is_number(number) else None


def _is_number(text: str) -> bool:
    """Return whether a text is a number of at least 0, without a sign."""
    return text.isascii() and text.isdigit()


def waited_for(feed: FeedHistory, stream: str) -> str:
    """Return as text what samples of a stream wait for before they are admitted; empty if for nothing."""
    rules = feed.rules_at(LATEST)
    if not feed.streams[stream].pushed:
        return ""
    late = ", ".join(field.name for field in rules.late_fields)
    return " and ".join(filter(None, [f"its late fields ({late})" if late else "", "its turn" if rules.paces else ""]))


def _why_admitted(
    ledger: Ledger, feed: FeedHistory, stream: str, partition: int, completion: Completion | None, seq: int,
    sources: Mapping[str, OpenedSource],
) -> Tree:  # fmt: skip
    """Return the result of ``why_sample`` for sample ``seq`` of a partition, in the order of admission."""
    index = seq * feed.streams[stream].partitions + partition
    reported: dict[tuple[int, int], Reported] = {}
    places = []
    for place in ledger.find(stream, index):
        key = place.step.step, place.step.lineage
        if key not in reported:
            reported[key] = ledger.reported(feed.name, *key)
        places.append(_place(feed, place, reported[key]))
    rejected = ledger.rejection(stream, index)
    sample = {
        "run": ledger.state.run, "stream": stream, "index": index, "feed": feed.name,
        "partition": partition, "seq": seq, "places": places,
        "sent": None if completion is None else _sent(feed, stream, completion.sent, completion.lsn),
        "rejected": None if rejected is None else sorted(rejected),
        "origin": origin_of(feed, stream, index, sources),
    }  # fmt: skip
    return sample | dict(zip(("is", "why"), _verdict(ledger, feed, sample), strict=True))


def _why_staged(ledger: Ledger, feed: FeedHistory, stream: str, partition: int, seq: int) -> Tree:
    """Return the result of ``why_sample`` for a sample that is not admitted yet; it was sent with number ``seq``."""
    raise_if_damaged(ledger, "completed", "staged", "records")
    received, total = ledger.staged(stream).get(partition, 0), _total_of(ledger, stream, partition)
    where, waits, first = f"partition {partition} of {stream}", waited_for(feed, stream), ledger.state.first_lsn
    state, why = "waiting", f"the sample waits for {waits}"
    if seq >= total:
        state, why = "none", f"{where} ended after {total} samples"
    elif seq >= received:
        last = f"the last sample of {where} that came has number {received - 1}"
        so_far = last if received else f"no sample of {where} came"
        why = f"the sample has not come yet; {so_far}"
    elif feed.end is not None:
        state = "none"
        why = f"feed {feed.name} ended after {feed.end.num_steps} steps, while the sample waited for {waits}"
    elif first:
        state = "unrecorded"
        why = f"the ledger begins with record {first}, and an earlier one may have admitted the sample"
    return {
        "run": ledger.state.run, "stream": stream, "index": None, "feed": feed.name, "partition": partition,
        "seq": None, "sent": _sent(feed, stream, seq, None), "places": [], "rejected": None, "origin": None,
        "is": state, "why": why,
    }  # fmt: skip


def _sent(feed: FeedHistory, stream: str, seq: int, lsn: int | None) -> Tree:
    """Return how a sample was sent that waits or waited: its number, and the record that admitted it."""
    return {"seq": seq, "waited_for": waited_for(feed, stream), "record": lsn}


def _total_of(ledger: Ledger, stream: str, partition: int) -> int:
    """Return the number of samples of an ended partition; ``NEVER`` if it has not ended."""
    return ledger.history.totals.get((stream, partition), [NEVER])[-1]


def why_row(ledger: Ledger, name: str, sources: Mapping[str, OpenedSource]) -> Tree:
    """Return the result of ``why_sample`` for a sample; for ``FILE:ROW``, a list of results as ``samples``.

    A row has one sample per pass, and each has a result. Raises UserError for a row that no source has.
    """
    named = _numbers_in(ledger, name)
    if not sources or (named is not None and ledger.history.feed_of(named[0]) is not None):
        return why_sample(ledger, name, sources)
    return {"row": name, "samples": [why_sample(ledger, row, sources) for row in samples_of(ledger, name, sources)]}


def _place(feed: FeedHistory, place: Placement, reported: Reported) -> Tree:
    """Return one place of a sample as a tree; ``counts`` is False if a later lineage has replaced the step."""
    step, row = place.step, place.row
    offset = int(step.offsets(feed.rules_at(step.step, step.lsn).align.sample)[row])
    sample = sample_tree(feed, step, reported, row, offset)
    return {
        "step": step.step,
        "lineage": step.lineage,
        "counts": feed.effective(step.step) == step.lineage,
        "skipped": feed.is_skipped(step.step),
        "pack": place.pack,
        "dealt_by": groups_of(feed.dealt_at(step.lsn)[0]),
        **{key: value for key, value in sample.items() if key not in ("stream", "index")},
        "partly_reported": partly(reported),
        "digest": step.digest.hex(),
    }


def _verdict(ledger: Ledger, feed: FeedHistory, sample: Tree) -> tuple[str, str]:
    """Return a sample's state, and an explanation of the state."""
    stream, index, seq, partition = (sample[key] for key in ("stream", "index", "seq", "partition"))
    if any(place["counts"] for place in sample["places"]):
        return "step", ""
    if sample["rejected"] is not None:
        return "rejected", " or ".join(sample["rejected"]) or "no reason was given"
    raise_if_damaged(ledger, "spans", "rejected", "records")
    total = _total_of(ledger, stream, partition)
    if index in feed.dropped().get(stream, np.zeros(0, ROW))["index"]:
        return "dropped", "the sample was left over at the end of a pass, and `tail: drop` drops such samples"
    if (gap := _gap_with(ledger, feed, sample)) is not None:
        return "unrecorded", f"the sample was rejected or is in {gap}"
    if seq >= total:
        partitions = feed.streams[stream].partitions
        more = f"; its sample n has index {partitions} * n + {partition}" if partitions > 1 else ""
        return "none", f"partition {partition} of {stream} ended after {total} samples{more}"
    if feed.end is not None:
        return "none", f"feed {feed.name} ended after {feed.end.num_steps} steps without this sample"
    furthest = ledger.furthest(stream)
    if index <= furthest or seq < ledger.admitted(stream).get(partition, 0):
        why = f"the sample is in no step yet; it is in the window or waits for earlier samples of {stream}"
    elif waits := waited_for(feed, stream):
        why = (
            f"no sample has this index yet; a sample gets its index after it has waited for {waits}. "
            f"{stream}:PARTITION:SEQ finds a sample by the number that it was sent with"
        )
    elif furthest >= 0:
        why = f"the sample is not read yet; the last sample in a step is {stream}:{furthest}"
    else:
        why = f"the sample is not read yet; no sample of {stream} is in a step yet"
    return "waiting", why


def _gap_with(ledger: Ledger, feed: FeedHistory, sample: Tree) -> Gap | None:
    """Return the range of unrecorded steps in which ``sample`` was merged; None if there is no such range."""
    stream, index = sample["stream"], sample["index"]
    for gap in ledger.gaps(feed.name):
        upto = feed.merged(gap.snapshot).get(stream, [])
        rows = feed.waiting(gap.lsn, gap.snapshot).get(stream, np.zeros(0, ROW))
        waits = bool(((rows["index"] == index) & (rows["part"] == 0)).any())
        if sample["partition"] < len(upto) and sample["seq"] < upto[sample["partition"]] and not waits:
            return gap
    return None
