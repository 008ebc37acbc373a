"""``streampack why --step``: find the samples of a step, and say when a step is not recorded; return trees for JSON.

The ledger must be up to date (``state_dir.open_ledger``). The functions report a sample or step as missing only if no
row of the ledger is damaged.
"""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import msgspec
import numpy as np

from streampack.core.deal.deal_stats import DealtFigures
from streampack.core.deal.dealt_steps import dealer_of
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import EXTRA_ROW, I64, SampleTable
from streampack.core.model.steps import PlannedPacks, PlannedStep
from streampack.errors import LedgerDamaged, UserError
from streampack_services.ledger.formed_by import FormingRules
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.reported_values import ReportedValues
from streampack_services.ledger.run_history import NEVER, FeedHistory, RulesFrom
from streampack_services.ledger.step_rows import StepRows

Tree = dict[str, Any]
Reported = list[ReportedValues]
NOT_SHOWN = ("keep", "extra_bytes", "extra_cost")
"""Columns of ``samples.EXTRAS`` that are left out of a sample's tree."""
SHOWN_COLUMNS = tuple(name for name in EXTRA_ROW.names or () if name not in NOT_SHOWN)
OTHER_COLUMNS = tuple(name for name in SHOWN_COLUMNS if name not in ("items", "patches"))
"""Columns of a sample beside its media that a report shows where one is not 0."""


def why_step(
    ledger: Ledger, step: int, feed: str | None = None, dp_size: int | None = None, pp_size: int = 1,
    cp_size: int | None = None,
) -> Tree:  # fmt: skip
    """Return a step's packs, samples, digests and events; with ``dp_size``, also the rank of each pack.

    ``feed``: name of the feed, None for the first one. ``pp_size``: pipeline stages, which change the packs of a batch.
    ``cp_size``: context-parallel ranks, which form groups with dynamic context parallelism. Raises UserError if the
    step is not recorded or the mesh is not possible.
    """
    history = feed_of(ledger, feed)
    rows = recorded(ledger, history, step)
    formed, end = FormingRules(ledger, history).of(rows), history.end
    rules, (dealt_by, dealt_later) = formed.rules, history.dealt_at(rows.lsn)
    reported = ledger.reported(history.name, step, rows.lineage)
    return {
        "run": ledger.state.run,
        "feed": history.name,
        "step": step,
        "lineage": rows.lineage,
        "digest": rows.digest.hex(),
        "chain": rows.chain.hex(),
        "num_loss_tokens": rows.num_loss_tokens,
        "num_samples": rows.num_samples,
        "num_tokens": rows.num_tokens,
        **_media_of(rows),
        "num_packs": len(rows.bounds) - 1,
        "num_empty_packs": int((np.diff(rows.bounds) == 0).sum()),
        "budget": rules.budget,
        "stage": _stage(history, rows, formed),
        "padded": rules.padded,
        "dealt_by": groups_of(dealt_by),
        "dealt_later_by": [groups_of(layout) for layout in dealt_later],
        "skipped": history.is_skipped(step),
        "skip_notes": history.skip_notes(step),
        "last": end is not None and step == end.num_steps - 1,
        "committed": step + 1 in history.commits,
        "changes": _changes(history, step, rows.lsn),
        "began": [{"lineage": it.number, "why": it.why} for it in history.branches[1:] if it.step == step],
        "other_lineages": [
            {"lineage": other.lineage, "digest": other.digest.hex()} for other in ledger.records_of(history.name, step)
            if other.lineage != rows.lineage
        ],
        "reported": _means(reported),
        "partly_reported": partly(reported),
        "packs": _packs(history, rows, reported, rules, _mesh(dp_size, pp_size, cp_size, dealt_by), dealt_by),
    }  # fmt: skip


def of_rank(pack: Tree, dp_rank: int, cp_size: int | None) -> bool:
    """Return whether a dealt pack is one of data-parallel rank ``dp_rank``, or of a group with one of its ranks."""
    if "dp_rank" in pack:
        return bool(pack["dp_rank"] == dp_rank)
    first, cp = pack["first_rank"], cp_size or 1
    return bool(first < (dp_rank + 1) * cp and dp_rank * cp < first + pack["num_ranks"])


def _mesh(dp_size: int | None, pp_size: int, cp_size: int | None, dealt_by: str) -> Mesh | None:
    """Return the mesh to deal packs on; None without ``dp_size``. Raises UserError if groups need ``cp_size``."""
    if dp_size is None:
        return None
    if dealt_by and cp_size is None:
        raise UserError(
            "Got --dp-size without --cp-size for a feed with `cp: dynamic`, whose dp x cp ranks form groups. Pass the "
            "number of context-parallel ranks of the mesh as --cp-size."
        )
    return Mesh(dp=dp_size, pp=pp_size, cp=cp_size or 1)


def groups_of(layout: str) -> Tree | None:
    """Return the settings of dynamic context parallelism as a tree, also of another planner; None without it."""
    dynamic = DynamicCp.recorded(layout or "static")
    return None if dynamic is None else msgspec.structs.asdict(dynamic)


def _stage(feed: FeedHistory, step: StepRows, formed: RulesFrom) -> Tree | None:
    """Return the stage of a step and its rules; None in a run whose rules never change.

    ``late``: True while packs still have the rules of the stage before, because they hold longer samples.
    """
    stage, number = feed.stage_at(step.step, step.lsn), step.step
    if stage is None:
        return None
    *_, latest = feed.changes_at(number, step.lsn)
    shares = latest.rules.shares_at(number)
    streams = zip(latest.rules.streams, shares, strict=True)
    weights = {stream.name: share / sum(shares) for stream, share in streams if share}
    packs = formed.rules.packs_at(number) if formed.rules.batch is None else None
    return {
        "number": stage.number, "name": stage.name, "step": stage.begin, "budget": formed.rules.budget_at(number),
        "packs": packs, "weights": {name: round(share, 6) for name, share in weights.items()},
        "late": formed is not latest,
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
    rows = ledger.step(feed.name, step, feed.effective(step))
    if rows is not None:
        return rows
    raise_if_damaged(ledger, "steps")
    if (gap := next((gap for gap in ledger.gaps(feed.name) if gap.first <= step <= gap.last), None)) is not None:
        raise UserError(
            f"Step {step} of feed {feed.name!r} is {gap}. The records are lost or in another state_dir: "
            f"trainers resumed at step {gap.last + 1} from a checkpoint. Pass another step."
        )
    end, last = feed.end, ledger.last_before(feed.name, NEVER)
    if end is not None and step >= end.num_steps:
        raise UserError(
            f"got step {step} of feed {feed.name!r}, expected a step below {end.num_steps}, because the feed has ended"
        )
    if step > max(feed.branches[-1].step - 1, last):
        formed = f"The last step is {last}" if last >= 0 else "No step is formed yet"
        raise UserError(f"Step {step} of feed {feed.name!r} is not formed yet. {formed}.")
    raise UserError(f"Step {step} of feed {feed.name!r} is in neither the log nor the ledger. Pass a later step.")


def raise_if_damaged(ledger: Ledger, *tables: str) -> None:
    """Raise LedgerDamaged if a row of ``tables`` cannot be read: a missing entry might be in that row."""
    damage = ledger.check(tables)
    if damage:
        raise LedgerDamaged(f"The ledger is damaged: {damage[0]}. Run 'streampack ledger rebuild'.")


def _means(reported: Reported) -> Tree:
    """Return for each name the number of samples with values from all ranks, and the mean."""
    return {
        name: {"samples": len(column), "mean": _number(float(column.mean()))}
        for report in reported if report.complete
        for name, column in zip(report.names, report.merged.values, strict=True) if len(column)
    }  # fmt: skip


def partly(reported: Reported) -> list[str]:
    """Return the names of values that some ranks have reported, and others have not."""
    return sorted({name for report in reported if not report.complete for name in report.names})


def _number(value: float) -> float | str:
    """Return a number as JSON can have it: text for NaN and infinities."""
    return value if math.isfinite(value) else str(value)


def _packs(
    feed: FeedHistory, step: StepRows, reported: Reported, rules: Rules, mesh: Mesh | None, dealt_by: str
) -> list[Tree]:  # fmt: skip
    """Return a step's packs as FORM made them; with a ``mesh``, as DEAL gives the packs to ranks.

    A dealt pack has its ``micro_batch``, ``dp_rank`` and ``length`` in tokens. ``of`` is the number of the formed pack
    from which the samples come. In place of ``length``, a padded micro-batch has its number of ``rows`` and the
    ``row_tokens`` of each row. The pack of a group of ranks (``dealt_by`` settings of dynamic context parallelism) has
    ``first_rank`` and ``num_ranks`` in place of ``dp_rank``.
    """
    rows, align = step.rows, rules.align.sample
    slots = -(-step.own_lengths // align) * align
    costs = rules.balance.sample_costs(slots, step.column)

    def pack(number: int, positions: I64, places: I64 | None = None) -> Tree:
        """Return one pack as a tree; ``positions``: its rows in the step, ``places``: the tokens that each takes."""
        places = slots[positions] if places is None else places
        offsets = (np.cumsum(places) - places).tolist()
        return {
            "pack": number,
            "num_tokens": int(step.own_lengths[positions].sum()),
            "num_loss_tokens": int(rows["loss_tokens"][positions].sum()),
            **_media_of(step, positions),
            "cost": int(costs[positions].sum()),
            "samples": [
                sample_tree(feed, step, reported, row, at) for row, at in zip(positions.tolist(), offsets, strict=True)
            ],
        }

    if mesh is None:
        formed = (np.arange(begin, end) for begin, end in pairwise(step.bounds.tolist()))
        return [pack(number, positions) for number, positions in enumerate(formed)]
    sums = np.stack([step.own_lengths, slots, rows["loss_tokens"].astype(np.int64), costs])
    sums = np.diff(np.concatenate([np.zeros((4, 1), np.int64), sums.cumsum(axis=1)], axis=1)[:, step.bounds])
    table = SampleTable(max(len(rows), 1))
    handles = table.enter(rows, **step.extra_columns())
    packs = PlannedPacks(handles, step.bounds, sums, [b""] * (len(step.bounds) - 1))
    planned = PlannedStep(step.step, packs, step.num_loss_tokens, step.num_samples, step.digest, step.chain, rules)
    try:
        if dealt_by and (refusal := mesh_refusal(mesh, rules, dealt_by)):
            raise UserError(f"The feed cannot serve this mesh: {refusal}.")
        dealt = dealer_of(rules, table, DealtFigures(), dealt_by or "zigzag").deal(planned, mesh, True)
    except ValueError as error:
        raise UserError(str(error)) from None
    widths, aligns = dealt.contents.widths, dealt.contents.aligns
    numbers = np.frombuffer(dealt.columns["packs_u32"], "<u4").tolist()
    positions_of = np.split(dealt.contents.handles - handles[:1], dealt.bounds[1:-1])  # a new table's are in order
    shown, sizes, ranks = [], dealt.contents.sizes, dealt.contents.ranks
    for micro_batch, rank in product(range(dealt.each), range(dealt.sizes[0])):
        at = rank * dealt.each + micro_batch
        number, positions, length, unit = numbers[at], positions_of[at], int(widths[at]), int(aligns[at])
        place: Tree = {"micro_batch": micro_batch, "dp_rank": rank}
        if sizes is not None and ranks is not None:
            if not ranks[at]:
                place = {"micro_batch": micro_batch, "first_rank": rank, "num_ranks": int(sizes[at]), "length": length}
                shown.append(place | pack(number, positions, -(-step.own_lengths[positions] // unit) * unit))
        elif "rows_u32" in dealt.columns:
            place |= {"length": length, "rows": length // unit, "row_tokens": unit}
            shown.append(place | pack(number, positions, np.full(len(positions), unit)))
        else:
            of = int(np.searchsorted(step.bounds, positions[0], "right")) - 1 if len(positions) else number
            shown.append(place | {"of": of, "length": length} | pack(number, positions))
    return shown


def _media_of(step: StepRows, positions: I64 | slice = slice(None)) -> Tree:
    """Return the media of the samples at these ``positions`` of a step as a tree."""
    items, patches = (int(step.extras[name][positions].sum()) for name in ("items", "patches"))
    return {"num_items": items, "num_patches": patches}


def sample_tree(feed: FeedHistory, step: StepRows, reported: Reported, row: int, offset: int) -> Tree:
    """Return row number ``row`` of a step as a tree; ``offset``: index of the sample's first token in its pack."""
    facts = step.rows[row]
    sample_id = int(facts["stream"]), int(facts["index"]), int(facts["part"])
    of_sample = [values.by_sample.get(sample_id, {}) for values in reported if values.complete]
    return {
        "stream": feed.stream_name(int(facts["stream"]), step.step, step.lsn),
        "index": int(facts["index"]),
        "part": int(facts["part"]),
        "offset": offset,
        "length": int(facts["length"]),
        "loss_tokens": int(facts["loss_tokens"]),
        **{name: int(step.extras[name][row]) for name in SHOWN_COLUMNS},
        "crc": int(facts["crc"]),
        "values": {name: _number(value) for named in of_sample for name, value in sorted(named.items())},
    }


def _changes(feed: FeedHistory, step: int, lsn: int) -> list[Tree]:
    """Return the changes of rules at a step: their notes, and the differences to the rules before."""
    return [
        {"note": change.note, "differences": differences(before.rules, change.rules)}
        for before, change in pairwise(feed.changes_at(step, lsn)) if change.note is not None and change.step == step
    ]  # fmt: skip


def differences(before: Rules, after: Rules) -> list[str]:
    """Return the rules that differ as lines of text: ``streams.web.weight: 0.7 -> 0.5``."""
    one, other = _flat("", msgspec.to_builtins(before)), _flat("", msgspec.to_builtins(after))
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return [f"{key}: {one.get(key, 'default')} -> {other.get(key, 'default')}" for key in keys]


def _flat(path: str, content: Any) -> Tree:
    """Return the leaves of a tree by their dotted paths; a list entry with a ``name`` is listed under that name."""
    if isinstance(content, dict):
        named = content.items()
    elif isinstance(content, list | tuple) and all(isinstance(item, dict) and "name" in item for item in content):
        named = {item["name"]: item for item in content}.items()
    else:
        return {path: content}
    return {key: value for name, item in named for key, value in _flat(f"{path}.{name}".strip("."), item).items()}
