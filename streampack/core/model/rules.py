"""The planning constants that a run records: what FORM and DEAL depend on beside the samples.

Two runs with equal rules and equal samples have equal steps, whatever machines, processes and
meshes they run on. ``digest`` names them; a trainer may insist on one.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from streampack.core.model.fields import OF_ROWS, Field, check_fields
from streampack.core.model.samples import I64
from streampack.core.model.shapes import Shape, check_shape, own_widths, step_widths, width_unit
from streampack.core.packers.blocks.modified_first_fit import Leftovers
from streampack.core.packers.joint.joint_bounds import PATIENCE
from streampack.core.packers.packer import Packer
from streampack.core.packers.registry import PackerName, make_packer, parameters_of

Positive = Annotated[int, Meta(ge=1, lt=2**62)]
"""A count, as large as every message, record and kernel can hold."""
Overlong = Literal["error", "drop", "truncate", "split"]
Poison = Literal["error", "drop"]
WeightUnit = Literal["tokens", "samples"]
OnExhaust = Literal["renormalise", "stop"]
BetweenPasses = Literal["continue", "drain"]
TokenType = Literal["uint16", "int32"]
MergeOrder = Literal["schedule", "arrival"]
MAX_WEIGHT_RATIO = 4096
"""Between the heaviest and the lightest stream: keeps the merge's clocks inside 64 bits."""
MicroBatchOrder = Literal["packer", "largest_first", "small_at_edges"]
PACKER_KEYS = ("max_samples_per_pack", "leftovers", "micro_batch_size")
"""Rules that are parameters of packers; None: as the packer has it."""


class Align(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Multiples, in tokens, to which samples and packs are padded.

    With ``cp`` context-parallel ranks (zigzag) both must be multiples of 2 * cp.
    """

    sample: Positive = 1
    pack: Positive = 1


class Balance(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How packs are matched over ranks: by cost a*s + b*s*s of each sample of s padded tokens.

    The default is the cost of a transformer layer of hidden size 4096; ``hidden_size`` h gives
    a = 6 * h, b = 1. ``none`` deals packs in order. ``joint`` forms ``group`` packs at a time that cost the same
    (``packers.joint``), before they are dealt: as many as there are data-parallel ranks, best, though FORM reads
    this number and never the mesh; what is too long for its group waits for about ``patience`` groups. ``order`` is
    that of each rank's micro-batches: as the packs were formed (``packer``; so with ``none``), the dearest first
    (``largest_first``; so with the others), or in the middle (``small_at_edges``), where a pipeline is full.
    """

    kind: Annotated[
        Literal["none", "deal", "joint"],
        Meta(
            description="packs go to ranks by cost (deal) or in order (none); joint forms them in groups of equal cost"
        ),
    ] = "deal"
    order: Annotated[
        MicroBatchOrder | None,
        Meta(description="order of each rank's micro-batches: most expensive first, in the middle, or as packed"),
    ] = None
    hidden_size: Annotated[
        Annotated[int, Meta(ge=1, lt=2**24)] | None,
        Meta(description="hidden size of the model: sets a = 6 * hidden_size and b = 1"),
    ] = None
    a: Annotated[int, Meta(ge=0, lt=2**32, description="a sample of s tokens costs a * s + b * s * s")] = 24576
    b: Annotated[int, Meta(ge=0, lt=2**12, description="see a")] = 1
    group: Annotated[
        Annotated[int, Meta(ge=1, le=2**16)] | None,
        Meta(description="kind joint: number of packs formed together; divides the packs of a step"),
    ] = None
    patience: Annotated[
        int,
        Meta(
            ge=1,
            le=2**20,
            description="kind joint: number of groups, about, that a sample too long for its group waits",
        ),
    ] = PATIENCE

    def __post_init__(self) -> None:
        given = f"group: {self.group}" if self.group is not None else f"patience: {self.patience}"
        if self.kind != "joint" and (self.group is not None or self.patience != PATIENCE):
            raise ValueError(f"got {given} with kind: {self.kind}, expected it with kind: joint alone")

    def planned(self, dp: int) -> Balance:
        """With what follows from the ranks that a run is planned for: packs of a group, where none are given."""
        return msgspec.structs.replace(self, group=dp) if self.kind == "joint" and self.group is None else self

    @property
    def factors(self) -> tuple[int, int]:
        """A and b."""
        return (6 * self.hidden_size, 1) if self.hidden_size else (self.a, self.b)

    def costs(self, slots: I64) -> I64:
        """Work of samples of ``slots`` padded tokens, int64 [n]."""
        a, b = self.factors
        costs: I64 = np.asarray(slots, np.int64) * (a + b * np.asarray(slots, np.int64))
        return costs


class Batch(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A step is one batch, packed by itself: the next ``samples`` in merge order, whole ones, pieces of a split one
    counting once; or, where that is None, all that comes before the marks of ``end_of_batch``, if it is ``min_samples``
    at least: else it waits for the next batch's.

    As many packs as come out; for a mesh they are made a multiple of ``micro_batch_multiple`` (None: the pipeline's
    stages) for each rank, and ``min_micro_batches`` at least, by splitting them. ``empty``: what is done where that
    leaves ranks without a sample, ``pad`` with empty packs or an ``error`` for all.
    """

    samples: Annotated[int, Meta(ge=1, le=2**24)] | None = None
    min_samples: Positive = 1
    micro_batch_multiple: Annotated[int, Meta(ge=1, le=2**16)] | None = None
    min_micro_batches: Annotated[int, Meta(ge=1, le=2**16)] = 1
    empty: Literal["pad", "error"] = "pad"

    def __post_init__(self) -> None:
        if self.samples is not None and self.min_samples > 1:
            raise ValueError(
                f"got min_samples: {self.min_samples} with samples: {self.samples}, expected one of them: "
                f"min_samples is for batches that end_of_batch closes"
            )


class Warmup(Struct, frozen=True, forbid_unknown_fields=True):
    """The budget of step 0 is ``init`` tokens; it grows by as much a step, to be whole from step ``steps`` on."""

    init: Annotated[Positive, Meta(description="tokens of a pack of step 0; a longer sample is alone in its pack")]
    steps: Annotated[int, Meta(ge=1, lt=2**40, description="steps until the budget is whole; it grows evenly")]


class StreamRules(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a run records of a stream: its share, how often its data is gone over (``passes``; None for ever),
    and what happens to samples over the budget (``overlong``) or that cannot be used (``poison``).

    ``on_exhaust``: when nothing of it is left the others share its place (``renormalise``), or the feed ends at its
    next turn (``stop``). ``pushed``: its samples are sent once and cannot be read again, so the log keeps them.
    """

    name: str
    weight: float = 1.0
    partitions: int = 4
    passes: int | None = 1
    overlong: Overlong = "error"
    poison: Poison = "error"
    on_exhaust: OnExhaust = "renormalise"
    pushed: bool = False


class Rules(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The rules of one feed. ``budget`` tokens a pack, ``packs`` a step, ``window`` samples; with a ``batch`` packs
    and window are those of each batch. ``warmup``: the budget of the first steps is less.

    ``max_samples_per_pack``, ``leftovers`` and ``micro_batch_size`` are parameters of ``packer``: see there. ``shape``
    says how long packs are: see ``shapes``. ``padded``: nothing is packed; FORM's packs are single samples, and DEAL
    makes micro-batches of rows of them, a multiple of ``align.pack`` long: see ``dynamic_batches``.
    ``tail`` says what happens to the packs that do not fill the last step: ``pad`` adds empty packs,
    ``drop`` counts and drops them. ``weight_unit``: weights are shares of tokens, or of samples, where a split one
    counts once and one that is rejected or dropped does not. ``between_passes``: ``drain`` ends each pass over all
    streams as if it were the last, before the next begins. ``tokens`` is the dtype of token ids, ``fields`` what
    samples carry beside them. ``merge``: which sample is next follows from weights, seed and position
    (``schedule``), or from when chunks came, which the log records (``arrival``). ``max_policy_lag``: samples pushed
    with the version of a policy are dropped as they come, and counted, where an earlier chunk's version is more than so
    many ahead of theirs.
    """

    budget: Positive = 8192
    packs: Positive = 64
    window: Positive = 1024
    batch: Batch | None = None
    warmup: Warmup | None = None
    packer: PackerName = "exact_fill"
    max_samples_per_pack: Positive | None = None
    leftovers: Leftovers | None = None
    micro_batch_size: Positive | None = None
    padded: bool = False
    align: Align = Align()
    shape: Shape = "fixed"
    balance: Balance = Balance()
    tail: Literal["pad", "drop"] = "pad"
    weight_unit: WeightUnit = "tokens"
    merge: MergeOrder = "schedule"
    between_passes: BetweenPasses = "continue"
    max_policy_lag: Annotated[int, Meta(ge=0, lt=2**62)] | None = None
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    tokens: TokenType = "int32"
    fields: tuple[Field, ...] = ()
    streams: tuple[StreamRules, ...] = ()
    """In the order of their numbers."""

    def __post_init__(self) -> None:
        if self.budget % self.align.pack:
            raise ValueError(
                f"got budget {self.budget} and align.pack {self.align.pack}, expected a multiple: "
                f"take {self.budget // self.align.pack * self.align.pack or self.align.pack}"
            )
        if self.align.pack % self.align.sample:
            raise ValueError(
                f"got align.pack {self.align.pack} and align.sample {self.align.sample}, expected a multiple"
            )
        check_shape(self.shape, self.budget, self.align.pack)
        if self.warmup is not None and not self.align.pack <= self.warmup.init <= self.budget:
            raise ValueError(
                f"got warmup.init {self.warmup.init}, expected {self.align.pack} to {self.budget}: align.pack and the "
                f"budget that it grows to"
            )
        if self.batch is not None and self.batch.samples is None and self.tail == "drop":
            raise ValueError(
                "got tail: drop with steps that end_of_batch closes, expected pad: there is no tail, the last batch is "
                "whole when its streams end"
            )
        if self.padded:
            self._check_padded()
        if self.batch is not None and self.balance.kind == "joint":
            raise ValueError(
                "got balance.kind: joint with a batch, expected deal or none: its samples are all there, and ranks are "
                "matched by cost as they are dealt"
            )
        check_fields(self.fields)
        if self.balance.kind == "joint":
            self._check_joint()
        units, chosen = self.budget // self.align.sample, self.new_packer()
        if chosen.max_budget is not None and units >= chosen.max_budget:
            key = chosen.config_key
            raise ValueError(
                f"got a budget of {units} times align.sample, expected less than {chosen.max_budget} with {key}: "
                f"{chosen.name}: take a smaller one, or {key}: {'sliding_ffd' if key == 'packer' else 'deal'}"
            )

    def _check_padded(self) -> None:
        """Rows of single samples know nothing of what packs are. Raises ValueError."""
        if self.batch is None:
            raise ValueError(
                "got padded: true with steps of packs, expected step: {samples: N} or {end_of_batch: true}: padded "
                "micro-batches are made of a batch"
            )
        default = Rules()
        rows: dict[str, object] = {"packer": "none", "micro_batch_size": 1, "shape": "exact"}
        for key in ("packer", *PACKER_KEYS, "window", "shape", "balance", "warmup"):
            got, expected = getattr(self, key), rows.get(key, getattr(default, key))
            if got != expected:
                raise ValueError(f"got {key}: {_said(got)} with padded: true, expected no such key: nothing is packed")
        for field in self.fields:
            if field.name in OF_ROWS:
                raise ValueError(
                    f"got the field {field.name} with padded: true, expected another name: rows have one of their own"
                )

    def _check_joint(self) -> None:
        """Groups of packs are formed by a method of their own, and steps hold whole ones. Raises ValueError."""
        if self.packer != "exact_fill":
            raise ValueError(
                f"got balance.kind: joint with packer: {self.packer}, expected exact_fill, whose method fills its packs"
            )
        if self.balance.group is None or self.packs % self.balance.group:
            raise ValueError(
                f"got balance.group: {self.balance.group} and {self.packs} packs of a step, expected a divisor of "
                f"them (where none is given it is planned_mesh.dp)"
            )

    def new_packer(self) -> Packer:
        """The packer with its parameters. Raises ValueError for a rule that it does not know."""
        joint = self.balance.kind == "joint"
        name = "joint" if joint else self.packer
        has = parameters_of(name)
        given = {key: value for key in PACKER_KEYS if (value := getattr(self, key)) is not None}
        for unknown in sorted(given.keys() - set(has)):
            known = " or ".join(key for key in PACKER_KEYS if key in has) or "none"
            raise ValueError(
                f"got {unknown}: {given[unknown]} with {'balance.kind' if joint else 'packer'}: {name}, expected only "
                f"keys that it has: {known}"
            )
        own = {"group": self.balance.group, "patience": self.balance.patience} if joint else {}
        return make_packer(name, **given, **own, **({"seed": self.seed} if "seed" in has else {}))

    def budget_at(self, step: int) -> int:
        """Tokens of a pack of ``step``: less while ``warmup`` lasts, rounded down to ``align.pack``."""
        warmup = self.warmup
        if warmup is None or step >= warmup.steps:
            return self.budget
        return (warmup.init + (self.budget - warmup.init) * step // warmup.steps) // self.align.pack * self.align.pack

    def own_widths(self, slots: I64) -> I64:
        """T of packs whose samples, padded, take ``slots`` tokens, int64 [packs], by themselves: see ``shapes``."""
        return own_widths(slots, self.shape, self.budget, self.align.pack)

    def step_widths(self, slots: I64, pp: int) -> I64:
        """T of all packs of a step on a mesh with ``pp`` stages, int64 [packs]."""
        return step_widths(slots, self.shape, self.budget, self.align.pack, pp)

    @property
    def width_unit(self) -> int:
        """What every T is a multiple of."""
        return width_unit(self.shape, self.budget, self.align.pack)

    @property
    def token_bytes(self) -> int:
        """Of one token with all its fields of axis ``token``."""
        return np.dtype(self.tokens).itemsize + sum(f.value_bytes for f in self.fields if f.axis == "token")

    @property
    def finite(self) -> bool:
        """Every stream ends, or one stops the rest: the feed has a last step, and can be iterated again. None is
        pushed: that is read once.
        """
        if any(stream.pushed for stream in self.streams):
            return False
        stops = any(stream.on_exhaust == "stop" for stream in self.streams)
        return stops or all(stream.passes is not None for stream in self.streams)

    @property
    def digest(self) -> str:
        """32 hex digits that name these rules: blake2b over their canonical JSON, without what is a default: so that a
        rule which a later version adds leaves recorded runs as they are.
        """
        text = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(text, digest_size=16).hexdigest()


def _said(value: object) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, Struct) else str(value)


class RulesChange(Struct, frozen=True, kw_only=True):
    """Other rules for all that a feed merges after its first ``position`` samples: that is from ``step`` on, but for
    what the window held. Before that step is reached the position is not known: -1. ``note`` says what was asked.
    """

    step: int
    position: int
    rules: Rules
    note: str = ""


def difference(got: Rules, expected: Rules) -> str:
    """The first rule that differs, with both values; empty if none does."""
    return _difference(msgspec.to_builtins(_whole(got)), msgspec.to_builtins(_whole(expected)), "rules")


def _whole(value: object) -> object:
    """Structs as mappings with every key, defaults too."""
    if isinstance(value, Struct):
        return {name: _whole(getattr(value, name)) for name in value.__struct_fields__}
    return [_whole(each) for each in value] if isinstance(value, tuple) else value


def _difference(got: object, expected: object, path: str) -> str:
    if isinstance(got, dict) and isinstance(expected, dict) and got.keys() == expected.keys():
        found = (_difference(got[key], expected[key], f"{path}.{key}") for key in got)
        return next(filter(None, found), "")
    if isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        names = [each.get("name", at) if isinstance(each, dict) else at for at, each in enumerate(expected)]
        every = zip(got, expected, names, strict=True)
        return next(filter(None, (_difference(one, other, f"{path}.{name}") for one, other, name in every)), "")
    if got == expected:
        return ""
    return f"{path}: got {_short(got)}, expected {_short(expected)}"


def _short(value: object) -> str:
    if isinstance(value, list) and all(isinstance(each, dict) and "name" in each for each in value):
        return ", ".join(str(each["name"]) for each in value) or "none"
    return str(value)[:80]
