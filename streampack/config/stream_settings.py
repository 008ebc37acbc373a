"""Settings of streams, of the feeds that mix them, and of the fields of their samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from streampack.config.stage_settings import StageSettings
from streampack.core.model.fields import GROUP, LABELS, LOSS_MASK, POLICY_VERSION, POSITION_IDS, Field
from streampack.core.model.keys.field_keys import DType, FieldKeys
from streampack.core.model.keys.key_groups import Keys, values_of
from streampack.core.model.keys.planning_keys import MergeOrder, Positive
from streampack.core.model.keys.stream_keys import SamplePolicies, StreamKeys
from streampack.core.model.mesh import DynamicCp
from streampack.core.model.rules import StreamRules
from streampack.core.model.samples import IGNORE_INDEX
from streampack.errors import ConfigError


class StreamSettings(
    StreamKeys, frozen=True, kw_only=True, unset={SamplePolicies: "rules"},
    listed="weight passes repeat partitions on_exhaust overlong poison no_loss_tokens pushed",
):  # fmt: skip
    """Settings of a stream: its share of the feed, its passes and partitions, and its treatment of bad samples."""

    weight: Annotated[
        float,
        Meta(
            gt=0,
            le=1e9,
            description="Relative share of the stream in the feed: a stream with weight 2 gets twice the share of a "
            "stream with weight 1. `rules.weight_unit` sets the unit of shares",
        ),
    ] = 1.0
    passes: Annotated[Positive, Meta(description="Number of passes over the stream's data")] = 1
    repeat: Annotated[bool, Meta(description="Repeat the stream's data without end. Set this instead of `passes`")] = (
        False
    )
    partitions: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Number of parts that the stream's files are divided into. Only one producer process at a "
            "time reads a part, so set at least the number of producer processes. The number cannot change during a "
            "run",
        ),
    ] = 4

    def recorded(self, name: str, policies: SamplePolicies) -> StreamRules:
        """Return the rules of the stream ``name``; ``policies`` apply where it has none of its own."""
        own = {key: value for key, value in values_of(self, SamplePolicies).items() if value is not None}
        return StreamRules(
            name, self.weight, self.partitions, None if self.repeat else self.passes,
            **values_of(self, StreamKeys), **(values_of(policies, SamplePolicies) | own),
        )  # fmt: skip


class ExchangeSettings(Keys, frozen=True, kw_only=True):
    """Cost of the exchange of a token between context-parallel ranks, over the cost of its computation."""

    node: Annotated[float, Meta(ge=0, le=64, description="Cost of the exchange within a node")] = 0.05
    across: Annotated[float, Meta(ge=0, le=64, description="Cost of the exchange across nodes")] = 0.2
    node_ranks: Annotated[int, Meta(ge=1, le=4096, description="Ranks of a node, in the order of the ranks")] = 8


class FeedSettings(Keys, frozen=True, kw_only=True):
    """Settings of a feed that trainers connect to: its streams (default: all), and its own values of ``rules``."""

    streams: Annotated[
        tuple[str, ...],
        Meta(description="Streams that the feed mixes. Each stream may be in only one feed. Default: all streams"),
    ] = ()
    merge: Annotated[
        MergeOrder | None,
        Meta(description="Order in which samples from the feed's streams are mixed. Default: the run's `merge`"),
    ] = None
    on_rewind: Annotated[
        Literal["replay", "discard"],
        Meta(
            description="Treatment of samples pushed after the checkpoint that trainers resume from. `replay` serves "
            "these samples again in the same steps; `discard` drops them"
        ),
    ] = "replay"
    cp_layout: Annotated[
        Literal["zigzag", "zigzag_pack", "contiguous", "whole"],
        Meta(
            description="Division of a pack among context-parallel ranks. `zigzag` divides each sample, and "
            "`zigzag_pack` divides the pack as a whole. `contiguous` gives each rank one consecutive part, and "
            "`whole` gives every rank the whole pack"
        ),
    ] = "zigzag"
    cp: Annotated[
        Literal["static", "dynamic"],
        Meta(
            description="`static` divides every pack among all context-parallel ranks of the mesh. `dynamic` gives "
            "each sample as many ranks as it needs: groups of 1, 2, 4 or more of the dp x cp ranks share packs. It "
            "needs `rank_tokens`"
        ),
    ] = "static"
    rank_tokens: Annotated[
        Annotated[int, Meta(ge=2, lt=2**31)] | None,
        Meta(description="With `cp: dynamic`, the most tokens of a rank in a micro-batch, an even number"),
    ] = None
    max_group: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        Meta(description="With `cp: dynamic`, the most ranks that share a sample. Default: 64"),
    ] = None
    exchange: Annotated[
        ExchangeSettings | None,
        Meta(
            description="With `cp: dynamic`, the cost of the exchange of a token between ranks. Default: 0.05 within a "
            "node of 8 ranks, and 0.2 across nodes"
        ),
    ] = None
    rules: Annotated[
        dict[str, Any],
        Meta(description="Values of `rules` keys that apply only to this feed. Other keys keep the run's values"),
    ] = msgspec.field(default_factory=dict)
    stages: Annotated[
        tuple[StageSettings, ...] | None,
        Meta(description="Stages of this feed, in place of the run's `stages`"),
    ] = None

    def __post_init__(self) -> None:
        if self.cp == "dynamic":
            if self.rank_tokens is None:
                raise ValueError("got `cp: dynamic` without rank_tokens, expected the most tokens of a rank, e.g. 8192")
            if self.cp_layout != "zigzag":
                raise ValueError(f"got `cp: dynamic` with `cp_layout: {self.cp_layout}`, expected `cp_layout: zigzag`")
            return
        for name in ("rank_tokens", "max_group", "exchange"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"got {name} without `cp: dynamic`, expected both. Set `cp: dynamic`, or remove {name}"
                )

    @property
    def layout(self) -> str:
        """The way in which context parallelism divides packs, as a ``FeedPlan`` has it."""
        if self.cp == "static" or self.rank_tokens is None:
            return self.cp_layout
        exchange = self.exchange or ExchangeSettings()
        return DynamicCp(
            rank_tokens=self.rank_tokens, max_group=self.max_group or MAX_GROUP, node=exchange.node,
            across=exchange.across, node_ranks=exchange.node_ranks,
        ).layout  # fmt: skip


MAX_GROUP = 64
"""The most ranks that share a sample, by default."""


class FieldSettings(FieldKeys, frozen=True, kw_only=True):
    """A field: values that samples have beside their token ids. ``core.model.fields`` explains each key.

    The names ``loss_mask``, ``labels``, ``position_ids``, ``group`` and ``policy_version`` have a meaning and their own
    defaults: ``{}`` declares such a field.
    """

    def declared(self, name: str) -> Field:
        """Return the declared field ``name`` with all defaults filled in. Raises ConfigError."""
        defaults = _KNOWN_FIELDS.get(name, {})
        chosen = {key: value for key, value in msgspec.structs.asdict(self).items() if value is not None}
        if "dtype" not in chosen | defaults:
            raise ConfigError(
                f"fields.{name}: got a field without `dtype`, expected one of: {', '.join(get_args(DType))}"
            )
        try:
            return Field(name=name, **(defaults | chosen))
        except ValueError as error:
            raise ConfigError(f"fields.{name}: {error}") from None


_KNOWN_FIELDS: dict[str, dict[str, Any]] = {
    LOSS_MASK: {"dtype": "uint8", "align": "target"},
    LABELS: {"dtype": "int32", "align": "target", "pad": IGNORE_INDEX},
    POSITION_IDS: {"dtype": "int32"},
    GROUP: {"dtype": "int64", "axis": "sample", "default": -1},
    POLICY_VERSION: {"dtype": "int64", "axis": "sample", "default": -1},
}
