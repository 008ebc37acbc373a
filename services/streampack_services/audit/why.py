"""``streampack why``: find the samples of a step, and the places of a sample; return trees for JSON.

The ledger must be up to date (``state_dir.open_ledger``). The functions report a sample or step as missing only if no
row of the ledger is damaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import msgspec
import numpy as np

from streampack.core.deal.deal_stats import DealtFigures
from streampack.core.deal.dealt_steps import dealer_of
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, ROW, SampleTable
from streampack.core.model.steps import PlannedPacks, PlannedStep
from streampack.errors import LedgerDamaged, UserError
from streampack.sources import OpenedSource
from streampack_services.audit.origins import NO_SOURCES, origin_of, samples_of
from streampack_services.ledger.ledger import Completion, Gap, Ledger, Placement
from streampack_services.ledger.reported_values import ReportedValues
from streampack_services.ledger.run_history import LATEST, NEVER, FeedHistory
from streampack_services.ledger.step_rows import StepRows

Tree = dict[str, Any]
Reported = list[ReportedValues]


# A step


def why_step(ledger: Ledger, step: int, feed: str | None = None, dp_size: int | None = None, pp_size: int = 1) -> Tree:
    """Return a step's packs, samples, digests and events; with ``dp_size``, also the rank of each pack.

    ``feed``: name of the feed, None for the first one. ``pp_size``: pipeline stages, which change the packs of a batch.
    Raises UserError if the step is not recorded or the mesh is not possible.
    """
    of = feed_of(ledger, feed)
    found = recorded(ledger, of, step)
    rules = of.rules_at(step, found.lsn)
    end = of.end
    reported = ledger.reported(of.name, step, found.lineage)
    return {
        "run": ledger.state.run,
        "feed": of.name,
        "step": step,
        "lineage": found.lineage,
        "digest": found.digest.hex(),
        "chain": found.chain.hex(),
        "num_loss_tokens": found.num_loss_tokens,
        "num_samples": found.num_samples,
        "num_tokens": found.num_tokens,
        "num_items": int(found.media["items"].sum()),
        "num_patches": int(found.media["patches"].sum()),
        "num_packs": len(found.bounds) - 1,
        "num_empty_packs": int((np.diff(found.bounds) == 0).sum()),
        "budget": rules.budget,
        "padded": rules.padded,
        "skipped": is_skipped(of, step),
        "last": end is not None and step == end.num_steps - 1,
        "committed": step + 1 in of.commits,
        "changes": _changes(of, step, found.lsn),
        "began": [{"lineage": each.number, "why": each.why} for each in of.branches[1:] if each.step == step],
        "other_lineages": [
            {"lineage": each, "digest": other.digest.hex()} for each in ledger.lineages_of(of.name, step)
            if each != found.lineage and (other := ledger.step(of.name, step, each)) is not None
        ],
        "reported": _means(reported),
        "partly_reported": _partly(reported),
        "packs": _packs(of, found, reported, rules, dp_size, pp_size),
    }  # fmt: skip


def feed_of(ledger: Ledger, name: str | None) -> FeedHistory:
    """Return the feed of this name, or the first feed for None. Raises UserError if there is none."""
    feeds = ledger.history.feeds
    if not feeds:
        raise UserError("The log is still empty. Wait until the broker has started its run.")
    if name is not None and name not in feeds:
        raise UserError(f"got feed {name!r}, expected one of: {', '.join(feeds)}")
    return feeds[name] if name is not None else next(iter(feeds.values()))


def recorded(ledger: Ledger, feed: FeedHistory, step: int) -> StepRows:
    """Return the rows of a step in the history that counts. Raises UserError for an unrecorded step."""
    found = ledger.step(feed.name, step, feed.effective(step))
    if found is not None:
        return found
    raise_if_damaged(ledger, "steps")
    if (gap := _gap_of(ledger, feed, step)) is not None:
        raise UserError(
            f"Step {step} of feed {feed.name!r} is {gap}. The records are lost or in another state_dir: "
            f"trainers resumed at step {gap.last + 1} from a checkpoint. Pass another step."
        )
    end, last = feed.end, ledger.last_step(feed.name, feed.branches[-1].number)
    if end is not None and step >= end.num_steps:
        raise UserError(
            f"got step {step} of feed {feed.name!r}, expected a step below {end.num_steps}, because the feed has ended"
        )
    if step > (feed.branches[-1].step - 1 if last is None else last):
        raise UserError(f"Step {step} of feed {feed.name!r} is not formed yet. The last step is {last}.")
    raise UserError(f"Step {step} of feed {feed.name!r} is in neither the log nor the ledger. Pass a later step.")


def _gap_of(ledger: Ledger, feed: FeedHistory, step: int) -> Gap | None:
    """Return the range of unrecorded steps that holds ``step``; None if there is none."""
    return next((gap for gap in ledger.gaps(feed.name) if gap.first <= step <= gap.last), None)


def _gap_with(ledger: Ledger, feed: FeedHistory, sample: Tree) -> Gap | None:
    """Return the range of unrecorded steps in which ``sample`` was merged; None if there is no such range."""
    stream, index = sample["stream"], sample["index"]
    for gap in ledger.gaps(feed.name):
        upto = feed.merged(gap.snapshot).get(stream, [])
        rows = np.frombuffer(gap.snapshot.form.window + gap.snapshot.form.pending, ROW)
        waiting = any(
            feed.stream_name(number, gap.snapshot.step, gap.lsn) == stream
            for number in rows["stream"][(rows["index"] == index) & (rows["part"] == 0)].tolist()
        )
        if sample["partition"] < len(upto) and sample["seq"] < upto[sample["partition"]] and not waiting:
            return gap
    return None


def raise_if_damaged(ledger: Ledger, *tables: str) -> None:
    """Raise LedgerDamaged if a row of ``tables`` cannot be read: a missing entry might be in that row."""
    damage = ledger.check(tables)
    if damage:
        raise LedgerDamaged(f"The ledger is damaged: {damage[0]}. Run 'streampack ledger rebuild'.")


def is_skipped(feed: FeedHistory, step: int) -> bool:
    """Return whether every rank skips the step."""
    return any(first <= step <= last for first, last in feed.skips)


def _means(reported: Reported) -> Tree:
    """Return for each name the number of samples of which all ranks have reported a value, and the mean."""
    return {
        name: {"samples": len(column), "mean": _number(float(column.mean()))}
        for each in reported if each.complete for name, column in zip(each.names, each.merged.values, strict=True)
        if len(column)
    }  # fmt: skip


def _partly(reported: Reported) -> list[str]:
    """Return the names of values that some ranks have reported, and others have not."""
    return sorted({name for each in reported if not each.complete for name in each.names})


def _number(value: float) -> float | str:
    """Return a number as JSON can have it: text for NaN and infinities."""
    return value if math.isfinite(value) else str(value)


def _packs(
    feed: FeedHistory, step: StepRows, reported: Reported, rules: Rules, dp_size: int | None, pp_size: int
) -> list[Tree]:  # fmt: skip
    """Return a step's packs as FORM made them; with ``dp_size``, as DEAL gives the packs to ranks.

    A dealt pack has its ``micro_batch``, ``dp_rank`` and ``length`` in tokens. ``of`` is the number of the formed pack
    from which the samples come. In place of ``length``, a padded micro-batch has its number of ``rows`` and the
    ``row_tokens`` of each row.
    """
    rows, align = step.rows, rules.align.sample
    slots = -(-step.own_lengths // align) * align
    costs = rules.balance.costs(slots, step.shared) + step.media["extra_cost"]

    def pack(number: int, positions: I64, row_tokens: int | None = None) -> Tree:
        """Return one pack as a tree; ``positions``: its rows in the step, ``row_tokens``: tokens of each padded row."""
        held = slots[positions] if row_tokens is None else np.full(len(positions), row_tokens)
        offsets = (np.cumsum(held) - held).tolist()
        return {
            "pack": number,
            "num_tokens": int(step.own_lengths[positions].sum()),
            "num_loss_tokens": int(rows["loss_tokens"][positions].sum()),
            "num_items": int(step.media["items"][positions].sum()),
            "num_patches": int(step.media["patches"][positions].sum()),
            "cost": int(costs[positions].sum()),
            "samples": [
                _sample(feed, step, reported, row, at) for row, at in zip(positions.tolist(), offsets, strict=True)
            ],
        }

    if dp_size is None:
        formed = (np.arange(begin, end) for begin, end in pairwise(step.bounds.tolist()))
        return [pack(number, positions) for number, positions in enumerate(formed)]
    sums = np.stack([step.own_lengths, slots, rows["loss_tokens"].astype(np.int64), costs])
    sums = np.diff(np.concatenate([np.zeros((4, 1), np.int64), sums.cumsum(axis=1)], axis=1)[:, step.bounds])
    table = SampleTable(max(len(rows), 1))
    handles = table.enter(
        rows, keeps=step.keeps.tobytes(), shares=step.shared.astype("<u4").tobytes(), media=step.media.tobytes()
    )  # fmt: skip
    packs = PlannedPacks(handles, step.bounds, sums, [b""] * (len(step.bounds) - 1))
    planned = PlannedStep(step.step, packs, step.num_loss_tokens, step.num_samples, step.digest, step.chain, rules)
    try:
        dealt = dealer_of(rules, table, DealtFigures()).deal(planned, Mesh(dp=dp_size, pp=pp_size), True)
    except ValueError as error:
        raise UserError(str(error)) from None
    _, _, widths, aligns, _ = dealt.contents
    numbers = np.frombuffer(dealt.columns["packs_u32"], "<u4").tolist()
    positions_of = np.split(dealt.contents.handles - handles[:1], dealt.bounds[1:-1])  # a new table's are in order
    shown = []
    for micro_batch, rank in product(range(dealt.each), range(dp_size)):
        at = rank * dealt.each + micro_batch
        number, positions, length = numbers[at], positions_of[at], int(widths[at])
        place: Tree = {"micro_batch": micro_batch, "dp_rank": rank}
        if "rows_u32" in dealt.columns:
            row_tokens = int(aligns[at])
            place |= {"length": length, "rows": length // row_tokens, "row_tokens": row_tokens}
            shown.append(place | pack(number, positions, row_tokens))
        else:
            of = int(np.searchsorted(step.bounds, positions[0], "right")) - 1 if len(positions) else number
            shown.append(place | {"of": of, "length": length} | pack(number, positions))
    return shown


def _sample(feed: FeedHistory, step: StepRows, reported: Reported, row: int, offset: int) -> Tree:
    """Return row number ``row`` of a step as a tree; ``offset``: index of the sample's first token in its pack."""
    values = step.rows[row]
    sample_id = int(values["stream"]), int(values["index"]), int(values["part"])
    told = [each.by_sample.get(sample_id, {}) for each in reported if each.complete]
    return {
        "stream": feed.stream_name(int(values["stream"]), step.step, step.lsn),
        "index": int(values["index"]),
        "part": int(values["part"]),
        "offset": offset,
        "length": int(values["length"]),
        "shared": int(step.shared[row]),
        "loss_tokens": int(values["loss_tokens"]),
        "items": int(step.media["items"][row]),
        "patches": int(step.media["patches"][row]),
        "crc": int(values["crc"]),
        "values": {name: _number(value) for each in told for name, value in sorted(each.items())},
    }


def _changes(feed: FeedHistory, step: int, lsn: int) -> list[Tree]:
    """Return the changes of rules at a step: their notes, and the differences to the rules before."""
    found = [each for each in feed.rules if each.note is not None and each.step == step]
    before = feed.rules_at(step - 1, lsn) if step else None
    return [
        {"note": each.note, "differences": [] if before is None else differences(before, each.rules)} for each in found
    ]


def differences(before: Rules, after: Rules) -> list[str]:
    """Return the rules that differ as lines of text: ``streams.web.weight: 0.7 -> 0.5``."""
    one, other = _flat("", msgspec.to_builtins(before)), _flat("", msgspec.to_builtins(after))
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return [f"{key}: {one.get(key, 'default')} -> {other.get(key, 'default')}" for key in keys]


def _flat(path: str, tree: Any) -> Tree:
    """Return the leaves of a tree by their dotted paths; a list entry with a ``name`` is listed under that name."""
    if isinstance(tree, dict):
        named = tree.items()
    elif isinstance(tree, list | tuple) and all(isinstance(each, dict) and "name" in each for each in tree):
        named = {each["name"]: each for each in tree}.items()
    else:
        return {path: tree}
    return {key: value for name, each in named for key, value in _flat(f"{path}.{name}".strip("."), each).items()}


# A sample


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
        known = [each for of in ledger.history.feeds.values() for each in of.streams]
        raise UserError(
            f"got stream {stream!r}, expected one of: {', '.join(known)}. To look up a row of a file, pass the "
            f"producer.yaml of its stream with -p."
        )
    partitions = feed.streams[stream].partitions
    if len(numbers) == 1:
        seq, partition = divmod(numbers[0], partitions)
        return _why_admitted(ledger, feed, stream, partition, ledger.completion(stream, partition, seq), seq, sources)
    partition, seq = numbers
    if partition >= partitions:
        raise UserError(f"got partition {partition} of stream {stream!r}, expected a partition below {partitions}")
    if not waited_for(feed, stream):
        return _why_admitted(ledger, feed, stream, partition, None, seq, sources)
    completion = ledger.completion_of(stream, partition, seq)
    if completion is None:
        return _why_staged(ledger, feed, stream, partition, seq)
    return _why_admitted(ledger, feed, stream, partition, completion, completion.seq, sources)


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
    rejection = ledger.rejection(stream, index)
    sent = None if completion is None else _sent(feed, stream, completion.sent, completion.lsn)
    found = {
        "run": ledger.state.run, "stream": stream, "index": index, "feed": feed.name,
        "partition": partition, "seq": seq, "sent": sent, "places": places,
        "rejected": None if rejection is None else sorted(rejection[1]),
        "origin": origin_of(feed, stream, index, sources),
    }  # fmt: skip
    return found | _verdict(ledger, feed, found)


def _why_staged(ledger: Ledger, feed: FeedHistory, stream: str, partition: int, seq: int) -> Tree:
    """Return the result of ``why_sample`` for a sample that is not admitted yet; it was sent with number ``seq``."""
    found: Tree = {
        "run": ledger.state.run, "stream": stream, "index": None, "feed": feed.name, "partition": partition,
        "seq": None, "sent": _sent(feed, stream, seq, None), "places": [], "rejected": None, "origin": None,
    }  # fmt: skip
    raise_if_damaged(ledger, "completed", "staged", "records")
    came, total = ledger.staged(stream).get(partition, 0), _total_of(ledger, stream, partition)
    where = f"partition {partition} of {stream}"
    if seq >= total:
        return found | {"is": "none", "why": f"{where} ended after {total} samples"}
    if seq >= came:
        so_far = f"the last sample of {where} that came has number {came - 1}" if came else f"no sample of {where} came"
        return found | {"is": "waiting", "why": f"the sample has not come yet; {so_far}"}
    if feed.end is not None:
        said = f"feed {feed.name} ended after {feed.end.num_steps} steps, while the sample waited"
        return found | {"is": "none", "why": f"{said} for {waited_for(feed, stream)}"}
    if ledger.state.first_lsn:
        said = (
            f"the ledger begins with record {ledger.state.first_lsn}, and an earlier one may have admitted the sample"
        )
        return found | {"is": "unrecorded", "why": said}
    return found | {"is": "waiting", "why": f"the sample waits for {waited_for(feed, stream)}"}


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
    found = [why_sample(ledger, each, sources) for each in samples_of(ledger, name, sources)]
    return {"row": name, "samples": found}


def _place(feed: FeedHistory, place: Placement, reported: Reported) -> Tree:
    """Return one place of a sample as a tree; ``counts`` is False if a later lineage has replaced the step."""
    step, row = place.step, place.row
    rules = feed.rules_at(step.step, step.lsn)
    offset = int(step.offsets(rules.align.sample)[row])
    sample = _sample(feed, step, reported, row, offset)
    return {
        "step": step.step,
        "lineage": step.lineage,
        "counts": feed.effective(step.step) == step.lineage,
        "skipped": is_skipped(feed, step.step),
        "pack": place.pack,
        **{key: value for key, value in sample.items() if key not in ("stream", "index")},
        "partly_reported": _partly(reported),
        "digest": step.digest.hex(),
    }


def _verdict(ledger: Ledger, feed: FeedHistory, found: Tree) -> Tree:
    """Return a sample's state as ``is``, and an explanation of the state as ``why``."""
    stream, index, seq = found["stream"], found["index"], found["seq"]
    if any(place["counts"] for place in found["places"]):
        return {"is": "step", "why": ""}
    if found["rejected"] is not None:
        return {"is": "rejected", "why": " or ".join(found["rejected"]) or "no reason was given"}
    raise_if_damaged(ledger, "spans", "rejected", "records")
    end, total = feed.end, _total_of(ledger, stream, found["partition"])
    if index in _dropped(feed, stream):
        return {
            "is": "dropped",
            "why": "the sample was left over at the end of a pass, and `tail: drop` drops such samples",
        }
    if (gap := _gap_with(ledger, feed, found)) is not None:
        return {"is": "unrecorded", "why": f"the sample was rejected or is in {gap}"}
    if seq >= total:
        partitions, ended = feed.streams[stream].partitions, f"ended after {total} samples"
        more = f"; its sample n has index {partitions} * n + {found['partition']}" if partitions > 1 else ""
        return {"is": "none", "why": f"partition {found['partition']} of {stream} {ended}{more}"}
    if end is not None:
        return {"is": "none", "why": f"feed {feed.name} ended after {end.num_steps} steps without this sample"}
    furthest = ledger.furthest(stream)
    if index <= furthest or seq < ledger.admitted(stream).get(found["partition"], 0):
        return {
            "is": "waiting",
            "why": f"the sample is in no step yet; it is in the window or waits for earlier samples of {stream}",
        }
    if waits := waited_for(feed, stream):
        return {
            "is": "waiting",
            "why": f"no sample has this index yet; a sample gets its index after it has waited for {waits}. "
            f"{stream}:PARTITION:SEQ finds a sample by the number that it was sent with",
        }
    so_far = (
        f"the last sample in a step is {stream}:{furthest}"
        if furthest >= 0
        else f"no sample of {stream} is in a step yet"
    )
    return {"is": "waiting", "why": f"the sample is not read yet; {so_far}"}


def _dropped(feed: FeedHistory, stream: str) -> list[int]:
    """Return the indices of a stream's samples that were dropped with the tail."""
    rows = feed.dropped()
    return [int(row["index"]) for row in rows if feed.stream_name(int(row["stream"]), LATEST, LATEST) == stream]
