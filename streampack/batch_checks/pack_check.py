"""Checks one pack, or one shard of a pack: boundaries, slices, tokens, labels and declared fields.

The batch may have any view; it is first converted to the names of the canonical pack. The expected values are computed
in another way than ``packs`` builds them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.batch_checks.expectations import equal, expect, expect_once
from streampack.batch_checks.tree_check import check_paths, has_trees, written_out
from streampack.batch_checks.view_check import canonical
from streampack.core.layout.shards import shard_slices
from streampack.core.model.fields import CU_ITEMS, CU_PATCHES, LABELS, LOSS_MASK, POSITION_IDS, Field, from_bfloat16
from streampack.core.model.keys.planning_keys import MediaLimits
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, IGNORE_INDEX
from streampack.errors import InvariantError


class PackCheck:
    """Checks of one pack, or of one shard of it.

    - ``pack``: the batch in the names of the canonical pack.
    - ``what``: its step and pack, for messages.
    - ``padded``, ``real``: boundaries of the segments with and without padding, int64 [segments + 1].
    - ``total``: tokens of the whole pack.
    - ``places``: places in the whole pack of the shard's T' tokens, int64 [T'].
    """

    def __init__(self, batch: Any, mesh: Mesh | None, rules: Rules | None) -> None:
        self.pack = canonical(batch)
        self._mesh = mesh
        self.rules: Rules | None = rules or getattr(batch, "rules", None)
        self.what = f"step {self.pack['step']}, pack {self.pack['pack']}"
        self.padded, self.real = (np.asarray(self.pack[k], np.int64) for k in ("cu_seqlens_padded", "cu_seqlens"))
        self._group_size = int(self.pack.get("cp_size") or 0)
        """Ranks that share the pack, with dynamic context parallelism; else 0."""
        self.total = int(self.padded[-1]) if self.padded.ndim == 1 and self.padded.size else 0

    def run(self) -> None:
        """Run all checks of the pack. Raises InvariantError for the first that fails."""
        self._check_boundaries()
        self._check_sample_ids()
        self._check_slices()
        if has_trees(self.pack):
            check_paths(self.pack, self.what, self.padded, self.lengths)
        self._check_tokens()
        self._check_fields()
        if has_trees(self.pack) and len(self.pack["sample_ids"]):
            pack, rules = written_out(self.pack, self.rules)
            PackCheck(pack, self._mesh, rules).run()

    def _check_boundaries(self) -> None:
        """Check that the boundaries rise, and that segments fit their samples, the alignment and the rules."""
        padded, real = self.padded, self.real
        expect(padded.ndim == 1 and len(padded) >= 2, "cu_seqlens_padded", f"{self.what}: got no segment")
        equal("cu_seqlens_padded", f"{self.what}, its start", int(padded[0]), 0)
        self._expect_segments("cu_seqlens_padded", padded[1:] > padded[:-1], padded[1:], "above the one before")
        equal("cu_seqlens", f"{self.what}, its size", real.shape, padded.shape)
        equal("cu_seqlens", f"{self.what}, its start", int(real[0]), 0)
        self.lengths, self.slots = np.diff(real), np.diff(padded)
        tail = self.pack["num_segments"] - self.pack["num_samples"]
        equal("num_segments", self.what, int(self.pack["num_segments"]), len(self.slots))
        expect(tail in (0, 1), "num_samples", f"{self.what}: got {tail} segments without a sample, expected 0 or 1")
        least = np.ones(len(self.slots), np.int64)
        if tail:
            equal("cu_seqlens", f"{self.what}, the tail's length", int(self.lengths[-1]), 0)
            least[-1] = 0
        self._expect_segments("cu_seqlens", self.lengths >= least, self.lengths, "a token or more")
        self._expect_segments("cu_seqlens", self.lengths <= self.slots, self.lengths, "at most the segment's size")
        equal("max_seqlen", self.what, int(self.pack["max_seqlen"]), int(self.slots.max()))
        if self.rules is not None:
            self._check_length(self.rules, int(self.slots[: len(self.slots) - tail].sum()))
            align, slots = self.rules.align.sample, self.slots[: len(self.slots) - tail]
            self._expect_segments("alignment", slots % align == 0, self.slots, f"{align} k")

    def _check_length(self, rules: Rules, slots: int) -> None:
        """Check that the pack's number of tokens is the one that the rules' ``shape`` gives for ``slots`` tokens.

        A pipeline may make packs longer. Rows of a padded micro-batch must have equal lengths.
        """
        if size := self._group_size:
            equal("shape", f"{self.what}, its tokens over the {size} ranks that share it", self.total % size, 0)
            if rules.shape == "exact":
                unit = size * math.lcm(2, rules.align.pack)
                equal("shape", f"{self.what}, its tokens", self.total, -(-max(slots, 1) // unit) * unit)
            return
        if rules.padded:
            row, align = int(self.pack["max_seqlen"]), rules.align.pack
            self._expect_segments("row", self.slots == row, self.slots, f"{row}, as the widest")
            expected = f"expected a multiple of {align} tokens"
            expect(row % align == 0, "row", f"{self.what}: got a row of {row} tokens, {expected}")
            expect(self.total <= rules.budget, "budget", f"{self.what}: got {self.total} tokens, over {rules.budget}")
            return
        if rules.shape == "fixed":
            equal("budget", f"{self.what}, its tokens", self.total, rules.budget)
            return
        own = int(rules.own_widths(np.array([slots]))[0])
        if self._mesh is not None and self._mesh.pp == 1:
            equal("shape", f"{self.what}, its tokens", self.total, own)
        fits = own <= self.total <= rules.budget and self.total == int(rules.own_widths(np.array([self.total]))[0])
        expect(
            fits,
            "shape",
            f"{self.what}: got {self.total} tokens, expected {own} tokens or a greater length that rules.shape allows",
        )

    def _check_sample_ids(self) -> None:
        """Check that there is one id per sample, and that no sample occurs twice."""
        ids = self.pack["sample_ids"]
        equal("sample_ids", f"{self.what}, their shape", ids.shape, (int(self.pack["num_samples"]), 3))
        expect_once(ids, self.what)

    def _check_slices(self) -> None:
        """Check that the slices are those of the rank's shard; set ``places`` from them."""
        slices = np.asarray(self.pack["slices"], np.int64)
        equal("slices", f"{self.what}, their shape", slices.shape, (len(slices), 2))
        inside = (slices[:, 0] >= 0) & (slices[:, 0] <= slices[:, 1]) & (slices[:, 1] <= self.total)
        expect(bool(inside.all()), "slices", f"{self.what}: got {slices[~inside].tolist()}, outside 0 to {self.total}")
        pieces = [np.arange(start, stop) for start, stop in slices.tolist()]
        self.places = np.concatenate([*pieces, np.zeros(0, np.int64)]).astype(np.int64)
        times = np.bincount(self.places, minlength=self.total)
        self.agree("slices", times, np.minimum(times, 1), times > 1, np.arange(len(times)))
        mesh, kind = self._mesh, self.pack.get("layout")
        if self._group_size:
            self._check_group(self._group_size)
            mesh = None  # the pack's own numbers hold
        cp, rank = (mesh.cp, mesh.cp_rank) if mesh else (self.pack.get("cp", 1), self.pack.get("cp_rank", 0))
        if len(self.places) == self.total:
            equal("slices", f"{self.what}, a whole pack", self.places, np.arange(self.total))
        else:
            try:
                starts, stops = shard_slices(self.pack["cu_seqlens_padded"], cp, rank, kind or "zigzag")
            except ValueError as error:
                raise InvariantError(f"alignment: {self.what}: {error}") from None
            equal("slices", f"{self.what}, what rank {rank} of {cp} holds", slices, np.stack([starts, stops], axis=1))
        self.segment = self.segments_at(self.places)
        self.offset = self.places - self.padded[self.segment]
        self.padding = self.offset >= self.lengths[self.segment]
        if has_trees(self.pack):  # own tokens follow the shared ones
            depth = np.zeros(len(self.lengths), np.int64)
            depth[: len(self.pack["shared"])] = self.pack["shared"]
            self.offset = self.offset + depth[self.segment]

    def _check_group(self, size: int) -> None:
        """Check that the ranks that share the pack are an aligned power of two, and that this rank is one of them."""
        first, count = self.pack["cp_ranks"]
        cp, cp_rank = int(self.pack["cp"]), int(self.pack["cp_rank"])
        equal("cp_ranks", f"{self.what}, their number", (count, cp), (size, size))
        fits = size & (size - 1) == 0 and first % size == 0 and 0 <= cp_rank < size
        got = f"{self.what}: got {size} ranks from {first} on and cp_rank {cp_rank}"
        expect(fits, "cp_ranks", f"{got}, expected a power of two, from one of its multiples on")
        if (mesh := self._mesh) is not None:
            equal("cp_rank", self.what, first + cp_rank, mesh.dp_cp_rank)

    def _check_tokens(self) -> None:
        """Check shapes, the padding mask, positions, ids at padding, and labels."""
        pack, size = self.pack, len(self.places)
        expect(
            ("input_ids" in pack) == ("labels" in pack),
            "keys",
            f"{self.what}: got only one of input_ids and labels, expected both or neither",
        )
        of_paths = ("labels", LOSS_MASK) if has_trees(pack) else ()
        for name in ("input_ids", "labels", "padding_mask", LOSS_MASK):
            if name in pack and name not in of_paths:
                equal(name, f"{self.what}, its shape", pack[name].shape, (size,))
        derived = self.rules is not None and not self._is_declared(POSITION_IDS)
        positions = pack["position_ids"].shape
        equal("position_ids", f"{self.what}, its shape", positions if derived else positions[-1:], (size,))
        self.agree("padding_mask", pack["padding_mask"], self.padding)
        if self.rules is not None and self.rules.padded and "attention_mask" in pack:  # elsewhere a field's name
            self.agree("attention_mask", pack["attention_mask"], ~self.padding)
        if not self._is_declared(POSITION_IDS) and pack["position_ids"].ndim == 1:
            self.agree("position_ids", pack["position_ids"], self.offset, self._misplaced(pack["position_ids"]))
        if "input_ids" not in pack:
            return
        ids = pack["input_ids"]
        self.agree("input_ids", ids, np.where(self.padding, 0, ids))
        if not of_paths:
            check_labels(self, self.places, ids, pack["labels"], self.loss_mask)

    def _misplaced(self, positions: I64) -> NDArray[np.bool_]:
        """Return a mask of the positions that do not count from 0 in their segment, bool [T'] for T' tokens.

        In the tail of a forward pack, positions may restart from 0 at a fixed distance.
        """
        tail, behind = self.segment >= int(self.pack["num_samples"]), self.offset - positions
        first_again = int(behind[tail & (behind > 0)].min(initial=self.total))
        wrong: NDArray[np.bool_] = positions != np.where(tail, self.offset % first_again, self.offset)
        return wrong

    def _is_declared(self, name: str) -> bool:
        """Return whether the run declares the field ``name``, so that samples carry its values."""
        return self.rules is not None and any(field.name == name for field in self.rules.fields)

    def _check_fields(self) -> None:
        """Check that the declared fields are present, with their shapes and padding values."""
        for field in self.rules.fields if self.rules is not None else ():
            if field.name == LABELS or (field.name != POSITION_IDS and "input_ids" not in self.pack):
                continue  # a middle stage of a pipeline has only positions
            expect(field.name in self.pack, field.name, f"{self.what}: got none, expected the declared field")
            if has_trees(self.pack) and field.align == "target":
                size = len(self.pack["path_index"])
                equal(field.name, f"{self.what}, its shape", self.pack[field.name].shape, (size, *field.shape))
                continue
            places = np.arange(self.total) if field.cp == "replicate" else self.places
            count = len(self.pack["sample_ids"]) if field.axis == "sample" else len(places)
            values = np.asarray(self.pack[field.name])
            values = values.T if field.name == POSITION_IDS else values
            equal(field.name, f"{self.what}, its shape", values.shape, (count, *field.shape))
            if field.axis == "token":
                self._check_padding(field, values.reshape(count, -1), places)
        if self.rules is not None and CU_ITEMS in self.pack:
            self._check_media(self.rules)

    def _check_media(self, rules: Rules) -> None:
        """Check the boundaries of media, the shapes of their fields, and the limits of the pack."""
        items, patches = (np.asarray(self.pack[name], np.int64) for name in (CU_ITEMS, CU_PATCHES))
        for name, bounds, count in (
            (CU_ITEMS, items, int(self.pack["num_samples"])), (CU_PATCHES, patches, int(items[-1])),
        ):  # fmt: skip
            equal(name, f"{self.what}, its shape", bounds.shape, (count + 1,))
            rises = bounds[0] == 0 and bool((np.diff(bounds) >= 0).all())
            expect(rises, name, f"{self.what}: got boundaries that fall, expected them to rise from 0")
        totals = {"item": int(items[-1]), "patch": int(patches[-1])}
        for field in rules.all_fields:
            if not field.of_media:
                continue
            values = np.asarray(self.pack[field.name])
            if field.is_reference and values.dtype != object:  # fetched and decoded
                equal(field.name, f"{self.what}, its rows", len(values), totals["patch"])
                continue
            equal(field.name, f"{self.what}, its shape", values.shape, (totals[field.axis], *field.shape))
        limits = rules.limits or MediaLimits()
        for axis, most in (("item", limits.items), ("patch", limits.patches)):
            over = most is not None and totals[axis] > most
            expect(not over, "limits", f"{self.what}: got {totals[axis]} values of axis {axis}, over {most}")

    def _check_padding(self, field: Field, rows: NDArray[Any], places: I64) -> None:
        """Check that a field has its padding value after each sample's real tokens.

        A field aligned to targets also has the padding value at the last real token. ``rows`` [n, values per token] are
        the values at ``places`` int64 [n].
        """
        filler = field.fill(field.pad)
        pad = np.asarray(from_bfloat16(filler) if field.dtype == "bfloat16" else filler)[()]
        segment = self.segments_at(places)
        behind = places - self.padded[segment] >= self.lengths[segment] - (field.align == "target")
        same = (rows == pad) | ((rows != rows) & (pad != pad))  # NaN equals NaN here
        first = rows[np.arange(len(rows)), same.argmin(axis=1)]
        self.agree(field.name, first, np.full(len(rows), pad), behind & ~same.all(axis=1), places)

    @property
    def loss_mask(self) -> Any:
        """The loss mask [T'] of the pack; None if the run has none."""
        return self.pack.get(LOSS_MASK)

    @property
    def labels_sent(self) -> bool:
        """True if samples carry their own labels, so that labels need not be the next tokens."""
        return self._is_declared(LABELS)

    def agree(
        self, name: str, got: Any, expected: Any, wrong: NDArray[np.bool_] | None = None, at: I64 | None = None
    ) -> None:
        """Raise InvariantError for the first token where ``got`` differs from ``expected``, both [n].

        ``name``: the invariant. ``wrong``: bool [n] to use instead of the comparison. ``at``: each token's place in the
        pack, int64 [n]; default ``places``.
        """
        got, expected = np.asarray(got), np.asarray(expected)
        bad = np.flatnonzero(got != expected if wrong is None else wrong)
        if len(bad):
            i = int(bad[0])
            place = int((self.places if at is None else at)[i])
            raise InvariantError(
                f"{name}: {self.what}, {self._sample(int(self.segments_at(place)))}, position {place}: "
                f"got {got[i].item()}, expected {expected[i].item()}"
            )

    def segments_at(self, places: Any) -> Any:
        """Return the numbers of the segments at places of the pack; ``places``: int64 [n], or an int."""
        return np.searchsorted(self.padded, places, side="right") - 1

    def _sample(self, segment: int) -> str:
        """Return the sample of a segment in words for messages."""
        ids = self.pack["sample_ids"]
        return f"sample {tuple(ids[segment].tolist())}" if segment < len(ids) else "tail padding"

    def _expect_segments(self, name: str, holds: NDArray[np.bool_], got: I64, expected: str) -> None:
        """Raise InvariantError for the first segment where ``holds`` is False; ``got``: its value, by segment."""
        if not holds.all():
            i = int(np.argmin(holds))
            where = f"{self.what}, {self._sample(i)}, position {int(self.padded[i])}"
            raise InvariantError(f"{name}: {where}: got {int(got[i])}, expected {expected}")


def check_labels(check: PackCheck, places: I64, ids: I64, labels: I64, mask: Any) -> None:
    """Check that each label is the next token, or ignored where there is none. Raises InvariantError.

    The labels are those of a shard, or of all shards of a pack together. The arrays ``ids``, ``labels`` and ``mask``
    (int64 [n]) belong to the tokens at ``places`` of the pack (int64 [n]).
    """
    segment = check.segments_at(places)
    none = places - check.padded[segment] >= check.lengths[segment] - 1  # a last token, or padding
    if mask is not None:
        none |= mask == 0
    check.agree("labels", labels, np.where(none, IGNORE_INDEX, labels), at=places)
    if not check.labels_sent:
        elsewhere = np.iinfo(np.int64).min  # the id is on another rank
        after = np.full(check.total + 1, elsewhere)
        after[places] = ids
        after = after[places + 1]
        expected = np.where(none | (after == elsewhere), labels, after)
        check.agree("labels", labels, expected, at=places)
    counted, got = int((labels != IGNORE_INDEX).sum()), int(check.pack["num_loss_tokens"])
    fits = counted == got if len(places) == check.total else counted <= got
    expect(fits, "num_loss_tokens", f"{check.what}: got {got}, expected {counted}, the number of labels in the loss")
