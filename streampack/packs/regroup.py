"""Forward packs: one rank's samples of a step under another budget, for passes without gradients.

A pass without gradients (log-probs, rewards) keeps no activations, so it can take larger packs. All ranks need the same
number of forward packs, since they run collectives together, and they do not communicate here. With the run's budget or
more, whole packs are joined; every rank has as many packs, hence as many forward packs. With less, each rank fills
packs with its samples in order, and the number of forward packs is its own.

A forward pack is a run of the rank's samples in the order of its micro-batches. With the layouts ``zigzag`` and
``whole``, which cut each sample by itself, a rank holds one stretch of each sample. Regrouping then removes tail
padding, joins the stretches, cuts them elsewhere, and adds new tail padding. The other layouts cut whole packs. There a
rank does not hold its part of a joined pack, so regrouping raises an error.

Padded micro-batches become padded micro-batches again. Their places are cut as ``core.deal.dynamic_batches`` cuts them,
so all ranks have the same shapes. Each real token moves to its place in a row of another length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import index
from typing import Any, SupportsIndex

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from streampack.core.columns.step_columns import IN_PACKS
from streampack.core.deal.dynamic_batches import cut_places
from streampack.core.layout.boundaries import layouts
from streampack.core.layout.labels import derive_positions
from streampack.core.layout.shards import cut
from streampack.core.model.fields import POSITION_IDS, Field, from_bfloat16
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, IGNORE_INDEX
from streampack.errors import UserError
from streampack.packs.forward_packs import ForwardPacks
from streampack.packs.pack import Pack
from streampack.packs.pack_media import regrouped_media
from streampack.packs.trees.forward_paths import ForwardPaths
from streampack.packs.trees.pack_paths import has_paths

UNKNOWN = -1
"""Stands for the loss tokens of a forward pack with a part of a pack whose labels other ranks hold, too."""


def as_it_is(pack: Pack, rules: Rules) -> Any:
    """Return a pack unchanged, as the view of a pack in the format ``numpy``; ignore the rules."""
    return pack


def pack_itself(pack: Pack) -> Pack:
    """Return a pack unchanged, as the canonical pack of a view in the format ``numpy``."""
    return pack


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Settings with which a step makes forward packs.

    ``rules`` are the run's, and ``pp`` is the number of pipeline stages. The function ``show`` makes a view of a pack,
    given rules for the pack's length; ``read`` returns the canonical pack of a view. A padded step has ``places`` on
    every rank; ``longest`` is the longest sample over all ranks at each place where this rank has a sample.
    """

    rules: Rules
    pp: int
    places: int = 0
    longest: I64 | None = None
    show: Callable[[Pack, Rules], Any] = as_it_is
    read: Callable[[Any], Pack] = pack_itself

    def regroup(
        self, packs: tuple[Pack, ...], budget: SupportsIndex, min_packs: SupportsIndex, round: SupportsIndex | None
    ) -> ForwardPacks[Any]:
        """Return forward packs of a step's canonical packs; see ``Step.regroup``."""
        budget, min_packs = _number("budget", budget), _number("min_packs", min_packs)
        rules, first = self.rules, packs[0]
        if rules.padded:
            return self._rows(packs, budget, min_packs, rules.align.pack if round is None else _number("round", round))
        if round is not None:
            raise UserError(
                f"got round={round} for a step of packs, expected none, because packs keep the alignment of their "
                f"samples. `round` is for the rows of a feed with `padded: true`"
            )
        if first.cp_size is not None:
            raise UserError(
                "got packs of a feed with `cp: dynamic` to regroup, expected `cp: static`, because this rank lacks its "
                "parts of packs of other groups. Change the feed in broker.yaml"
            )
        if first.cp > 1 and first.layout not in ("zigzag", "whole"):
            raise UserError(
                f"got packs with `cp_layout: {first.layout}` and cp={first.cp} to regroup, expected zigzag or whole, "
                "because this rank lacks its parts of the regrouped packs. Change the feed's `cp_layout`"
            )
        if budget < rules.align.pack:  # on ranks without a sample, too
            raise UserError(f"got budget={budget}, expected at least {rules.align.pack}, the value of align.pack")
        if has_paths(first) and budget < rules.budget:
            raise UserError(
                f"got budget={budget} for packs whose samples may share tokens, expected at least {rules.budget}, the "
                f"run's budget. Such packs are joined, but not cut"
            )
        counts = _sums([pack.num_samples for pack in packs])
        slots = np.concatenate([np.diff(pack.cu_seqlens_padded)[: pack.num_samples] for pack in packs])
        if budget >= rules.budget:
            number = -(-len(packs) // (budget // rules.budget))
            of_packs = _split_evenly(len(packs), max(number, min_packs))
            bounds, room = counts[of_packs], np.maximum(np.diff(of_packs), 1) * rules.budget
        else:
            of_packs = None
            bounds = _filled(packs, slots, budget // rules.align.pack * rules.align.pack, min_packs)
            room = np.full(len(bounds) - 1, budget // rules.align.pack * rules.align.pack)
        ends = _sums(slots)[bounds]
        widths = _widths(np.diff(ends), room, rules, self.pp)
        parts = 1 if first.layout == "whole" else first.cp
        plan = _Cut(packs, counts, bounds, ends, widths, parts, of_packs)
        forward_packs = tuple(_forward_packs(plan, rules, rules.align.sample))
        return ForwardPacks(self._shown(forward_packs, widths), forward_packs, packs)

    def _rows(self, packs: tuple[Pack, ...], budget: int, min_packs: int, round: int) -> ForwardPacks[Any]:
        """Return forward packs of a step's padded micro-batches, with rows in multiples of ``round``."""
        rules, first = self.rules, packs[0]
        if first.cp > 1 and first.layout != "whole":
            raise UserError(
                f"got padded micro-batches with `cp_layout: {first.layout}` and cp={first.cp} to regroup, expected "
                f"whole, because this rank lacks its parts of rows of another length. Change the feed's `cp_layout`"
            )
        if round % rules.align.pack:
            raise UserError(f"got round={round}, expected a multiple of {rules.align.pack}, the value of align.pack")
        if self.longest is None:
            raise UserError(
                "got padded micro-batches of a broker of version 0.1 to regroup, expected version 0.2 or later, which "
                "tells the longest samples of all ranks. Install it for the broker"
            )
        rows = np.repeat(
            [pack.max_seqlen for pack in packs], [pack.cu_seqlens_padded[-1] // pack.max_seqlen for pack in packs]
        )
        last = rows[len(self.longest) : self.places]  # at most one place, where other ranks alone have a sample
        longest = -(-np.append(self.longest, last) // round) * round
        if (most := int(longest.max(initial=round))) > budget:
            raise UserError(
                f"got budget={budget}, expected at least {most}, the tokens of this step's longest row with padding"
            )
        stops, widths = cut_places(longest.tolist(), budget, round, min_packs)
        tokens = np.diff(stops) * widths
        bounds = np.minimum(stops, len(self.longest))
        counts = _sums([pack.num_samples for pack in packs])
        moved = _moved(packs, bounds, widths, tokens)
        plan = _Cut(packs, counts, bounds, _sums(tokens), tokens, 1, moved=moved)
        forward_packs = tuple(_forward_packs(plan, rules, widths))
        return ForwardPacks(self._shown(forward_packs, tokens), forward_packs, packs, moved)

    def _shown(self, packs: Sequence[Pack], widths: I64) -> tuple[Any, ...]:
        """Return forward packs of ``widths`` tokens in the step's format."""
        own = {width: _rules_of(width, self.rules) for width in set(widths.tolist())}
        return tuple(self.show(pack, own[width]) for pack, width in zip(packs, widths.tolist(), strict=True))


def _number(name: str, given: SupportsIndex) -> int:
    """Return argument ``name``, an integer of any type, as an int. Raises UserError unless it is at least 1."""
    try:
        number = index(given)
    except TypeError:
        number = 0
    if number < 1:
        raise UserError(f"got {name}={given!r}, expected a whole number of at least 1")
    return number


# Which samples share a forward pack


def _split_evenly(count: int, parts: int) -> I64:
    """Split ``count`` packs into ``parts`` runs, the first ones one longer if needed; int64 [parts + 1] bounds.

    >>> _split_evenly(5, 3).tolist()
    [0, 2, 4, 5]
    """
    return _sums([count // parts + (part < count % parts) for part in range(parts)])


def _filled(packs: Sequence[Pack], slots: I64, room: int, min_packs: int) -> I64:
    """Fill forward packs of ``room`` tokens with samples in order; return the packs' bounds, int64 [packs + 1].

    The bounds count samples. ``slots``: padded lengths of the samples. Empty packs at the end make up ``min_packs``.
    Raises UserError for a sample longer than ``room``.
    """
    if len(slots) and int(slots.max()) > room:
        ids = np.concatenate([pack.sample_ids for pack in packs])
        raise UserError(
            f"got a budget that holds {room} tokens, but sample {tuple(ids[slots.argmax()].tolist())} has "
            f"{int(slots.max())} tokens with padding. Pass a budget that holds every sample"
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
    """Return the lengths T of forward packs in tokens, int64 [packs].

    ``slots``: tokens of each pack's padded samples. ``room``: largest length of each pack. Both are int64 [packs].

    With the shape ``fixed``, a pack takes all its room, which is equal on all ranks. With other shapes, a pack takes
    what its samples need. In a pipeline, all packs are as long as the longest.
    """
    unit = rules.width_unit
    widths = room if rules.shape == "fixed" else np.minimum(-(-np.maximum(slots, 1) // unit) * unit, room)
    return np.full_like(widths, widths.max()) if pp > 1 else widths


def _moved(packs: Sequence[Pack], bounds: I64, widths: I64, tokens: I64) -> tuple[I64, I64]:
    """Return the index of each real token among all tokens of micro-batches, and among those of forward packs.

    Forward pack i holds samples bounds[i] to bounds[i + 1], in rows of widths[i] tokens; it has tokens[i] in all.
    """
    lengths = np.concatenate([np.diff(pack.cu_seqlens)[: pack.num_samples] for pack in packs])
    firsts = _sums([len(pack.padding_mask) for pack in packs]).tolist()
    begins = [
        pack.cu_seqlens_padded[: pack.num_samples] + first for pack, first in zip(packs, firsts[:-1], strict=True)
    ]
    counts = np.diff(bounds)
    row = np.arange(len(lengths)) - np.repeat(bounds[:-1], counts)
    targets = np.repeat(_sums(tokens)[:-1], counts) + row * np.repeat(widths, counts)
    offsets = np.arange(int(lengths.sum())) - np.repeat(_sums(lengths)[:-1], lengths)
    return np.repeat(np.concatenate(begins), lengths) + offsets, np.repeat(targets, lengths) + offsets


def _rules_of(width: int, rules: Rules) -> Rules:
    """Return rules for the view and the check of a forward pack of ``width`` tokens."""
    if rules.padded:
        return structs.replace(rules, budget=width)
    return Rules(
        budget=width, align=rules.align, share=rules.share, tokens=rules.tokens, fields=rules.fields,
        packer="concatenative",
    )  # fmt: skip


# Contents of the forward packs


@dataclass(frozen=True, slots=True)
class _Cut:
    """Two ways to divide a rank's samples: into packs, and into forward packs. Both keep the samples' order.

    - ``counts``: pack m holds samples counts[m] to counts[m + 1].
    - ``bounds``: forward pack i holds samples bounds[i] to bounds[i + 1].
    - ``ends``: forward pack i holds tokens ends[i] to ends[i + 1] of all samples, which are padded and without tails.
    - ``widths``: tokens of each forward pack, tail padding included.
    - ``parts``: this rank holds 1 / parts of each pack.
    - ``of_packs``: forward pack i holds packs of_packs[i] to of_packs[i + 1]; None if packs are cut.
    - ``moved``: for padded rows, the index of each real token in the packs, and in the forward packs.
    """

    packs: Sequence[Pack]
    counts: I64
    bounds: I64
    ends: I64
    widths: I64
    parts: int
    of_packs: I64 | None = None
    moved: tuple[I64, I64] | None = None

    @property
    def paths(self) -> ForwardPaths | None:
        """The paths of the forward packs; None without ``share``."""
        if self.of_packs is None or not has_paths(self.packs[0]):
            return None
        return ForwardPaths(self.packs, self.of_packs, self.widths)

    def by_token(self, arrays: Sequence[NDArray[Any]], pad: Any, parts: int) -> list[NDArray[Any]]:
        """Convert the packs' arrays by token, [T / parts, ...], to the arrays of the forward packs.

        The value ``pad`` fills tail padding.
        """
        if self.moved is not None:
            joined = np.concatenate(arrays)
            row = np.full((int(self.ends[-1]), *joined.shape[1:]), pad, joined.dtype)
            row[self.moved[1]] = joined[self.moved[0]]
            return np.split(row, self.ends[1:-1])
        held = [int(pack.cu_seqlens_padded[pack.num_samples]) // parts for pack in self.packs]  # all but tails
        joined = np.concatenate([array[:size] for array, size in zip(arrays, held, strict=True)])
        spans, rows = pairwise((self.ends // parts).tolist()), list[NDArray[Any]]()
        for (begin, end), width in zip(spans, (self.widths // parts).tolist(), strict=True):
            row = np.full((width, *joined.shape[1:]), pad, joined.dtype)
            row[: end - begin] = joined[begin:end]
            rows.append(row)
        return rows

    def by_sample(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Convert the packs' arrays by sample, [samples, ...], to the arrays of the forward packs."""
        joined = np.concatenate(arrays)
        return [joined[begin:end].copy() for begin, end in pairwise(self.bounds.tolist())]

    def field(self, field: Field) -> list[NDArray[Any]]:
        """Return a declared field's array for each forward pack."""
        arrays = [pack.fields[field.name] for pack in self.packs]
        if field.axis == "sample":
            return self.by_sample(arrays)
        if field.align == "target" and self.paths is not None:
            return self.paths.values(arrays, _pad(field))
        return self.by_token(arrays, _pad(field), 1 if field.cp == "replicate" else self.parts)

    def loss_tokens(self, labels: Sequence[I64] | None) -> list[int]:
        """Return the loss tokens of each forward pack.

        A forward pack of whole packs has the sum of their loss tokens. For a forward pack with a part of a pack, count
        the ``labels``, or return UNKNOWN if this rank does not hold all labels.
        """
        whole = np.isin(self.bounds, self.counts)
        sums = _sums([pack.num_loss_tokens for pack in self.packs])[np.searchsorted(self.counts, self.bounds)]
        counts: list[int] = np.diff(sums).tolist()
        for i in np.flatnonzero(~(whole[:-1] & whole[1:])).tolist():
            counts[i] = UNKNOWN if labels is None or self.parts > 1 else int((labels[i] != IGNORE_INDEX).sum())
        return counts


def _forward_packs(plan: _Cut, rules: Rules, aligns: int | I64) -> list[Pack]:
    """Build the forward packs of a plan, as canonical packs; their samples are padded to multiples of ``aligns``."""
    packs, widths, parts = plan.packs, plan.widths, plan.parts
    first = packs[0]
    lengths = np.concatenate([np.diff(pack.cu_seqlens)[: pack.num_samples] for pack in packs]).astype(np.int64)
    laid = layouts(lengths, np.diff(plan.bounds), aligns, widths)
    mine = cut(laid, first.cp, first.cp_rank, first.layout)
    tokens = _sums(widths // parts).tolist()
    positions, padding_mask = np.empty(tokens[-1], np.int64), np.empty(tokens[-1], np.bool_)
    of_paths: list[dict[str, Any]] = [{}] * len(widths)
    depth = np.zeros(len(laid.real), np.int64)  # shared tokens before each segment
    if plan.paths is not None:
        of_paths = plan.paths.attributes()
        depth[laid.real > 0] = plan.paths.depths
    depth = depth[mine.segment]
    places = mine.start - laid.start[mine.segment] + depth, mine.stop - mine.start, laid.real[mine.segment] + depth
    derive_positions(*places, positions, padding_mask)
    positions %= rules.budget  # keeps positions in long tails below the largest that the model supports
    slices, of_pack = np.stack([mine.start, mine.stop], axis=1), mine.first.tolist()
    names = ("sample_ids", *(name for name in IN_PACKS if getattr(first, name) is not None))
    of_samples: dict[str, Any] = {name: plan.by_sample([getattr(pack, name) for pack in packs]) for name in names}
    fields = {field.name: plan.field(field) for field in rules.fields if field.name in first.fields}
    media = regrouped_media([pack.fields for pack in packs], plan.bounds, rules)
    input_ids = labels = supplied = None
    if first.input_ids is not None:
        input_ids = plan.by_token([pack.input_ids for pack in packs], 0, parts)
        of_packs = [pack.labels for pack in packs]
        paths = plan.paths
        labels = paths.values(of_packs, IGNORE_INDEX) if paths else plan.by_token(of_packs, IGNORE_INDEX, parts)
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
            num_loss_tokens=loss[i],
            micro_batch=i,
            num_micro_batches=len(loss),
            pack=i,
            slices=slices[of_pack[i] : of_pack[i + 1]],
            fields={name: rows[i] for name, rows in fields.items()} | media[i],
            **{name: values[i] for name, values in of_samples.items()},
            **of_paths[i],
        )
        for i, layout in enumerate(laid.packs())
    ]


def _pad(field: Field) -> Any:
    """Return a field's value at padding, in the dtype that packs have."""
    held = field.fill(field.pad)
    return from_bfloat16(held) if field.dtype == "bfloat16" else held


def _sums(sizes: Sequence[int] | I64) -> I64:
    """Return cumulative sums that begin with 0, int64 [n + 1]."""
    return np.append(0, np.cumsum(np.asarray(sizes, np.int64)))
