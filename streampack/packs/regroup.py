"""Forward packs: a step's samples, on the rank that has them, under another budget; and the way back.

A pass without gradients (log-probs, rewards) keeps no activations, so it may take several micro-batches in one. Ranks
run collectives together in it, so all need as many packs, and none asks another. With a budget of the packs' own or
more, whole packs are joined, of which every rank has as many: that is so by itself. With less, each rank fills packs
with its samples as they come, and their number is its own.

Either way a forward pack is a run of the rank's samples in the order of its micro-batches. The layouts that cut every
sample by itself (``zigzag``, ``whole``) leave a rank one stretch of each sample's slot: so there, and on the way back
too, tails are taken off, what is left is put together and cut elsewhere, and new tails are put behind. The others cut
packs, and a rank does not hold what they would give it of a pack that is joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import index
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from streampack.core.layout.boundaries import layouts
from streampack.core.layout.labels import derive_positions
from streampack.core.layout.shards import cut
from streampack.core.model.fields import POSITION_IDS, Field, from_bfloat16
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, IGNORE_INDEX
from streampack.errors import UserError
from streampack.packs.forward_packs import ForwardPacks
from streampack.packs.pack import Pack

UNKNOWN = -1
"""Loss tokens of a forward pack with a part of a pack, where other ranks hold labels of it."""


def as_it_is(pack: Pack, rules: Rules) -> Any:
    """A pack in the format ``numpy``."""
    return pack


def pack_itself(pack: Pack) -> Pack:
    """The canonical pack of a pack in the format ``numpy``."""
    return pack


@dataclass(frozen=True, slots=True)
class Regrouping:
    """What a step must know to be regrouped: the run's rules, and the stages of the pipeline.

    ``show`` makes a view of a pack, with rules of its own length; ``read`` gives the canonical pack of a view.
    """

    rules: Rules
    pp: int
    show: Callable[[Pack, Rules], Any] = as_it_is
    read: Callable[[Any], Pack] = pack_itself

    def regroup(self, packs: tuple[Pack, ...], budget: SupportsIndex, min_packs: SupportsIndex) -> ForwardPacks[Any]:
        """See ``Step.regroup``; of its canonical packs."""
        budget, min_packs = _number("budget", budget), _number("min_packs", min_packs)
        rules, first = self.rules, packs[0]
        if rules.padded:
            raise UserError(
                "got a step of padded micro-batches to regroup, expected packs: rows of several lengths have no shape "
                "together; run the pass by micro-batch, or serve the samples as packs"
            )
        if first.cp > 1 and first.layout not in ("zigzag", "whole"):
            raise UserError(
                f"got packs of the layout {first.layout} with cp={first.cp} to regroup, expected zigzag or whole: this "
                f"rank does not hold its part of another pack; set the feed's cp_layout"
            )
        if budget < rules.align.pack:  # on ranks without a sample, too
            raise UserError(f"got budget={budget}, expected at least the {rules.align.pack} of align.pack")
        counts = _sums([pack.num_samples for pack in packs])
        slots = np.concatenate([np.diff(pack.cu_seqlens_padded)[: pack.num_samples] for pack in packs])
        if budget >= rules.budget:
            number = -(-len(packs) // (budget // rules.budget))
            of_packs = _shared_out(len(packs), max(number, min_packs))
            bounds, room = counts[of_packs], np.maximum(np.diff(of_packs), 1) * rules.budget
        else:
            bounds = _filled(packs, slots, budget // rules.align.pack * rules.align.pack, min_packs)
            room = np.full(len(bounds) - 1, budget // rules.align.pack * rules.align.pack)
        ends = _sums(slots)[bounds]
        widths = _widths(np.diff(ends), room, rules, self.pp)
        parts = 1 if first.layout == "whole" else first.cp
        found = tuple(_forward_packs(_Cut(packs, counts, bounds, ends, widths, parts), rules))
        own = {width: _rules_of(width, rules) for width in set(widths.tolist())}
        shown = tuple(self.show(pack, own[width]) for pack, width in zip(found, widths.tolist(), strict=True))
        return ForwardPacks(shown, found, packs)


def _number(name: str, given: SupportsIndex) -> int:
    """An int, or what counts as one: numpy's, or a tensor's that ranks have agreed on."""
    try:
        number = index(given)
    except TypeError:
        number = 0
    if number < 1:
        raise UserError(f"got {name}={given!r}, expected at least 1, a whole number")
    return number


# Which samples share a forward pack


def _shared_out(count: int, parts: int) -> I64:
    """Bounds of ``count`` things in ``parts`` runs that differ by one at most, the larger first; int64 [parts + 1].

    >>> _shared_out(5, 3).tolist()
    [0, 2, 4, 5]
    """
    return _sums([count // parts + (part < count % parts) for part in range(parts)])


def _filled(packs: Sequence[Pack], slots: I64, room: int, min_packs: int) -> I64:
    """Where forward packs of up to ``room`` tokens begin among the samples, and their end, int64 [packs + 1]: each
    takes what fits, in order; empty ones at the end make up ``min_packs``. Raises UserError for a sample that
    none can hold.
    """
    if len(slots) and int(slots.max()) > room:
        ids = np.concatenate([pack.sample_ids for pack in packs])
        raise UserError(
            f"got a budget that holds {room} tokens and sample {tuple(ids[slots.argmax()].tolist())} of "
            f"{int(slots.max())} with padding, expected a budget for every sample"
        )
    bounds, held = [0], 0
    for sample, slot in enumerate(slots.tolist()):
        if held + slot > room:
            bounds.append(sample)
            held = 0
        held += slot
    missing = max(min_packs - len(bounds), 0)
    return np.array([*bounds, *[len(slots)] * (1 + missing)], np.int64)


def _widths(slots: I64, room: I64, rules: Rules, pp: int) -> I64:
    """T of forward packs whose samples, padded, take ``slots`` of the tokens that they have ``room`` for; all int64
    [packs].

    As the run's shape has it: ``fixed`` ones take all the room, which is the same on every rank, others what they need;
    in a pipeline all are as long as the longest.
    """
    unit = rules.width_unit
    widths = room if rules.shape == "fixed" else np.minimum(-(-np.maximum(slots, 1) // unit) * unit, room)
    return np.full_like(widths, widths.max()) if pp > 1 else widths


def _rules_of(width: int, rules: Rules) -> Rules:
    """What a view and its check must know of a forward pack of ``width`` tokens."""
    return Rules(budget=width, align=rules.align, tokens=rules.tokens, fields=rules.fields, packer="concatenative")


# What they hold


@dataclass(frozen=True, slots=True)
class _Cut:
    """A rank's samples in its packs, and anew in forward packs.

    Pack m holds samples ``counts[m]`` to ``counts[m + 1]``, forward pack i ``bounds[i]`` to ``bounds[i + 1]``, which
    are slots ``ends[i]`` to ``ends[i + 1]`` of ``widths[i]`` tokens; the rank holds 1 / ``parts`` of each.
    """

    packs: Sequence[Pack]
    counts: I64
    bounds: I64
    ends: I64
    widths: I64
    parts: int

    def by_token(self, arrays: Sequence[NDArray[Any]], pad: Any, parts: int) -> list[NDArray[Any]]:
        """Arrays [T / parts, ...] of the packs as those of the forward packs, ``pad`` in their tails."""
        held = [int(pack.cu_seqlens_padded[pack.num_samples]) // parts for pack in self.packs]  # all but tails
        joined = np.concatenate([array[:size] for array, size in zip(arrays, held, strict=True)])
        spans, rows = pairwise((self.ends // parts).tolist()), []
        for (begin, end), width in zip(spans, (self.widths // parts).tolist(), strict=True):
            row = np.full((width, *joined.shape[1:]), pad, joined.dtype)
            row[: end - begin] = joined[begin:end]
            rows.append(row)
        return rows

    def by_sample(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Arrays [samples, ...] of the packs as those of the forward packs."""
        joined = np.concatenate(arrays)
        return [joined[begin:end].copy() for begin, end in pairwise(self.bounds.tolist())]

    def field(self, field: Field) -> list[NDArray[Any]]:
        """A declared field of each forward pack."""
        arrays = [pack.fields[field.name] for pack in self.packs]
        if field.axis == "sample":
            return self.by_sample(arrays)
        return self.by_token(arrays, _pad(field), 1 if field.cp == "replicate" else self.parts)

    def loss_tokens(self, labels: Sequence[I64] | None) -> list[int]:
        """Of each forward pack: the sum of its packs', or where it has a part of one, what its labels say."""
        whole = np.isin(self.bounds, self.counts)
        sums = _sums([pack.num_loss_tokens for pack in self.packs])[np.searchsorted(self.counts, self.bounds)]
        found: list[int] = np.diff(sums).tolist()
        for i in np.flatnonzero(~(whole[:-1] & whole[1:])).tolist():
            found[i] = UNKNOWN if labels is None or self.parts > 1 else int((labels[i] != IGNORE_INDEX).sum())
        return found


def _forward_packs(plan: _Cut, rules: Rules) -> list[Pack]:
    packs, widths, parts = plan.packs, plan.widths, plan.parts
    first = packs[0]
    lengths = np.concatenate([np.diff(pack.cu_seqlens)[: pack.num_samples] for pack in packs]).astype(np.int64)
    laid = layouts(lengths, np.diff(plan.bounds), rules.align.sample, widths)
    mine = cut(laid, first.cp, first.cp_rank, first.layout)
    tokens = _sums(widths // parts).tolist()
    positions, padding_mask = np.empty(tokens[-1], np.int64), np.empty(tokens[-1], np.bool_)
    places = mine.start - laid.start[mine.segment], mine.stop - mine.start, laid.real[mine.segment]
    derive_positions(*places, positions, padding_mask)
    positions %= rules.budget  # in a tail of several packs: no position that a model was not made for
    slices, of_pack = np.stack([mine.start, mine.stop], axis=1), mine.first.tolist()
    ids = plan.by_sample([pack.sample_ids for pack in packs])
    fields = {field.name: plan.field(field) for field in rules.fields if field.name in first.fields}
    input_ids = labels = supplied = None
    if first.input_ids is not None:
        input_ids = plan.by_token([pack.input_ids for pack in packs], 0, parts)
        labels = plan.by_token([pack.labels for pack in packs], IGNORE_INDEX, parts)
    for field in rules.fields:
        if field.name == POSITION_IDS:  # as [T', 3] where each token has three
            supplied = plan.by_token([pack.position_ids.T for pack in packs], _pad(field), parts)
    loss = plan.loss_tokens(labels)
    return [
        replace(
            first,
            input_ids=input_ids[i] if input_ids else None,  # type: ignore[arg-type]
            labels=labels[i] if labels else None,  # type: ignore[arg-type]
            position_ids=np.ascontiguousarray(supplied[i].T) if supplied else positions[tokens[i] : tokens[i + 1]],
            padding_mask=padding_mask[tokens[i] : tokens[i + 1]],
            cu_seqlens=layout.cu_seqlens,
            cu_seqlens_padded=layout.cu_seqlens_padded,
            max_seqlen=layout.max_seqlen,
            num_samples=layout.num_samples,
            num_segments=layout.num_segments,
            sample_ids=ids[i],
            num_loss_tokens=loss[i],
            micro_batch=i,
            num_micro_batches=len(loss),
            pack=i,
            slices=slices[of_pack[i] : of_pack[i + 1]],
            fields={name: rows[i] for name, rows in fields.items()},
        )
        for i, layout in enumerate(laid.packs())
    ]


def _pad(field: Field) -> Any:
    """What stands at padding, as packs have it."""
    held = field.fill(field.pad)
    return from_bfloat16(held) if field.dtype == "bfloat16" else held


def _sums(sizes: Sequence[int] | I64) -> I64:
    """0 and the sums of the first, the first two, ...: int64 [n + 1]."""
    return np.append(0, np.cumsum(np.asarray(sizes, np.int64)))
