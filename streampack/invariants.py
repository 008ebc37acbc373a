"""Does a batch hold what it promises? Every invariant of the canonical pack, asserted of any view.

Everything is computed here again, from boundaries, slices and tokens alone, by another way than the
one that built it: token by token, which segment it lies in and how far. Meant for the first steps of
a run, for tests and for a user's own changes to a batch; it costs some ten times what building costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.fields import LABELS, LOSS_MASK, POSITION_IDS
from streampack.core.layout import shard_slices
from streampack.core.messages import Mesh
from streampack.core.rules import Rules
from streampack.core.samples import I64, IGNORE_INDEX
from streampack.errors import InvariantError
from streampack.packs import Pack, Step

Checked = Mapping[str, Any]
"""A batch as the canonical pack in numpy, whatever view it came from."""


def verify(batch: Any, mesh: Mesh | None = None, rules: Rules | None = None) -> None:
    """Assert every invariant of a batch.

    ``batch``: a pack in any format, a step, or a list: the shards of one pack on all its context-parallel
    ranks, which must make it up, or the same step of all ranks. ``mesh``: this rank's place; without it, cp is
    what the slices say. ``rules``: the run's, ``loader.rules``, for the budget, the alignment, and whether labels
    or positions were sent with the samples (views know them; without, labels are the next tokens).

    Raises InvariantError, naming the invariant, the sample and the position.

    >>> for batch in loader:  # doctest: +SKIP
    ...     streampack.verify(batch)
    """
    if isinstance(batch, Step):
        check_step(batch, mesh, rules)
    elif not isinstance(batch, Mapping):
        many = list(batch)
        if many and all(isinstance(each, Step) for each in many):
            _check_ranks(many, rules)
        else:
            _check_shards(many, rules)
    else:
        _Check(batch, mesh, rules).run()


def check_step(step: Step, mesh: Mesh | None = None, rules: Rules | None = None) -> None:
    """Every pack of a step, and that they make one up. Raises InvariantError."""
    what = f"step {step.index}"
    _expect(
        len(step.digest) == len(step.chain) == 32 and not set(step.digest + step.chain) - set("0123456789abcdef"),
        "digest", f"{what}: got {step.digest!r} and chain {step.chain!r}, expected 32 hex digits each",
    )  # fmt: skip
    _equal("step", what, [batch.step for batch in step], [step.index] * len(step))
    _equal("micro_batch", what, [batch.micro_batch for batch in step], list(range(len(step))))
    checked = [_Check(batch, mesh, rules) for batch in step]
    for each in checked:
        each.run()
    _check_totals(what, step, checked, whole=mesh is not None and mesh.dp == 1)
    if rules is not None and mesh is not None and rules.packs % mesh.dp == 0:
        _equal("micro-batches", what, len(step), rules.packs // mesh.dp)


def follows(last: Step | None, step: Step) -> None:
    """``step``'s chain is the digest of the last one's and its own. Raises InvariantError."""
    before = bytes(16) if step.index == 0 else None
    if last is not None and step.index == last.index + 1:
        before = bytes.fromhex(last.chain)
    if before is not None:
        chain = hashlib.blake2b(before + bytes.fromhex(step.digest), digest_size=16).hexdigest()
        _equal("chain", f"step {step.index}", step.chain, chain)


def _check_totals(what: str, step: Step, checked: Sequence[_Check], whole: bool) -> None:
    """Sums over packs, which are all of the step's where ``whole``; no sample twice."""
    ids = np.concatenate([each.pack["sample_ids"] for each in checked]) if checked else np.zeros((0, 3), np.int64)
    found, counts = np.unique(ids, axis=0, return_counts=True)
    _expect(
        bool((counts == 1).all()), "sample_ids",
        f"{what}: got sample {tuple(found[counts.argmax()].tolist()) if len(found) else ()} in it more than once",
    )  # fmt: skip
    sums = {"num_samples": len(ids), "num_loss_tokens": sum(int(each.pack["num_loss_tokens"]) for each in checked)}
    for name, total in sums.items():
        said = getattr(step, name)
        fits = said == total if whole else said >= total
        _expect(fits, name, f"{what}: got {said}, expected {'' if whole else 'at least '}{total}, its packs' sum")


def _check_ranks(steps: Sequence[Step], rules: Rules | None) -> None:
    """The same step of all ranks: alike where it must be, every pack whole, every sum right."""
    first = steps[0]
    what = f"step {first.index}"
    for name in ("index", "digest", "chain", "num_samples", "num_loss_tokens"):
        for other in steps:
            _equal(name, f"{what} of another rank", getattr(other, name), getattr(first, name))
    packs: dict[int, list[Any]] = {}
    for step in steps:
        check_step(step, None, rules)
        _equal("micro-batches", f"{what} of another rank", len(step), len(first))
        for batch in step:
            packs.setdefault(batch.pack if batch.num_samples else (-1 - batch.dp_rank), []).append(batch)
    for shards in packs.values():
        if shards[0].num_samples:
            _check_shards(shards, rules)
    _check_totals(what, first, [_Check(shards[0], None, rules) for shards in packs.values()], whole=True)


def _check_shards(shards: Sequence[Any], rules: Rules | None) -> None:
    """The shards of all context-parallel ranks make the pack up, exactly; some ranks may hold the same."""
    _expect(len(shards) > 0, "shards", "got no shards, expected those of all context-parallel ranks of a pack")
    checked: dict[bytes, _Check] = {}
    for shard in shards:
        each = _Check(shard, None, rules)
        each.run()
        twin = checked.setdefault(each.pack["slices"].tobytes(), each)
        for name in ("input_ids", "labels", "position_ids"):
            if name in each.pack and name in twin.pack:
                _equal(name, f"{each.what} of two ranks that hold the same", each.pack[name], twin.pack[name])
    first, *others = checked.values()
    for other in others:
        for name in ("step", "pack", "cu_seqlens", "cu_seqlens_padded", "sample_ids", "num_loss_tokens"):
            _equal(name, f"{other.what}, another shard", other.pack[name], first.pack[name])
    places = np.concatenate([each.places for each in checked.values()])
    times = np.bincount(places, minlength=first.total)
    wrong = times != 1
    first.agree("shards", times, np.ones_like(times), wrong, np.arange(len(times)))
    held = list(checked.values())
    if all("labels" in each.pack for each in held):
        ids, labels = (_joined(held, [each.pack[k] for each in held], first.total) for k in ("input_ids", "labels"))
        masks = [each.loss_mask for each in held]
        mask = None if any(each is None for each in masks) else _joined(held, masks, first.total)
        _Labels(first, np.arange(first.total), ids, labels, mask).run()


def _joined(shards: Sequence[_Check], arrays: Sequence[Any], total: int) -> I64:
    """Each shard's array, [T'], at its places in the whole pack."""
    whole = np.zeros(total, np.int64)
    for each, array in zip(shards, arrays, strict=True):
        whole[each.places] = array
    return whole


class _Check:
    """One pack, or shard of one. ``places`` int64 [T']: where in the whole pack each of its tokens lies."""

    def __init__(self, batch: Any, mesh: Mesh | None, rules: Rules | None) -> None:
        self.pack = canonical(batch)
        self._mesh = mesh
        self.rules: Rules | None = rules or getattr(batch, "rules", None)
        self._batch = batch
        self.what = f"step {self.pack['step']}, pack {self.pack['pack']}"
        self.padded, self.real = (np.asarray(self.pack[k], np.int64) for k in ("cu_seqlens_padded", "cu_seqlens"))
        self.total = int(self.padded[-1]) if self.padded.size else 0

    def run(self) -> None:
        self._boundaries()
        self._samples()
        self._slices()
        self._tokens()
        _flattened(self._batch, self)

    def _boundaries(self) -> None:
        padded, real = self.padded, self.real
        _expect(padded.ndim == 1 and len(padded) >= 2, "cu_seqlens_padded", f"{self.what}: got no segment")
        _equal("cu_seqlens_padded", f"{self.what}, its start", int(padded[0]), 0)
        self._segments("cu_seqlens_padded", padded[1:] > padded[:-1], padded[1:], "above the one before")
        _equal("cu_seqlens", f"{self.what}, its size", real.shape, padded.shape)
        _equal("cu_seqlens", f"{self.what}, its start", int(real[0]), 0)
        self.lengths, self.slots = np.diff(real), np.diff(padded)
        tail = self.pack["num_segments"] - self.pack["num_samples"]
        _equal("num_segments", self.what, int(self.pack["num_segments"]), len(self.slots))
        _expect(tail in (0, 1), "num_samples", f"{self.what}: got {tail} segments without a sample, expected 0 or 1")
        least = np.ones(len(self.slots), np.int64)
        if tail:
            _equal("cu_seqlens", f"{self.what}, the tail's length", int(self.lengths[-1]), 0)
            least[-1] = 0
        self._segments("cu_seqlens", self.lengths >= least, self.lengths, "a token or more")
        self._segments("cu_seqlens", self.lengths <= self.slots, self.lengths, "at most the segment's size")
        _equal("max_seqlen", self.what, int(self.pack["max_seqlen"]), int(self.slots.max()))
        if self.rules is not None:
            _equal("budget", f"{self.what}, its tokens", self.total, self.rules.budget)
            each = self.rules.align.sample
            self._segments("alignment", self.slots[: len(self.slots) - tail] % each == 0, self.slots, f"{each} k")

    def _samples(self) -> None:
        ids = self.pack["sample_ids"]
        _equal("sample_ids", f"{self.what}, their shape", ids.shape, (int(self.pack["num_samples"]), 3))
        found, counts = np.unique(ids, axis=0, return_counts=True)
        twice = tuple(found[counts.argmax()].tolist()) if len(found) else ()
        _expect(bool((counts <= 1).all()), "sample_ids", f"{self.what}: got sample {twice} more than once")

    def _slices(self) -> None:
        slices = np.asarray(self.pack["slices"], np.int64).reshape(-1, 2)
        inside = (slices[:, 0] >= 0) & (slices[:, 0] <= slices[:, 1]) & (slices[:, 1] <= self.total)
        _expect(bool(inside.all()), "slices", f"{self.what}: got {slices[~inside].tolist()}, outside 0 to {self.total}")
        pieces = [np.arange(start, stop) for start, stop in slices.tolist()]
        self.places = np.concatenate([*pieces, np.zeros(0, np.int64)]).astype(np.int64)
        times = np.bincount(self.places, minlength=self.total)
        self.agree("slices", times, np.minimum(times, 1), times > 1, np.arange(len(times)))
        mesh, kind = self._mesh, self.pack.get("layout")
        cp, rank = (mesh.cp, mesh.cp_rank) if mesh else (self.pack.get("cp", 1), self.pack.get("cp_rank", 0))
        if len(self.places) == self.total:
            _equal("slices", f"{self.what}, a whole pack", self.places, np.arange(self.total))
        else:
            try:
                starts, stops = shard_slices(self.pack["cu_seqlens_padded"], cp, rank, kind or "zigzag")
            except ValueError as error:
                raise InvariantError(f"alignment: {self.what}: {error}") from None
            _equal("slices", f"{self.what}, what rank {rank} of {cp} holds", slices, np.stack([starts, stops], axis=1))
        self.segment = np.searchsorted(self.padded, self.places, side="right") - 1
        self.offset = self.places - self.padded[self.segment]
        self.padding = self.offset >= self.lengths[self.segment]

    def _tokens(self) -> None:
        pack, size = self.pack, len(self.places)
        for name in ("input_ids", "labels", "padding_mask"):
            if name in pack:
                _equal(name, f"{self.what}, its shape", pack[name].shape, (size,))
        _equal("position_ids", f"{self.what}, its shape", pack["position_ids"].shape[-1:], (size,))
        self.agree("padding_mask", pack["padding_mask"], self.padding)
        if not self._sent(POSITION_IDS) and pack["position_ids"].ndim == 1:
            self.agree("position_ids", pack["position_ids"], self.offset)
        if "input_ids" not in pack:
            return
        ids = pack["input_ids"]
        self.agree("input_ids", ids, np.where(self.padding, 0, ids))
        _Labels(self, self.places, ids, pack["labels"], self.loss_mask).run()

    def _sent(self, name: str) -> bool:
        return self.rules is not None and any(field.name == name for field in self.rules.fields)

    @property
    def loss_mask(self) -> Any:
        """[T'] of the run's loss mask, or None."""
        mask = self.pack.get(LOSS_MASK)
        return mask[self.places] if mask is not None and len(mask) == self.total else mask

    @property
    def labels_sent(self) -> bool:
        return self._sent(LABELS)

    def agree(
        self, name: str, got: Any, expected: Any, wrong: NDArray[np.bool_] | None = None, at: I64 | None = None
    ) -> None:
        """Equal token by token, or InvariantError with the first that is not; ``at`` its place in the pack."""
        got, expected = np.asarray(got), np.asarray(expected)
        bad = np.flatnonzero(got != expected if wrong is None else wrong)
        if len(bad):
            i = int(bad[0])
            place = int((self.places if at is None else at)[i])
            raise InvariantError(
                f"{name}: {self.what}, {self._sample(place)}, position {place}: "
                f"got {got[i].item()}, expected {expected[i].item()}"
            )

    def _sample(self, place: int) -> str:
        segment = int(np.searchsorted(self.padded, place, side="right")) - 1
        known = segment < len(self.pack["sample_ids"])
        return f"sample {tuple(self.pack['sample_ids'][segment].tolist())}" if known else "tail padding"

    def _segments(self, name: str, holds: NDArray[np.bool_], got: I64, expected: str) -> None:
        if not holds.all():
            i = int(np.argmin(holds))
            ids = self.pack["sample_ids"]
            sample = f"sample {tuple(ids[i].tolist())}" if i < len(ids) else "tail padding"
            raise InvariantError(
                f"{name}: {self.what}, {sample}, position {int(self.padded[i])}: got {int(got[i])}, expected {expected}"
            )


class _Labels:
    """Labels of some places of a pack: of a shard, or of all its shards together.

    ``ids``, ``labels`` and ``mask`` int64 [N] are those at ``places`` int64 [N].
    """

    def __init__(self, check: _Check, places: I64, ids: I64, labels: I64, mask: Any) -> None:
        self._check, self._places, self._ids, self._labels, self._mask = check, places, ids, labels, mask

    def run(self) -> None:
        check, places, labels = self._check, self._places, self._labels
        segment = np.searchsorted(check.padded, places, side="right") - 1
        none = places - check.padded[segment] >= check.lengths[segment] - 1  # a last token, or padding
        if self._mask is not None:
            none |= self._mask == 0
        check.agree("labels", labels, np.where(none, IGNORE_INDEX, labels), at=places)
        if not check.labels_sent:
            after = np.full(check.total + 1, -1, np.int64)  # -1: held by another rank
            after[places] = self._ids
            after = after[places + 1]
            expected = np.where(none | (after < 0), labels, after)
            check.agree("labels", labels, expected, at=places)
        counted, said = int((labels != IGNORE_INDEX).sum()), int(check.pack["num_loss_tokens"])
        fits = counted == said if len(places) == check.total else counted <= said
        _expect(fits, "num_loss_tokens", f"{check.what}: got {said}, expected {counted}, the labels that count")


def canonical(batch: Any) -> Checked:
    """A batch's own values, by the canonical pack's names and in numpy: what was changed in a view is changed here."""
    if isinstance(batch, Pack):
        return batch
    values = {**getattr(batch, "rest", {}), **batch}
    found = {name: _numpy(value) for name, value in values.items()}
    if "cu_seq_lens_q" in found:  # the flattening collator's names
        for name in {"input_ids", "labels", "position_ids"} & set(found):
            _expect(found[name].ndim > 1, name, f"got the shape {found[name].shape}, expected [1, T]")
            found[name] = found[name][..., 0, :]
        found["cu_seqlens_padded"], found["max_seqlen"] = found["cu_seq_lens_q"], found["max_length_q"]
        if "labels" in found:
            found["labels"] = np.append(found["labels"][1:], IGNORE_INDEX)
    missing = {"cu_seqlens", "cu_seqlens_padded", "sample_ids", "slices", "position_ids"} - set(found)
    if missing:
        raise InvariantError(f"keys: got a batch without {', '.join(sorted(missing))}, expected a pack")
    return found


def _flattened(batch: Any, check: _Check) -> None:
    """What only the flattening collator's form has."""
    if not isinstance(batch, Mapping) or "cu_seq_lens_q" not in batch:
        return
    values = {name: _numpy(value) for name, value in batch.items()}
    _equal("cu_seq_lens_k", check.what, values["cu_seq_lens_k"], values["cu_seq_lens_q"])
    _equal("max_length_k", check.what, values["max_length_k"], values["max_length_q"])
    check.agree("seq_idx", values["seq_idx"][0], check.segment)
    if "labels" in values:
        _equal("labels", f"{check.what}, position 0", int(values["labels"][0, 0]), IGNORE_INDEX)
    if "shift_labels" in values:
        check.agree("shift_labels", values["shift_labels"][0], check.pack["labels"])


def _numpy(value: Any) -> Any:
    """A tensor as an array, whatever device it is on; bfloat16 as float32."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def _equal(name: str, what: str, got: Any, expected: Any) -> None:
    same = np.array_equal(got, expected) if isinstance(expected, np.ndarray) else got == expected
    if not same:
        shown = [value.tolist() if isinstance(value, np.ndarray) else value for value in (got, expected)]
        raise InvariantError(f"{name}: {what}: got {shown[0]}, expected {shown[1]}")


def _expect(holds: bool, name: str, message: str) -> None:
    if not holds:
        raise InvariantError(f"{name}: {message}")
