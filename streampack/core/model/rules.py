"""The rules: the planning settings that a run records. FORM and DEAL depend only on the rules and the samples.

Two runs with equal rules and equal samples have equal steps, whatever machines, processes and meshes they run on. The
``digest`` identifies rules; a trainer may require a certain one.
"""

from __future__ import annotations

import hashlib
from math import gcd
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from streampack.core.model.fields import OF_MEDIA, OF_ROWS, OF_TREES, Field, check_fields
from streampack.core.model.keys.planning_keys import (
    MAX_WINDOW,
    PACKER_KEYS,
    Balance,
    BatchKeys,
    PlanningKeys,
    Positive,
    RunKeys,
    Warmup,
    Window,
)
from streampack.core.model.keys.planning_keys import Align as Align
from streampack.core.model.keys.stage_keys import Stage, WeightsRamp
from streampack.core.model.keys.stream_keys import SamplePolicies, StreamKeys
from streampack.core.model.samples import I64
from streampack.core.model.shapes import check_shape, own_widths, step_widths, width_unit
from streampack.core.packers.joint.joint_bounds import MAX_BUDGET, MAX_MEDIA
from streampack.core.packers.packer import Packer
from streampack.core.packers.registry import LIMITED_PACKERS, make_packer, parameters_of

MAX_WEIGHT_RATIO = 4096
"""The greatest ratio of two streams' weights; it keeps the merge's clocks inside 64 bits."""
LATE_TIMEOUT_S = 3600
"""Seconds that a sample waits for its late fields by default."""


class Batch(BatchKeys, frozen=True, omit_defaults=True):
    """Rules of a feed whose step is one batch of samples, packed by itself.

    The number of packs in a step depends on its samples. DEAL splits packs so that every rank of a mesh gets the same
    number. If ``samples`` is None, a batch ends at the marks of ``end_of_batch``. Samples count in merge order, and the
    pieces of a split sample count once.
    """

    def __post_init__(self) -> None:
        if self.samples is not None and self.min_samples > 1:
            raise ValueError(
                f"got `min_samples: {self.min_samples}` with `samples: {self.samples}`, expected only one of these "
                f"keys. `min_samples` is for batches that end_of_batch closes"
            )


class StreamRules(
    StreamKeys, SamplePolicies, frozen=True, omit_defaults=True,
    listed="name weight partitions passes overlong poison on_exhaust pushed no_loss_tokens paused",
):  # fmt: skip
    """Rules of one stream: its keys, with the policies that apply to it.

    Attributes:
        name: Name of the stream.
        weight: The stream's share of the feed, in ``Rules.weight_unit``; 0 for a removed stream.
        partitions: Number of its partitions.
        passes: Number of passes over the stream's data; None for no limit.
        paused: The stream gives no samples now, and does not hold the end of the feed open.
    """

    name: str
    weight: float = 1.0
    partitions: int = 4
    passes: int | None = 1
    paused: bool = False

    @property
    def gives(self) -> bool:
        """True if the stream is neither removed nor paused."""
        return bool(self.weight) and not self.paused


class Rules(
    PlanningKeys, RunKeys, frozen=True, kw_only=True, omit_defaults=True,
    listed="budget packs window in_turn batch warmup packer max_samples_per_pack leftovers micro_batch_size padded "
    "align shape balance tail weight_unit merge between_passes max_policy_lag paces seed late_timeout_s share tokens "
    "fields",
):  # fmt: skip
    """The rules of one feed. Raises ValueError for rules that do not go together.

    Attributes:
        packs: Packs in a step; not used with ``batch``.
        window: Number of samples from which a packer chooses; ``auto``: see ``form.auto_window``. With ``batch``, the
            packer chooses from one batch.
        in_turn: Samples as long as the budget leave in their turn, and the end of a feed leaves in order of age. False
            in logs of versions that did not have it.
        batch: Rules of a step that is one batch of samples; None if a step is a fixed number of packs.
        align: Multiples to which samples and packs are padded.
        max_policy_lag: The most versions by which a pushed sample's policy may be older than that of an earlier chunk.
            Older samples are counted and dropped.
        paces: Instead of dropping old samples, make sure that there are none: see ``core.staging.tickets``.
        late_timeout_s: Seconds that a sample waits for its late fields; None for ``LATE_TIMEOUT_S``.
        fields: Fields that samples carry beside token ids, with values for each token or each sample.
        media_fields: Fields with values for the samples' media, of axis ``item`` or ``patch``.
        streams: Streams, in the order of their numbers.
        packs_ramp: Growth of the packs of a step. Every value is a multiple of what its first and last value have in
            common, so that the meshes of both suit all.
        weights_ramp: Change of the weights from one step to the next.
        stages: The stages that follow; empty in rules that a stage has changed.
    """

    # msgspec leaves out a value that is the very object of the default. Records have had the budget and the balance of
    # broker.yaml also where these equal the defaults, and digests depend on it. So the defaults are declared again.
    budget: Positive = 8192
    balance: Balance = Balance()
    packs: Positive = 64
    window: Window = MAX_WINDOW
    in_turn: bool = False
    batch: Batch | None = None
    align: Align = Align()
    max_policy_lag: Annotated[int, Meta(ge=0, lt=2**62)] | None = None
    paces: bool = False
    late_timeout_s: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    fields: tuple[Field, ...] = ()
    media_fields: tuple[Field, ...] = ()
    streams: tuple[StreamRules, ...] = ()
    packs_ramp: Warmup | None = None
    weights_ramp: WeightsRamp | None = None
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        if self.budget % self.align.pack:
            raise ValueError(
                f"got budget {self.budget}, expected a multiple of align.pack, {self.align.pack}. "
                f"Use {self.budget // self.align.pack * self.align.pack or self.align.pack}"
            )
        if self.align.pack % self.align.sample:
            raise ValueError(
                f"got align.pack {self.align.pack}, expected a multiple of align.sample, {self.align.sample}"
            )
        check_shape(self.shape, self.budget, self.align.pack)
        if self.warmup is not None and not self.align.pack <= self.warmup.init <= self.budget:
            raise ValueError(
                f"got warmup.init {self.warmup.init}, expected {self.align.pack} (align.pack) to {self.budget} "
                f"(the budget)"
            )
        if self.batch is not None and self.batch.samples is None and self.tail == "drop":
            raise ValueError(
                "got `tail: drop` with `end_of_batch`, expected `tail: pad`. With `end_of_batch` every step is a "
                "complete batch, so no incomplete last step can be dropped"
            )
        if self.padded:
            self._check_padded()
        if self.batch is not None and self.balance.kind == "joint":
            raise ValueError(
                "got `balance.kind: joint` with batches, expected `deal` or `none`. With `deal`, the packs of a batch "
                "are balanced by cost"
            )
        check_fields(self.all_fields)
        self._check_media()
        if self.paces and (self.max_policy_lag is None or self.batch is None or self.batch.samples is None):
            raise ValueError(
                "got `on_exceed: wait` without `max_policy_lag` or `step: {samples: N}`, expected both keys, because "
                "together they bound the number of samples that may be generated ahead"
            )
        if self.share is not None:
            self._check_share()
        if self.balance.kind == "joint":
            self._check_joint()
        units, chosen = self.budget // self.align.sample, self.new_packer()
        if chosen.max_budget is not None and units >= chosen.max_budget:
            key = chosen.config_key
            raise ValueError(
                f"got a budget of {units} times align.sample, expected less than {chosen.max_budget} times with "
                f"`{key}: {chosen.name}`. Use a smaller budget, or set "
                f"`{key}: {'sliding_ffd' if key == 'packer' else 'deal'}`"
            )

    def _check_padded(self) -> None:
        """Raise ValueError if ``padded`` is combined with rules that only apply to packs."""
        if self.batch is None:
            raise ValueError(
                "got `padded: true` without batches, expected `step: {samples: N}` or `step: {end_of_batch: true}`, "
                "because padded micro-batches are made from a batch"
            )
        default = Rules()
        rows: dict[str, object] = {"packer": "none", "micro_batch_size": 1, "shape": "exact"}
        for key in ("packer", *PACKER_KEYS, "window", "shape", "balance", "warmup"):
            got, expected = getattr(self, key), rows.get(key, getattr(default, key))
            if got != expected:
                raise ValueError(
                    f"got `{key}: {_text(got)}` with `padded: true`, expected no `{key}` key, because padded "
                    f"micro-batches are not packed"
                )
        for field in self.fields:
            if field.name in OF_ROWS:
                raise ValueError(
                    f"got the field {field.name} with `padded: true`, expected another name, because padded "
                    f"micro-batches have their own attribute with this name"
                )

    def _check_media(self) -> None:
        """Raise ValueError if rules for media do not go together, or not with the other rules."""
        if any(field.of_media for field in self.fields) or not all(field.of_media for field in self.media_fields):
            raise ValueError("got fields of axis item or patch among the other fields, expected them in media_fields")
        if not self.media_fields:
            for key, value in (("limits", self.limits), ("balance.patches", self.balance.patches)):
                if value is not None:
                    raise ValueError(
                        f"got `{key}` without fields of axis item or patch, expected such a field, because samples "
                        f"have no media without it"
                    )
            return
        for field in self.all_fields:
            if field.name in OF_MEDIA:
                raise ValueError(
                    f"got the field {field.name} beside fields of axis item or patch, expected another name, because "
                    f"packs have their own value with this name then"
                )
        for key, setting in (
            ("share: prefix", self.share is not None),
            ("padded: true", self.padded),
        ):
            if setting:
                raise ValueError(f"got `{key}` with fields of axis item or patch, which do not go together yet")
        if self.limits is not None and self.packer not in LIMITED_PACKERS:
            raise ValueError(
                f"got `limits` with `packer: {self.packer}`, expected `packer: {' or '.join(LIMITED_PACKERS)}`, which "
                f"alone keeps limits for media"
            )

    def _check_share(self) -> None:
        """Raise ValueError if ``share`` is combined with rules that cannot have trees."""
        if self.padded or self.packer == "none":
            raise ValueError(
                "got `share: prefix` without packing, expected a packer, because samples share tokens in one pack"
            )
        if self.align.sample != 1:
            raise ValueError(
                f"got `share: prefix` with `align.sample: {self.align.sample}`, expected 1, because the samples of a "
                f"tree follow each other without padding. Use `align.pack` if kernels need a multiple"
            )
        for field in self.fields:
            if field.name in OF_TREES:
                raise ValueError(
                    f"got the field {field.name} with `share: prefix`, expected another name, because packs have their "
                    f"own attribute with this name then"
                )
            if field.late and (field.axis, field.align) == ("token", "token"):
                raise ValueError(
                    f"got the field {field.name} with `late: true` and `share: prefix`, expected `align: target` or "
                    f"`axis: sample`, because shared tokens have the same values in each sample"
                )
        if self.balance.kind == "joint":
            raise ValueError(
                "got `share: prefix` with `balance.kind: joint`, expected `deal` or `none`, because joint does not "
                "know the cost of shared tokens"
            )

    def _check_joint(self) -> None:
        """Raise ValueError if kind ``joint`` is combined with another packer, or a step does not hold whole groups."""
        if self.packer != "exact_fill":
            raise ValueError(
                f"got `balance.kind: joint` with `packer: {self.packer}`, expected `packer: exact_fill`, because "
                f"joint uses the method of exact_fill"
            )
        if self.balance.group is None or self.packs_unit % self.balance.group:
            raise ValueError(
                f"got `balance.group: {self.balance.group}` with {self.packs} packs per step, expected a divisor of "
                f"{self.packs_unit}. The default of `balance.group` is planned_mesh.dp"
            )

    def new_packer(self) -> Packer:
        """Return the packer with its parameters. Raises ValueError for a parameter that the packer does not have."""
        joint = self.balance.kind == "joint"
        name = "joint" if joint else self.packer
        has = parameters_of(name)
        values = {key: value for key in PACKER_KEYS if (value := getattr(self, key)) is not None}
        for unknown in sorted(values.keys() - set(has)):
            names = ", ".join(key for key in PACKER_KEYS if key in has) or "none"
            raise ValueError(
                f"got `{unknown}: {values[unknown]}` with `{'balance.kind' if joint else 'packer'}: {name}`, expected "
                f"only these keys: {names}"
            )
        own: dict[str, Any] = {"seed": self.seed, "in_turn": self.in_turn}
        own = {key: value for key, value in own.items() if key in has}
        own |= {"group": self.balance.group, "patience": self.balance.patience} if joint else {}
        return make_packer(name, **values, **own)

    @property
    def max_window(self) -> int:
        """The most samples in the window, unless they have fewer tokens than two packs."""
        return MAX_WINDOW if self.window == "auto" else self.window

    def budget_at(self, step: int) -> int:
        """Return the budget of ``step`` in tokens; during ``warmup`` it is lower, a multiple of ``align.pack``."""
        return self.budget if self.warmup is None else self.warmup.at(step, self.budget, self.align.pack)

    def packs_at(self, step: int) -> int:
        """Return the number of packs of ``step``, which grows with ``packs_ramp``."""
        return self.packs if self.packs_ramp is None else self.packs_ramp.at(step, self.packs, self.packs_unit)

    @property
    def packs_unit(self) -> int:
        """The packs of every step are a multiple of this number."""
        return self.packs if self.packs_ramp is None else gcd(self.packs_ramp.init, self.packs)

    @property
    def most_packs(self) -> int:
        """The most packs of a step."""
        return self.packs if self.packs_ramp is None else max(self.packs, self.packs_ramp.init)

    def packs_unit_from(self, step: int) -> int:
        """Return a number that divides the packs of ``step`` and of each later step."""
        return self.packs if self.packs_at(step) == self.packs else self.packs_unit

    def shares_at(self, step: int) -> tuple[float, ...]:
        """Return the weight of each stream that the merge uses at ``step``; 0 for streams that give nothing.

        While the weights change evenly, these are shares. A stream that comes or goes has at least the smallest share
        that the merge allows.
        """
        weights = tuple(stream.weight if stream.gives else 0.0 for stream in self.streams)
        ramp = self.weights_ramp
        if ramp is None or (done := step - ramp.begin + 1) >= ramp.steps:
            return weights
        total = sum(weights)
        before = (*ramp.shares, *(0.0 for _ in weights[len(ramp.shares) :]))
        now = [
            old + (new / total - old) * max(done, 0) / ramp.steps if stream.weight else 0.0
            for stream, old, new in zip(self.streams, before, weights, strict=True)
        ]
        least = max(now) / (MAX_WEIGHT_RATIO / 2)
        return tuple(max(share, least) if share or weight else 0.0 for share, weight in zip(now, weights, strict=True))

    def own_widths(self, slots: I64) -> I64:
        """Return each pack's own length T in tokens, int64 [packs]: see ``shapes.own_widths``.

        ``slots`` int64 [packs] are the aligned tokens of each pack's samples.
        """
        return own_widths(slots, self.shape, self.budget, self.align.pack)

    def step_widths(self, slots: I64, pp: int) -> I64:
        """Return the lengths T of a step's packs on a mesh with ``pp`` stages, in tokens, int64 [packs].

        ``slots`` int64 [packs] are the aligned tokens of each pack's samples.
        """
        return step_widths(slots, self.shape, self.budget, self.align.pack, pp)

    @property
    def forms_by_media(self) -> bool:
        """True if FORM needs the cost of media: with kind ``joint``, if media cost something."""
        return self.balance.kind == "joint" and bool(self.media_fields) and any(self.balance.media_factors)

    def media_work(self, costs: I64) -> I64:
        """Return the work of media that have these ``costs``, int64 [n], as ``joint`` counts it.

        The unit is the cost of a pair of tokens, in units of ``align.sample``. Full packs have equal costs in tokens,
        so the factor a has no influence. If pairs cost nothing, samples of equal media are told apart by length: the
        square of the budget counts 1/64 of its tokens' cost.
        """
        a, b = self.balance.factors
        align = self.align.sample
        pair = b * align * align or max(a, 1) * align * align / (64 * self.budget)
        return np.minimum(costs / pair, float(MAX_BUDGET * MAX_MEDIA)).astype(np.int64)

    @property
    def width_unit(self) -> int:
        """The length T of every pack is a multiple of this number of tokens."""
        return width_unit(self.shape, self.budget, self.align.pack)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token with all fields of axis ``token``."""
        return np.dtype(self.tokens).itemsize + sum(f.value_bytes for f in self.fields if f.axis == "token")

    @property
    def all_fields(self) -> tuple[Field, ...]:
        """All fields: those with values for tokens and samples, then those of media."""
        return (*self.fields, *self.media_fields)

    @property
    def has_extra_bytes(self) -> bool:
        """True if samples may have media, whose bytes come on top of those of their tokens."""
        return bool(self.media_fields)

    def without_media(self) -> Rules:
        """Return these rules without fields, limits and costs of media."""
        balance = msgspec.structs.replace(self.balance, patches=None, items=None)
        return msgspec.structs.replace(self, media_fields=(), limits=None, balance=balance)

    @property
    def late_fields(self) -> tuple[Field, ...]:
        """Fields whose values come after their sample."""
        return tuple(field for field in self.fields if field.late)

    @property
    def finite(self) -> bool:
        """True if the feed has a last step and can be iterated again.

        This holds if no stream is pushed (pushed samples are read once), and every stream ends or one stops the others.
        """
        if any(stream.pushed for stream in self.streams):
            return False
        stops = any(stream.on_exhaust == "stop" for stream in self.streams)
        return stops or all(stream.passes is not None for stream in self.streams)

    @property
    def digest(self) -> str:
        """32 hex digits that identify these rules: blake2b over their canonical JSON.

        Defaults are left out, so the digests of recorded runs stay valid when a later version adds a rule.
        """
        text = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(text, digest_size=16).hexdigest()


def _text(value: object) -> str:
    """Return the value of a rule as text for an error message; a Struct as JSON."""
    return msgspec.json.encode(value).decode() if isinstance(value, Struct) else str(value)


class RulesChange(Struct, frozen=True, kw_only=True):
    """New rules for all samples that a feed merges after its first ``position`` samples.

    The change takes effect from ``step`` on, except for the samples in the window at that step.

    Attributes:
        step: The step.
        position: Samples merged before; -1 in records of versions before 0.2 until the step was reached.
        rules: The new rules.
        note: Description of the change.
        id: Number of the ``Scheduled`` change.
        merged: Samples of each partition that were merged before; UNSET in older records.
        name: Name of the stage, if the change is one that has a name.
    """

    step: int
    position: int
    rules: Rules
    note: str = ""
    id: int | UnsetType = UNSET
    merged: list[int] | UnsetType = UNSET
    name: str | UnsetType = UNSET


def as_recorded(rules: Rules, recorded: Rules) -> Rules:
    """Return ``rules`` with the order of samples of an earlier version, if the log ``recorded`` it.

    Logs of earlier versions name neither an automatic window nor ``in_turn``.
    """
    if rules.window == "auto" and recorded.window == MAX_WINDOW and not recorded.in_turn:
        rules = msgspec.structs.replace(rules, window=recorded.window)  # the digest depends on this very object
    return msgspec.structs.replace(rules, in_turn=rules.in_turn and recorded.in_turn)


def first_difference(got: Rules, expected: Rules) -> str:
    """Return a text with the first rule that differs and both values; empty if the rules are equal."""
    return _find_difference(
        msgspec.to_builtins(_with_all_keys(got)), msgspec.to_builtins(_with_all_keys(expected)), "rules"
    )


def _with_all_keys(value: object) -> object:
    """Return ``value`` with every Struct as a dict that has all keys, also those with default values or UNSET."""
    if isinstance(value, Struct):
        return {name: _with_all_keys(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_with_all_keys(item) for item in value]
    return "left out" if value is UNSET else value


def _find_difference(got: object, expected: object, path: str) -> str:
    """Return a text with the first difference in nested dicts and lists; ``path`` is their place in the rules."""
    if isinstance(got, dict) and isinstance(expected, dict) and got.keys() == expected.keys():
        differences = (_find_difference(got[key], expected[key], f"{path}.{key}") for key in got)
        return next(filter(None, differences), "")
    if isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        names = [item.get("name", at) if isinstance(item, dict) else at for at, item in enumerate(expected)]
        triples = zip(got, expected, names, strict=True)
        return next(filter(None, (_find_difference(one, other, f"{path}.{name}") for one, other, name in triples)), "")
    if got == expected:
        return ""
    return f"{path}: got {_short(got)}, expected {_short(expected)}"


def _short(value: object) -> str:
    """Return a short text of ``value``: names for a list of named things, else up to 80 characters."""
    if isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value):
        return ", ".join(str(item["name"]) for item in value) or "none"
    return str(value)[:80]
