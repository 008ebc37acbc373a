"""The ``Former``, which makes steps of admitted samples: it decides which samples are in a step, and in which packs.

Steps are a function of the admitted order and the recorded rules. They never depend on the mesh, the clock or the speed
of a producer. The ``Former`` holds the samples in merge order: the window and the samples behind it. Choosing packs is
the costly part, so it may run on another thread. ``request`` gives the arrays that a packer needs and ``apply`` takes
its choice. Samples may be admitted in between, since they only join the end.

In batch mode (``Rules.batch``) a step is one batch, packed as a closed set. Samples behind the batch have no influence
on its packs, and the number of packs depends on its samples. A batch consists of the first samples in the ``Former``.
Their number is fixed, or the merge tells where the batch ends.

A group that is kept in one pack is one item of the packers (``items``). The window counts a group as one sample, and a
group is packed only once all of its samples have come. A batch of a fixed number of samples ends with the group that
reaches the number.

The rules may change between two steps (``change``). Then packs that are not in a step yet are taken apart, if other
rules would have packed them in another way. A smaller budget has to wait until no sample held is longer (``fits``).

During warmup of the budget, a sample that is longer than its step's budget gets a pack of its own. So no sample waits
for a larger budget, and no pack is larger than the final budget.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from streampack.core.form.auto_window import STEPS, auto_window
from streampack.core.form.form_kernels import describe, take_out
from streampack.core.form.waits import Waits
from streampack.core.model.items import item_sizes, num_whole
from streampack.core.model.rules import Rules
from streampack.core.model.samples import EXTRAS, I64, PACK, ROW, SampleTable
from streampack.core.model.snapshot import FormState
from streampack.core.model.steps import (
    FIRST_CHAIN,
    FIRST_STAGE,
    BegunStage,
    PlannedPacks,
    PlannedStep,
    chain_digest,
    digests_of,
    step_digest,
)
from streampack.core.packers.packer import NO_EXTRA, Choice, Extra, Limited, Packer
from streampack.core.trees.table_trees import cut_off
from streampack.errors import InternalError


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of one call of a packer: see ``Packer.choose``.

    ``lengths`` and ``budget`` are in units of the sample alignment. ``sizes`` is the number of samples in each item;
    None means one sample per item.
    """

    packer: Packer
    lengths: I64
    ages: I64
    budget: int
    count: int
    closed: bool
    window: int
    sizes: I64 | None = None
    extra: Extra = NO_EXTRA

    def choose(self) -> Choice:
        """Run the packer, a pure function, and return its choice. Compiled kernels do not hold the GIL.

        Raises InternalError for limits that the packer does not keep.
        """
        if self.extra.limited is not None and not self.packer.keeps_limits:
            raise InternalError(f"got limits for {self.packer.name}, expected a packer that keeps limits")
        return self.packer.choose(
            self.lengths, self.ages, self.budget, self.count, self.closed, window=self.window, sizes=self.sizes,
            extra=self.extra,
        )  # fmt: skip


_NONE: I64 = np.zeros(0, np.int64)
NO_BOUND = 2**62
"""A number of samples that no feed reaches."""
UNSEEN = -1
"""Age, and step of the first sight, of an item that no packer has seen."""
REPACKING = (
    "budget", "packer", "max_samples_per_pack", "leftovers", "micro_batch_size", "align", "balance", "limits", "warmup",
)  # fmt: skip
"""Rules that decide which samples share a pack."""


class Former:
    """The samples admitted to a feed that are not in a step yet, and the packs that are not in a step yet.

    Samples outside packs are grouped into items; an item is one sample, or a group that is kept in one pack.
    """

    def __init__(self, rules: Rules, table: SampleTable, stage: BegunStage = FIRST_STAGE) -> None:
        self._rules, self.stage = rules, stage
        self._table = table
        self._packer = rules.new_packer()
        self.waits = Waits(self._packer, rules.packs if rules.batch is None else None)
        self.waits.window = 0 if rules.window == "auto" else rules.window
        self._handles: I64 = np.zeros(0, np.int64)
        self._sizes: I64 = np.zeros(0, np.int64)  # samples in each item; the next three are by item, too
        self._lengths: I64 = np.zeros(0, np.int64)
        self._ages: I64 = np.zeros(0, np.int64)
        self._since: I64 = np.zeros(0, np.int64)  # the step at which a packer first saw each item, or UNSEEN
        self._arrived: list[tuple[I64, I64]] = []  # (handles, lengths) admitted and not grouped to items yet
        self._pending = PlannedPacks.empty()
        self._recent: deque[int] = deque(maxlen=STEPS)
        """Items in each of the last steps, for the automatic window."""
        self._asked_held = -1  # samples held when the packer last returned fewer packs than requested
        self._asked_of = self._asked_count = 0  # samples held and packs requested in the last request
        self._reach = 0  # items outside steps up to which samples may be admitted: see ``may_admit``
        self.strict = False
        """True if ``may_admit`` bounds the samples that are admitted, because a change of the rules is to come."""
        self.one_by_one = False
        """True if each step waits for a call of its own, because the rules may change before it."""
        self.begun = False
        """True if some packs of the next step are chosen."""
        self.num_samples = 0
        """Samples held outside packs."""
        self.closed = False
        self.next_step = 0
        self.chain = FIRST_CHAIN
        self.queued_tokens = 0
        """Real tokens held outside packs."""
        self.queued_samples = 0
        """In batch mode, samples held outside packs; the pieces of a split sample count once."""
        self.dropped: I64 = np.zeros(0, np.int64)
        """Handles of samples that ``tail: drop`` dropped at the end, or at the ends of passes."""

    @property
    def lacks_samples(self) -> bool:
        """True if the packer needed more samples than it got, and no sample has come since."""
        return self._asked_held == self.num_samples

    @property
    def wants_samples(self) -> bool:
        """True if more samples should be admitted, so that there are enough for the next two steps.

        With too few samples behind the window, a step would take two choices of the packer.
        """
        rules, batch = self._rules, self._rules.batch
        if batch is None:
            step, samples = rules.packs_at(self.next_step) * rules.budget, self.num_samples
            if self.queued_tokens < 2 * step or self.lacks_samples:
                return True
            return self.queued_tokens * (samples - self.window) // max(samples, 1) < step  # an estimate
        if batch.samples is None or self.queued_samples < 2 * batch.samples:
            return True
        self._gather()
        return not self._batch_size()  # a group is longer than a batch

    @property
    def window(self) -> int:
        """The window of the next step, in samples."""
        return auto_window(self._recent) if self._rules.window == "auto" else self._rules.window

    @property
    def rules(self) -> Rules:
        """The rules of the next step."""
        return self._rules

    @property
    def unformed_tokens(self) -> int:
        """Tokens held outside steps."""
        return self.queued_tokens + int(self._pending.tokens.sum())

    def may_admit(self) -> int:
        """Return how many samples may be admitted now, if the samples admitted before a step must not depend on speed.

        These are the window, half a step more, and the packs chosen so far. In batch mode it is the first sample after
        the batch. The result is 0 once they are here.
        """
        batch = self._rules.batch
        if batch is not None:
            if batch.samples is None:
                return NO_BOUND
            return max(batch.samples + 1 - self.queued_samples, int(self.in_group))
        self._gather()
        items, lead = len(self._sizes) + self._num_items(self._pending), self._lead
        self._reach = max(self._reach, self._natural_reach)
        if self.lacks_samples and items >= self._reach:
            self._reach = items + lead
        return max(self._reach - items, 0)

    @property
    def _lead(self) -> int:
        """The read-ahead behind the window: half the items of a step lately, or a quarter of the window."""
        recent = self._recent
        return max(sum(recent) // (2 * len(recent)) if recent else self.window // 4, 1)

    @property
    def _natural_reach(self) -> int:
        """Items outside steps that are needed to choose the next pack without a wait."""
        return self.window + self._lead + self._num_items(self._pending)

    def _num_items(self, packs: PlannedPacks) -> int:
        """Return the number of items in ``packs``."""
        return int(np.count_nonzero(self._table.keep[packs.handles] == 0))

    def fits(self, rules: Rules) -> bool:
        """Return whether each item held would fit in a pack under ``rules``."""
        handles, sizes = self._held_items()
        units = _units(self._table.own_lengths(handles), sizes, rules.align.sample)
        most = rules.max_samples_per_pack
        if (units > rules.budget // rules.align.sample).any() or (most is not None and (sizes > most).any()):
            return False
        limited = self._limits_of(rules, handles, sizes)
        return limited is None or not (limited.counts > limited.most[:, None]).any()

    def _held_items(self) -> tuple[I64, I64]:
        """Return the handles of pending packs and of the items held, and the samples in each of their items."""
        pending = self._pending.handles
        ends = np.flatnonzero(self._table.keep[pending] != PACK)
        return np.concatenate([pending, self._handles]), np.concatenate([np.diff(ends, prepend=-1), self._sizes])

    def change(self, rules: Rules, stage: BegunStage = FIRST_STAGE) -> None:
        """Form the next steps by ``rules``, in ``stage``; not within a step. Take packs of other rules apart."""
        old, packer, self._rules, self.stage = self._rules, self._packer, rules, stage
        if any(getattr(old, key) != getattr(rules, key) for key in REPACKING):
            self._gather()
            pending, (handles, sizes) = self._pending, self._held_items()
            more = len(sizes) - len(self._sizes)
            self._pending, self._handles, self._sizes = PlannedPacks.empty(), handles, sizes
            self._lengths = _units(self._table.own_lengths(handles), sizes, rules.align.sample)
            self._ages = np.full(len(sizes), UNSEEN, np.int64)
            self._since = np.concatenate([np.full(more, self.next_step, np.int64), self._since])
            self.num_samples += len(pending.handles)
            self.queued_tokens += int(pending.tokens.sum())
            self._packer, self._asked_held = rules.new_packer(), -1
        if self._packer is not packer or (old.packs, old.window) != (rules.packs, rules.window):
            self.waits = Waits(self._packer, rules.packs if rules.batch is None else None)
            self.waits.window = 0 if rules.window == "auto" else rules.window

    @property
    def too_few(self) -> bool:
        """True if a batch that ended after the last admitted sample would have fewer samples than ``min_samples``."""
        batch = self._rules.batch
        return batch is not None and batch.samples is None and self.queued_samples < batch.min_samples

    @property
    def in_group(self) -> bool:
        """True if the last admitted sample belongs to an incomplete group."""
        last = self._arrived[-1][0] if self._arrived else self._handles
        return bool(self._table.keep[last[-1:]].any())

    @property
    def finished(self) -> bool:
        """True if the ``Former`` is closed, and every sample is in a step or dropped."""
        return self.closed and not self.num_samples and not self._pending

    def held(self) -> I64:
        """Return the handles of all samples that are not in a step yet, dropped ones included, int64 [n]."""
        waiting = [self._handles, *(handles for handles, _ in self._arrived)]
        return np.concatenate([*waiting, self._pending.handles, self.dropped])

    def admit(self, handles: I64, lengths: I64) -> None:
        """Add samples that follow in merge order; ``handles`` and ``lengths`` (``own_lengths``) int64 [n]."""
        if len(handles):
            self._arrived.append((handles, lengths))
            self.num_samples += len(handles)
            self.queued_tokens += int(lengths.sum())
            self.queued_samples += self._num_whole(handles)

    def request(self, max_steps: int = 1) -> Request | None:
        """Return the packer's next request, for up to ``max_steps`` steps; None if it could form no new pack now."""
        if not self.num_samples or (self.lacks_samples and not self.closed):
            return None
        self._gather()
        rules, self._asked_of = self._rules, self.num_samples
        size, count, closed, window = len(self._sizes), 0, self.closed, self.window
        if rules.batch is not None:
            if not (samples := self._batch_size()):
                return None
            size = int(np.searchsorted(np.cumsum(self._sizes), samples)) + 1
            count, closed, window = size, True, size
        else:
            even = rules.warmup is None and rules.packs_ramp is None and rules.window != "auto"
            self.waits.window = max(self.waits.window, window)
            packs = (max_steps if even else 1) * rules.packs_at(self.next_step)
            count = self._asked_count = max(packs - len(self._pending), 1)
        budget = rules.budget_at(self.next_step) // rules.align.sample
        lengths = self._lengths[:size] if rules.warmup is None else np.minimum(self._lengths[:size], budget)
        sizes = self._sizes[:size] if len(self._sizes) < len(self._handles) else None
        return Request(
            self._packer, lengths, self._ages[:size], budget, count, closed, window, sizes,
            Extra(self._limited(size), self._work(size)),
        )  # fmt: skip

    def _limited(self, size: int) -> Limited | None:
        """Return what the first ``size`` items have of each unit that the rules limit; None without limits or items."""
        sizes = self._sizes[:size]
        return self._limits_of(self._rules, self._handles[: sizes.sum()], sizes)

    def _limits_of(self, rules: Rules, handles: I64, sizes: I64) -> Limited | None:
        """Return what items of ``sizes`` samples have of each unit that ``rules`` limit; None without limits or items.

        ``handles``: handles of the items' samples, int64 [n].
        """
        limits, table = rules.limits, self._table
        if limits is None or not len(sizes):
            return None
        columns = [(table.patches, limits.patches), (table.items, limits.items)]
        units = [(column, most) for column, most in columns if most is not None]
        counts = [_sums(column, handles, sizes) for column, _ in units]
        return Limited(np.stack(counts), np.array([most for _, most in units], np.int64)) if units else None

    def _work(self, size: int) -> I64 | None:
        """Return the work of the first ``size`` items beside that of their tokens; None if FORM need not know it."""
        rules = self._rules
        if not rules.forms_by_media:
            return None
        sizes = self._sizes[:size]
        return rules.media_work(_sums(self._table.extra_cost, self._handles[: sizes.sum()], sizes))

    def apply(self, choice: Choice) -> list[PlannedStep]:
        """Move the samples that the packer chose for the last ``request`` into packs; return the completed steps.

        Raises InternalError if the ``Former`` does not have a chosen item.
        """
        num_held = len(self._handles)
        taken, waited = np.empty(num_held, np.int64), np.empty(len(choice.indices), np.int64)
        bounds = np.empty(len(choice.bounds), np.int64)
        items, samples, seen = take_out(
            choice.indices, choice.bounds, choice.ages, self.next_step, self._handles, self._sizes, self._lengths,
            self._ages, self._since, taken, bounds, waited,
        )  # fmt: skip
        if items < 0:
            raise InternalError(
                f"got a choice with unknown or repeated items, expected each of the {len(self._sizes)} items held at "
                f"most once"
            )
        self._handles, self._sizes, self._lengths = self._handles[:samples], self._sizes[:items], self._lengths[:items]
        self._ages, self._since = self._ages[:items], self._since[:items]
        taken = taken[: num_held - samples]
        packs = self._make_packs(taken, bounds)
        self.num_samples -= len(taken)
        self.queued_tokens -= int(packs.tokens.sum())
        self.queued_samples -= self._num_whole(taken)
        if self._rules.batch is not None:
            return [self._make_step(packs)]
        self.waits.chosen(waited, seen)
        self._pending = PlannedPacks.joined([self._pending, packs])
        self._asked_held = self._asked_of - len(taken) if len(packs) < self._asked_count else -1
        self.begun = self.begun or len(packs) > 0
        return self.cut()

    def complete(self) -> list[PlannedStep]:
        """Return the next steps if the packers have chosen all of their packs already; see ``one_by_one``."""
        return self.cut() if self._pending and len(self._pending) >= self._rules.packs_at(self.next_step) else []

    def cut(self) -> list[PlannedStep]:
        """Return the complete steps that the pending packs make; once closed, handle the tail by ``Rules.tail``."""
        if self._rules.batch is not None:
            self._drop_tail()
            return []
        steps = []
        while len(self._pending) >= (size := self._rules.packs_at(self.next_step)):
            packs, self._pending = self._pending.cut(size)
            steps.append(self._make_step(packs))
            if self.one_by_one:
                return steps
        if self.closed and not self.num_samples and self._pending:
            tail, self._pending = self._pending, PlannedPacks.empty()
            if self._rules.tail == "drop":
                self.dropped = np.concatenate([self.dropped, tail.handles])
            else:
                steps.append(self._make_step(PlannedPacks.joined([tail, PlannedPacks.empty(size - len(tail))])))
        return steps

    @property
    def longest_wait(self) -> int:
        """The most steps that a sample has waited in the window."""
        return self.waits.longest(self.next_step, self._since)

    @property
    def oldest_age(self) -> int:
        """Steps that the oldest sample in the window has waited since this broker first saw it."""
        seen = self._since[self._since >= 0]
        return self.next_step - int(seen.min(initial=self.next_step))

    @property
    def num_outliers(self) -> int | None:
        """Number of outliers in the window, which wait for similar samples; None if the packer does not know them."""
        seen, work = self._ages >= 0, self._work(len(self._ages))
        budget = self._rules.budget // self._rules.align.sample
        return self._packer.num_outliers(self._lengths[seen], budget, Extra(work=None if work is None else work[seen]))

    def state(self) -> FormState:
        """Return the state that, with the samples to come, decides all later steps; not between request and apply."""
        self._gather()
        pending = self._pending
        window = np.concatenate([self._handles, *(handles for handles, _ in self._arrived)])
        ages = np.full(len(window), -1, np.int64)
        ages[: len(self._handles)] = np.repeat(self._ages, self._sizes)
        rows, held_handles = self._table.rows, np.concatenate([window, pending.handles])
        return FormState(
            self.next_step, self.chain, self.closed, rows(window).tobytes(), ages.tolist(),
            rows(pending.handles).tobytes(), pending.counts.tolist(),
            tuple(self._recent) or UNSET, self._reach if self.strict else UNSET, **self._table.extras(held_handles),
        )  # fmt: skip

    def load(self, state: FormState) -> None:
        """Restore a state in an empty ``Former`` of the same rules; add the state's samples to the table."""
        self.next_step, self.chain, self.closed = state.next_step, state.chain, state.closed
        self._recent.extend(state.recent or ())
        self._reach = state.reach or 0
        rows = np.concatenate([np.frombuffer(rows_bytes, ROW) for rows_bytes in (state.window, state.pending)])
        extras = {name: getattr(state, name) for name in EXTRAS}
        handles, pending = np.split(self._table.enter(rows, **extras), [len(state.ages)])
        self.admit(handles, self._table.own_lengths(handles))
        self._gather()
        self._ages = np.array(state.ages, np.int64)[np.cumsum(self._sizes) - self._sizes]
        self._since = np.where(self._ages >= 0, self.next_step, UNSEEN)  # statistics begin with this broker
        self._pending = self._make_packs(pending, np.concatenate([[0], np.cumsum(state.counts)]).astype(np.int64))

    def _batch_size(self) -> int:
        """Return the number of handles in the next batch, including pieces of samples; 0 for an incomplete batch."""
        batch, count = self._rules.batch, len(self._handles)
        if batch is None or batch.samples is None:
            return count if self.closed else 0
        if self.queued_samples >= batch.samples:
            begins = self._table.part[self._handles] == 0
            ends = (self._table.keep[self._handles] == 0) & np.append(begins[1:], True)
            last = np.flatnonzero(ends & (np.cumsum(begins) >= batch.samples))
            if len(last):
                return int(last[0]) + 1
        return count if self.closed and self._rules.tail == "pad" else 0

    def _drop_tail(self) -> None:
        """Once closed, drop the remaining samples that do not fill a batch, if the rules have ``tail: drop``."""
        self._gather()
        if self.closed and self.num_samples and not self._batch_size():
            self.dropped = np.concatenate([self.dropped, self._handles])
            self._handles, self._sizes = self._handles[:0], self._sizes[:0]
            self._lengths, self._ages, self._since = self._lengths[:0], self._ages[:0], self._since[:0]
            self.num_samples = self.queued_tokens = self.queued_samples = 0

    def _num_whole(self, handles: I64) -> int:
        """Return the number of samples, counting a split sample once; 0 unless in batch mode."""
        return 0 if self._rules.batch is None else int(np.count_nonzero(self._table.part[handles] == 0))

    def _gather(self) -> None:
        """Group the admitted samples into items; samples of an incomplete group stay in ``_arrived``."""
        if not self._arrived:
            return
        rules, align = self._rules, self._rules.align.sample
        handles = np.concatenate([handles for handles, _ in self._arrived])
        lengths = np.concatenate([lengths for _, lengths in self._arrived])
        self._arrived = []
        keeps = self._table.keep[handles]
        units = lengths if align == 1 else -(-lengths // align)
        sizes = np.ones(len(handles), np.int64)
        if keeps.any():
            whole = len(handles) if self.closed else num_whole(keeps)
            self._arrived = [(handles[whole:], lengths[whole:])] if whole < len(handles) else []
            handles, units = handles[:whole], units[:whole]
            sizes = item_sizes(keeps[:whole], units, rules.budget // align, rules.max_samples_per_pack)
            ends = np.cumsum(sizes)
            last = handles[ends - 1]
            self._table.keep[last[self._table.keep[last] == PACK]] = 0  # a group that was torn apart ends here
            torn = cut_off(self._table, handles[ends - sizes])  # ... and shares nothing
            units[ends - sizes] += torn
            self.queued_tokens += int(torn.sum())
            units = np.diff(np.concatenate([[0], np.cumsum(units)])[np.concatenate([[0], ends])])
        self._handles = np.concatenate([self._handles, handles])
        self._sizes = np.concatenate([self._sizes, sizes])
        self._lengths = np.concatenate([self._lengths, units])
        unseen = np.full(len(sizes), UNSEEN, np.int64)
        self._ages, self._since = np.concatenate([self._ages, unseen]), np.concatenate([self._since, unseen])

    def _make_packs(self, handles: I64, bounds: I64) -> PlannedPacks:
        """Return packs with their sums and digests; pack i holds ``handles[bounds[i]:bounds[i + 1]]``."""
        if len(bounds) == 1:
            return PlannedPacks.empty()
        table, rules = self._table, self._rules
        sums, identities = np.empty((4, len(bounds) - 1), np.int64), np.empty((len(handles), 6), np.uint32)
        extras = rules.balance.extras_of(partial(table.column_or_0, handles=handles))
        depths, costs = (_NONE if isinstance(column, int) else column for column in extras)
        describe(
            handles, bounds, table.stream, table.index, table.part, table.length, table.loss_tokens, table.crc,
            depths, costs, rules.align.sample, *rules.balance.factors, *rules.balance.window_factors,
            sums, identities,
        )  # fmt: skip
        digests = digests_of(identities.view(np.uint8).reshape(-1).data, bounds, table.extra("shares", handles))
        return PlannedPacks(handles, bounds, sums, digests)

    def _make_step(self, packs: PlannedPacks) -> PlannedStep:
        """Return the next step, made of these packs; advance the step number and the chain digest."""
        loss, samples = int(packs.loss_tokens.sum()), len(packs.handles)
        digest = step_digest(self.next_step, loss, samples, packs.digests)
        self.chain = chain_digest(self.chain, digest)
        step = PlannedStep(self.next_step, packs, loss, samples, digest, self.chain, self._rules, self.stage)
        if self.strict or self._rules.window == "auto":
            items = self._num_items(packs)
            if self._rules.batch is None:
                self._reach = max(self._reach, self._natural_reach + items) - items
            self._recent.append(items)
        self.next_step += 1
        self.begun = False
        return step

    def hold_reach(self) -> None:
        """Let the samples admitted so far be those that ``may_admit`` allows for the next step.

        Earlier samples do not matter then, because a feed that is replayed may not have bounded them.
        """
        self._gather()
        if self._rules.window != "auto":
            self._recent.clear()
        self._reach = len(self._sizes) + self._num_items(self._pending)


def _units(lengths: I64, sizes: I64, align: int) -> I64:
    """Return the length of each item in units of ``align`` tokens, int64 [items]: of ``sizes`` samples each."""
    if not len(sizes):
        return _NONE
    units: I64 = np.add.reduceat(-(-lengths // align), np.cumsum(sizes) - sizes)
    return units


def _sums(column: NDArray[np.integer[Any]], handles: I64, sizes: I64) -> I64:
    """Return the sums of a table's ``column`` over ``handles``, by items of ``sizes`` samples, int64 [items]."""
    sums: I64 = np.add.reduceat(column[handles], np.cumsum(sizes) - sizes, dtype=np.int64)
    return sums


def warm_up(rules: Rules) -> None:
    """Compile the kernels of FORM and the packer, or load them from the disk, by forming a made-up step."""
    table = SampleTable(64)
    handles, lengths = table.take(64), np.full(64, max(rules.budget // 8, 1), np.int64)
    table.length[handles] = lengths
    former = Former(msgspec.structs.replace(rules, tail="pad"), table)
    former.admit(handles, lengths)
    former.closed = True
    while (request := former.request()) is not None:
        former.apply(request.choose())
