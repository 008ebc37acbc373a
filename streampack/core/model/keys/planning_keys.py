"""Keys of planning: those that broker.yaml has, and a run records as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from streampack.core.model.keys.key_groups import Keys
from streampack.core.model.samples import I64, Share
from streampack.core.model.shapes import Shape
from streampack.core.packers.blocks.modified_first_fit import Leftovers
from streampack.core.packers.joint.joint_bounds import PATIENCE
from streampack.core.packers.registry import PackerName

Positive = Annotated[int, Meta(ge=1, lt=2**62)]
Window = Positive | Literal["auto"]
MAX_WINDOW = 1024
"""The largest automatic window, and the window of logs that do not name one."""
"""A count of at least 1; every message, record and kernel can hold it."""
Most = Annotated[int, Meta(ge=1, lt=2**31)]
Factor = Annotated[int, Meta(ge=0, lt=2**32)]
WeightUnit = Literal["tokens", "samples"]
BetweenPasses = Literal["continue", "drain"]
Tail = Literal["pad", "drop"]
TokenType = Literal["uint16", "int32"]
MergeOrder = Literal["schedule", "arrival"]
MicroBatchOrder = Literal["packer", "largest_first", "small_at_edges"]
PACKER_KEYS = ("max_samples_per_pack", "leftovers", "micro_batch_size")
"""Keys that are parameters of packers; None: the packer's default."""


class Balance(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The way in which packs are balanced over ranks, by a cost of a*s + b*s*s for each sample of s padded tokens.

    The default is the cost of a transformer layer of hidden size 4096; ``hidden_size`` h gives a = 6 * h, b = 1. For
    other models, ``ModelFlops.balance`` gives the factors. Linear attention lowers b; layers with a sliding window cost
    ``sliding`` in place of b.

    FORM uses ``group``, never the mesh; the number of data-parallel ranks works best. The default of ``order`` is
    ``packer`` with kind ``none``, else ``largest_first``.
    """

    kind: Annotated[
        Literal["none", "deal", "joint"],
        Meta(
            description="`deal` assigns packs to ranks by cost, `none` assigns packs in order, and `joint` forms "
            "groups of packs with equal cost"
        ),
    ] = "deal"
    order: Annotated[
        MicroBatchOrder | None,
        Meta(
            description="Order of each rank's micro-batches. `largest_first` puts the most expensive first, "
            "`small_at_edges` puts the most expensive in the middle (for pipelines), and `packer` keeps the packer's "
            "order"
        ),
    ] = None
    hidden_size: Annotated[
        Annotated[int, Meta(ge=1, lt=2**24)] | None,
        Meta(description="Hidden size of the model. It sets the cost factors a = 6 * hidden_size and b = 1"),
    ] = None
    a: Annotated[
        int, Meta(ge=0, lt=2**32, description="Factor a of a sample's cost, a * s + b * s * s for s tokens")
    ] = 24576
    b: Annotated[
        int, Meta(ge=0, lt=2**12, description="Factor b of a sample's cost, a * s + b * s * s for s tokens")
    ] = 1
    sliding: Annotated[
        tuple[Positive, Annotated[int, Meta(ge=0, lt=2**12)]] | None,
        Meta(
            description="Window in tokens, and factor c, of layers with a sliding window. A sample of s tokens costs "
            "c * s * s more within the window, and c * window * (2 * s - window) beyond it"
        ),
    ] = None
    group: Annotated[
        Annotated[int, Meta(ge=1, le=2**16)] | None,
        Meta(
            description="Number of packs that kind `joint` forms together. It must divide the number of packs in a step"
        ),
    ] = None
    patches: Annotated[
        tuple[Factor, Annotated[int, Meta(ge=0, lt=2**12)]] | None,
        Meta(
            description="Factors [a, b] of the cost of a media item, a * p + b * p * p for p patches. Default: "
            "patches cost nothing"
        ),
    ] = None
    items: Annotated[Factor | None, Meta(description="Cost of a media item, beside the cost of its patches")] = None
    patience: Annotated[
        int,
        Meta(
            ge=1,
            le=2**20,
            description="Approximate number of groups that an outlier sample waits for similar samples, with kind "
            "`joint`",
        ),
    ] = PATIENCE

    def __post_init__(self) -> None:
        setting = f"group: {self.group}" if self.group is not None else f"patience: {self.patience}"
        if self.kind != "joint" and (self.group is not None or self.patience != PATIENCE):
            raise ValueError(f"got `{setting}` with `kind: {self.kind}`, expected this key only with `kind: joint`")
        if self.kind == "joint" and self.sliding is not None:
            raise ValueError("got `sliding` with `kind: joint`, expected `kind: deal`, because joint compares squares")

    def planned(self, dp: int) -> Balance:
        """Return these settings with ``group`` set to ``dp``, for kind ``joint`` without a group.

        ``dp`` is the number of data-parallel ranks that the run is planned for.
        """
        return msgspec.structs.replace(self, group=dp) if self.kind == "joint" and self.group is None else self

    @property
    def factors(self) -> tuple[int, int]:
        """The factors (a, b) of the cost of tokens."""
        return (6 * self.hidden_size, 1) if self.hidden_size else (self.a, self.b)

    @property
    def window_factors(self) -> tuple[int, int]:
        """The window of layers with a sliding window, and the factor of their cost; (0, 0) without such layers."""
        return self.sliding or (0, 0)

    @property
    def media_factors(self) -> tuple[int, int, int]:
        """The factors (a, b, c): a media item of p patches costs ``a * p + b * p * p + c``."""
        return (*(self.patches or (0, 0)), self.items or 0)

    def costs(self, slots: I64, depths: I64 | int = 0) -> I64:
        """Return the cost of the tokens of each sample, int64 [n].

        Args:
            slots: int64 [n], padded tokens that each sample adds to its pack.
            depths: int64 [n], tokens that come before them in the sample, and that it shares with the one before it.
        """
        a, b = self.factors
        costs: I64 = np.asarray(slots, np.int64) * (a + b * (2 * depths + np.asarray(slots, np.int64)))
        if self.sliding is not None:
            window, c = self.sliding
            costs = costs + c * (_windowed(np.asarray(slots, np.int64) + depths, window) - _windowed(depths, window))
        return costs

    def extras_of(self, column: Callable[[str], I64 | int]) -> tuple[I64 | int, I64 | int]:
        """Return the depths of samples (see ``costs``), and their cost beside that of their tokens, int64 [n] each.

        ``column`` returns a column of ``samples.EXTRAS`` of the samples, by its name, or 0 if it is 0 for all.
        """
        return column("shared"), column("extra_cost")

    def sample_costs(self, slots: I64, column: Callable[[str], I64 | int]) -> I64:
        """Return the whole cost of each sample, int64 [n]; arguments as for ``costs`` and ``extras_of``."""
        depths, others = self.extras_of(column)
        return self.costs(slots, depths) + others


def _windowed(lengths: I64 | int, window: int) -> I64:
    """Return the squares of lengths, without the parts that a sliding window leaves out, int64 [n]."""
    near = np.minimum(lengths, window)
    squares: I64 = near * (2 * np.asarray(lengths, np.int64) - near)
    return squares


class MediaLimits(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Hard limits of a pack beside its budget of tokens; None for no limit."""

    patches: Annotated[Most | None, Meta(description="Most patches of media items in a pack")] = None
    items: Annotated[Most | None, Meta(description="Most media items in a pack")] = None


class Align(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Multiples, in tokens, to which samples and packs are padded.

    With ``cp`` context-parallel ranks (zigzag) both must be multiples of 2 * cp.
    """

    sample: Positive = 1
    pack: Positive = 1


class Warmup(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Even growth of the budget, or of the packs of a step, from ``init`` to its full size in ``steps`` steps."""

    init: Annotated[
        Positive, Meta(description="Budget of a pack at first, in tokens. A longer sample gets a pack of its own")
    ]
    steps: Annotated[
        int, Meta(ge=1, lt=2**40, description="Number of steps in which the budget grows evenly to its full size")
    ]
    begin: Annotated[int, Meta(ge=0, lt=2**62, description="Step at which the growth begins")] = 0

    def at(self, step: int, full: int, multiple: int) -> int:
        """Return the value at ``step``, a multiple of ``multiple``, if it grows to ``full``."""
        done = step - self.begin
        if done >= self.steps:
            return full
        return (self.init + (full - self.init) * max(done, 0) // self.steps) // multiple * multiple


class BatchKeys(Keys, frozen=True, kw_only=True):
    """Keys of a step that is one batch of samples."""

    samples: Annotated[
        Annotated[int, Meta(ge=1, le=2**24)] | None,
        Meta(
            description="Number of samples in one optimizer step. Each step gets as many packs as its samples need. "
            "Set this instead of `packs`"
        ),
    ] = None
    min_samples: Annotated[
        Positive,
        Meta(
            description="Minimum number of samples in a step with `end_of_batch`. The samples of a smaller batch "
            "wait for the next `end_of_batch`"
        ),
    ] = 1
    micro_batch_multiple: Annotated[
        Annotated[int, Meta(ge=1, le=2**16)] | None,
        Meta(
            description="Give each rank a multiple of this many micro-batches per step. Applies only with `samples` "
            "or `end_of_batch`. Default: the number of pipeline stages"
        ),
    ] = None
    min_micro_batches: Annotated[
        int,
        Meta(
            ge=1,
            le=2**16,
            description="Minimum number of micro-batches of each rank in a step. Applies only with `samples` or "
            "`end_of_batch`",
        ),
    ] = 1
    empty: Annotated[
        Literal["pad", "error"],
        Meta(
            description="Action if a batch (`samples` or `end_of_batch`) has too few samples for all ranks. `pad` "
            "gives the remaining ranks empty packs; `error` stops all ranks with an error"
        ),
    ] = "pad"


class PlanningKeys(Keys, frozen=True, kw_only=True):
    """Keys of ``rules`` in broker.yaml."""

    packer: Annotated[
        PackerName,
        Meta(description="Algorithm that chooses which samples share a pack. The default adds the least padding"),
    ] = "exact_fill"
    budget: Annotated[
        Positive,
        Meta(
            description="Number of tokens in a pack, including padding: the sequence length of the model's input. "
            "Lower this number if a GPU runs out of memory"
        ),
    ] = 8192
    max_samples_per_pack: Annotated[
        Positive | None, Meta(description="Maximum number of samples in a pack. Default: only the budget limits a pack")
    ] = None
    leftovers: Annotated[
        Leftovers | None,
        Meta(
            description="Order in which the packer `modified_first_fit_decreasing` packs the samples that remain "
            "after its size classes. `decreasing` packs the longest sample first; `emptiest` puts each sample into "
            "the emptiest pack. Default: `decreasing`"
        ),
    ] = None
    micro_batch_size: Annotated[
        Positive | None, Meta(description="Number of consecutive samples in a pack. Applies only with `packer: none`")
    ] = None
    padded: Annotated[
        bool,
        Meta(
            description="Build micro-batches of padded rows with one sample per row, and put as many rows into a "
            "micro-batch as fit the budget (dynamic batching). Use this for models that cannot process packed samples"
        ),
    ] = False
    shape: Annotated[
        Shape,
        Meta(
            description="Length of the packs that trainers get. `fixed` is the budget, and `exact` is the number of "
            "the pack's tokens. `{multiple: N}` and `{buckets: [N, ...]}` allow a few sizes, of which the smallest "
            "that holds the pack is used. "
            "`fixed` suits compiled models; the other shapes save computation"
        ),
    ] = "fixed"
    warmup: Annotated[
        Warmup | None,
        Meta(description="Start with a smaller budget that grows over the first steps. Default: no warmup"),
    ] = None
    balance: Balance = Balance()
    tail: Annotated[
        Tail,
        Meta(
            description="Action if the last samples do not fill a step: fill the step with empty packs (`pad`), or "
            "leave these samples out (`drop`)"
        ),
    ] = "pad"
    weight_unit: Annotated[
        WeightUnit, Meta(description="Unit in which the streams' weights are measured: `tokens` or `samples`")
    ] = "tokens"
    between_passes: Annotated[
        BetweenPasses,
        Meta(
            description="Transition between two passes over all data. With `continue`, a step may hold samples of "
            "both passes; with `drain`, no step does"
        ),
    ] = "continue"
    limits: Annotated[
        MediaLimits | None,
        Meta(description="Most `patches` and `items` of a pack, for the media of its samples, beside the budget"),
    ] = None
    share: Annotated[
        Share | None,
        Meta(
            description='With `prefix`, groups that producers send with `share="prefix"` are trees: the model '
            'computes their shared first tokens once. Trainers then need FlexAttention, with `masks="flex"`. '
            "Default: no sharing"
        ),
    ] = None


class RunKeys(Keys, frozen=True, kw_only=True):
    """Keys at the top of broker.yaml that are rules of every feed."""

    seed: Annotated[
        int,
        Meta(
            ge=0,
            lt=2**62,
            description="Random seed for the order of shards and samples, for mixing streams, and for packers that "
            "shuffle. The same seed gives the same steps",
        ),
    ] = 0
    merge: Annotated[
        MergeOrder,
        Meta(
            description="Order in which samples from several streams are mixed. `schedule` follows the weights and "
            "is the same in every run; `arrival` is the order in which samples arrive. Pushed streams require "
            "`arrival`"
        ),
    ] = "schedule"
    tokens: Annotated[
        TokenType,
        Meta(
            description="Type of token ids. `uint16` halves memory and traffic, but limits the vocabulary to 65,536 ids"
        ),
    ] = "int32"
