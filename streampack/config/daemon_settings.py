"""Settings that users write in broker.yaml and producer.yaml: one typed, frozen tree each.

Here are the keys, with their types and defaults (only ``streams`` has none), and what they come to:
``BrokerConfig.plan``, a feed's rules. What a type alone can refuse, ``typed_yaml`` does; values that contradict each
other are for ``config_validation``; which of the two a file is, for ``config_files``.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from streampack.config.alignment import AlignSettings, Precision, derived_align
from streampack.config.typed_yaml import explained
from streampack.core.model.fields import GROUP, LABELS, LOSS_MASK, POLICY_VERSION, POSITION_IDS, DType, Field
from streampack.core.model.rules import (
    PACKER_KEYS,
    Balance,
    Batch,
    BetweenPasses,
    MergeOrder,
    OnExhaust,
    Overlong,
    Poison,
    Positive,
    Rules,
    StreamRules,
    TokenType,
    Warmup,
    WeightUnit,
)
from streampack.core.model.samples import IGNORE_INDEX
from streampack.core.model.shapes import Shape
from streampack.core.packers.blocks.modified_first_fit import Leftovers
from streampack.core.packers.registry import PackerName
from streampack.errors import ConfigError
from streampack.sources.settings import SourceSettings
from streampack.tokenizers.base import TokenizerSettings

MEMORY = "1GiB"
"""Default memory of a broker."""
Name = Annotated[str, Meta(min_length=1, max_length=200)]
"""A name that fits in a message."""


class _Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings refuse what they do not know."""


class Listen(_Settings, frozen=True, kw_only=True):
    """Where the broker listens: ``tcp://host:port`` (``*`` for a free port) or ``ipc:///path``; http: ``host:port``.

    ``control``: who may change a run over HTTP, this machine (``loopback``) or whoever comes that far (``any``).
    ``keys``: a folder of 'streampack keys new': producers and trainers show theirs, and all they say is encrypted.
    ``token_file``: holds what whoever asks over HTTP must bring; else STREAMPACK_HTTP_TOKEN, if it is there.
    """

    producers: Annotated[str, Meta(description="address at which producers connect")] = "tcp://127.0.0.1:7401"
    trainers: Annotated[str, Meta(description="address at which trainers connect")] = "tcp://127.0.0.1:7402"
    http: Annotated[str, Meta(description="address of metrics, status, health and changes to the run")] = (
        "127.0.0.1:7400"
    )
    control: Annotated[
        Literal["loopback", "any"],
        Meta(description="who may change the run over HTTP: programs on this machine (loopback), or any"),
    ] = "loopback"
    keys: Annotated[
        str | None,
        Meta(
            description="folder of keys; with it producers and trainers must show theirs, and all traffic is encrypted"
        ),
    ] = None
    token_file: Annotated[str | None, Meta(description="file with the token that every HTTP client must send")] = None


class WindowSettings(_Settings, frozen=True, kw_only=True):
    """Size of the window that the packer chooses from."""

    samples: Annotated[Positive, Meta(description="samples that the packer chooses from")] = 1024


STEP_KINDS = ("packs", "samples", "end_of_batch")
"""Units of a step; a feed that sets one overrides the run's."""


class StepSettings(_Settings, frozen=True, kw_only=True):
    """Size of a step: a number of ``packs`` over all data-parallel ranks (default 64), or a batch packed by itself.

    A batch is a number of whole ``samples``, or the samples up to the producers' ``end_of_batch``. The other keys are
    for batches; ``core.model.rules.Batch`` explains each.
    """

    packs: Annotated[
        Positive | None, Meta(description="packs of an optimizer step, over all ranks; 64 where a step is no batch")
    ] = None
    samples: Annotated[
        Annotated[int, Meta(ge=1, le=2**24)] | None,
        Meta(description="samples of an optimizer step, packed by themselves into as many packs as they need"),
    ] = None
    end_of_batch: Annotated[
        bool, Meta(description="a step is the samples that come before the pushing programs say end_of_batch")
    ] = False
    min_samples: Annotated[Positive, Meta(description="a smaller batch goes on until the next end_of_batch")] = 1
    micro_batch_multiple: Annotated[
        Annotated[int, Meta(ge=1, le=2**16)] | None,
        Meta(description="each rank's number of micro-batches is a multiple of this; default: the pipeline's stages"),
    ] = None
    min_micro_batches: Annotated[int, Meta(ge=1, le=2**16, description="least micro-batches of each rank")] = 1
    empty: Annotated[
        Literal["pad", "error"],
        Meta(
            description="ranks without a sample after packs were split: they get empty packs (pad), or all stop (error)"
        ),
    ] = "pad"

    @property
    def batch(self) -> Batch | None:
        """Batch settings of the rules; None if steps are counted in packs. Raises ValueError for two units."""
        given = [key for key in STEP_KINDS if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"step: got {' and '.join(given)}, expected one of {', '.join(STEP_KINDS)}")
        of_batches = {key: getattr(self, key) for key in Batch.__struct_fields__ if key != "samples"}
        if given in ([], ["packs"]):
            for key, value in of_batches.items():
                if value != getattr(StepSettings(), key):
                    raise ValueError(f"step: got {key} without a batch, expected samples or end_of_batch beside it")
            return None
        return Batch(samples=self.samples, **of_batches)


class PlannedMesh(_Settings, frozen=True, kw_only=True):
    """The mesh the run is planned for; ``alignment`` derives from it what is not given."""

    dp: Annotated[Positive, Meta(description="planned data-parallel ranks; must divide the packs of a step")] = 1
    cp: Annotated[Positive, Meta(description="planned context-parallel ranks; alignment follows from it")] = 1
    tp: Annotated[Positive, Meta(description="planned tensor-parallel ranks; alignment follows from it")] = 1


class RulesSettings(_Settings, frozen=True, kw_only=True):
    """The planning constants; ``core.rules`` explains each."""

    packer: Annotated[PackerName, Meta(description="algorithm that chooses the samples of a pack")] = "exact_fill"
    budget: Annotated[Positive, Meta(description="tokens of a pack")] = 8192
    window: WindowSettings = WindowSettings()
    max_samples_per_pack: Annotated[Positive | None, Meta(description="most samples of a pack")] = None
    leftovers: Annotated[
        Leftovers | None,
        Meta(description="packer modified first fit: how it packs the samples that no large sample took along"),
    ] = None
    micro_batch_size: Annotated[Positive | None, Meta(description="packer none: samples of a pack")] = None
    padded: Annotated[
        bool, Meta(description="no packing: micro-batches of padded rows, as many as fit the budget (dynamic batching)")
    ] = False
    align: AlignSettings | None = None
    shape: Annotated[
        Shape,
        Meta(description="length of a delivered pack: the budget (fixed), its samples' (exact), or one of some sizes"),
    ] = "fixed"
    step: StepSettings = StepSettings()
    warmup: Annotated[Warmup | None, Meta(description="a smaller budget for the first steps")] = None
    balance: Balance = Balance()
    overlong: Annotated[Overlong, Meta(description="what happens to samples over the budget")] = "error"
    poison: Annotated[Poison, Meta(description="what happens to samples that cannot be used")] = "error"
    tail: Annotated[
        Literal["pad", "drop"],
        Meta(description="packs that do not fill the last step: empty ones are added (pad), or they are dropped"),
    ] = "pad"
    weight_unit: Annotated[WeightUnit, Meta(description="unit of the streams' weights")] = "tokens"
    between_passes: Annotated[
        BetweenPasses,
        Meta(description="passes over the data run into one another, or each ends with a step of its own"),
    ] = "continue"
    max_policy_lag: Annotated[
        Annotated[int, Meta(ge=0, lt=2**62)] | None,
        Meta(description="pushed samples of a policy so many versions behind the newest are dropped on arrival"),
    ] = None

    @property
    def packing(self) -> dict[str, Any]:
        """Packing keys of the rules: ``packer`` and its options, ``shape`` and ``padded``.

        With ``padded``, keys left at their defaults become ``packer: none``, ``micro_batch_size: 1``, ``shape: exact``.
        """
        found = {key: getattr(self, key) for key in ("packer", *PACKER_KEYS, "shape", "padded")}
        alone = {"packer": "none", "micro_batch_size": 1, "shape": "exact"} if self.padded else {}
        return found | {key: value for key, value in alone.items() if found[key] == getattr(RulesSettings(), key)}


class StreamSettings(_Settings, frozen=True, kw_only=True):
    """A stream: its share, how often its data is gone over, over how many partitions, and its policies."""

    weight: Annotated[float, Meta(gt=0, le=1e9, description="share, relative to the other streams")] = 1.0
    passes: Annotated[Positive, Meta(description="number of passes over its data")] = 1
    repeat: Annotated[bool, Meta(description="passes without end")] = False
    partitions: Annotated[
        int, Meta(ge=1, le=4096, description="fixed parts of its files, each read by one producer at a time")
    ] = 4
    on_exhaust: Annotated[
        OnExhaust, Meta(description="at its end the other streams share its weight, or the feed ends")
    ] = "renormalise"
    overlong: Annotated[Overlong | None, Meta(description="what happens to its samples over the budget")] = None
    poison: Annotated[Poison | None, Meta(description="what happens to its samples that cannot be used")] = None
    pushed: Annotated[bool, Meta(description="streampack.Producer sends its samples once, and the log keeps them")] = (
        False
    )


class FeedSettings(_Settings, frozen=True, kw_only=True):
    """A feed that trainers connect to: its streams (default: all) and its changes to the run's ``rules``.

    ``on_rewind``: when trainers go back, pushed samples that came since are in the same steps again (``replay``), or
    dropped, and other steps follow (``discard``).
    """

    streams: Annotated[tuple[str, ...], Meta(description="streams that it mixes; default: all")] = ()
    merge: Annotated[MergeOrder | None, Meta(description="order of its streams' samples; default: the run's merge")] = (
        None
    )
    on_rewind: Annotated[
        Literal["replay", "discard"],
        Meta(
            description="when trainers go back, pushed samples since then come again (replay) or are dropped (discard)"
        ),
    ] = "replay"
    cp_layout: Annotated[
        Literal["zigzag", "zigzag_pack", "contiguous", "whole"],
        Meta(description="part of a pack that each context-parallel rank gets"),
    ] = "zigzag"
    rules: Annotated[dict[str, Any], Meta(description="keys of rules that replace the run's, one by one")] = {}


class FieldSettings(_Settings, frozen=True, kw_only=True):
    """A field that samples have beside their token ids; ``core.model.fields`` explains each key.

    ``loss_mask``, ``labels``, ``position_ids``, ``group`` and ``policy_version`` have a meaning, and defaults of their
    own: ``{}`` declares them.
    """

    dtype: Annotated[DType | None, Meta(description="type of its values")] = None
    axis: Annotated[
        Literal["token", "sample", "item", "patch"] | None,
        Meta(description="what has one value: a token, a sample, an item or a patch"),
    ] = None
    shape: Annotated[tuple[Positive, ...], Meta(description="shape of one value; default: a number")] = ()
    align: Annotated[
        Literal["token", "target"] | None,
        Meta(description="target: belongs to predicting its token, and is shifted with the labels"),
    ] = None
    pad: Annotated[int | float | None, Meta(description="its value at padding")] = None
    default: Annotated[
        int | float | None,
        Meta(description="its value in samples that come without it; default: such a sample is rejected"),
    ] = None
    cp: Annotated[
        Literal["slice", "replicate"],
        Meta(description="a context-parallel rank gets its slice (slice), or all (replicate)"),
    ] = "slice"

    def declared(self, name: str) -> Field:
        """Return the field ``name`` with its defaults. Raises ConfigError."""
        known = _KNOWN_FIELDS.get(name, {})
        given = {key: value for key, value in msgspec.structs.asdict(self).items() if value is not None}
        if "dtype" not in given | known:
            raise ConfigError(f"fields.{name}: got no key 'dtype', expected one of: {', '.join(get_args(DType))}")
        try:
            return Field(name=name, **(known | given))
        except ValueError as error:
            raise ConfigError(f"fields.{name}: {error}") from None


_KNOWN_FIELDS: dict[str, dict[str, Any]] = {
    LOSS_MASK: {"dtype": "uint8", "align": "target"},
    LABELS: {"dtype": "int32", "align": "target", "pad": IGNORE_INDEX},
    POSITION_IDS: {"dtype": "int32"},
    GROUP: {"dtype": "int64", "axis": "sample", "default": -1},
    POLICY_VERSION: {"dtype": "int64", "axis": "sample", "default": -1},
}


class Retain(_Settings, frozen=True, kw_only=True):
    """Limits of the log: committed checkpoints that trainers can go back to, and bytes.

    A full log takes no more pushed samples until a checkpoint is committed, and says so.
    """

    checkpoints: Annotated[Positive, Meta(description="committed checkpoints that trainers can go back to")] = 3
    bytes: Annotated[
        str | int,
        Meta(
            description="size at which the log takes nothing more in order of arrival until a checkpoint is committed"
        ),
    ] = "200GiB"


class Limits(_Settings, frozen=True, kw_only=True):
    """Bounds on what is believed of others: a producer's samples and messages, and how many ``peers`` there are at a
    time: producers, and readers of a feed.
    """

    sample_tokens: Annotated[
        Positive, Meta(description="tokens of the longest sample; a producer treats a longer one as over-long")
    ] = 262_144
    chunk: Annotated[
        str | int,
        Meta(description="most bytes of samples in a message, and a quarter of a partition's share of memory at most"),
    ] = "2MiB"
    peers: Annotated[int, Meta(ge=1, le=2**18, description="most producers at a time, and most readers of a feed")] = (
        16_384
    )


class BrokerConfig(_Settings, frozen=True, kw_only=True):
    """broker.yaml. ``tokens`` is the dtype of token ids: uint16 halves every byte where the vocabulary allows.

    ``state_dir``: where the log is; without one a broker that is started again reads everything again.
    ``durability``: a record counts once it survives a power cut (``os``: an fsync every 20 ms; the default where
    samples are pushed), or the end of the broker's process (``process``). ``precision``: of the model's products, where
    that is FP8; alignment follows from it.
    """

    run: Annotated[
        str, Meta(min_length=1, max_length=200, description="the run's name; the broker rejects peers of another run")
    ] = "streampack"
    listen: Listen = Listen()
    rendezvous: Annotated[
        str | None, Meta(description="file in which clients and producers find the broker's addresses")
    ] = None
    memory: Annotated[str | int, Meta(description="size of the arena, which holds all samples")] = MEMORY
    seed: Annotated[
        int, Meta(ge=0, lt=2**62, description="seed of the order of shards and samples, and of where streams begin")
    ] = 0
    merge: Annotated[
        MergeOrder,
        Meta(description="streams take turns by weight (schedule), or samples are taken in order of arrival"),
    ] = "schedule"
    state_dir: Annotated[str | None, Meta(description="folder of the log, from which a killed broker continues")] = None
    durability: Annotated[
        Literal["os", "process"] | None,
        Meta(description="a record of the log counts once it survives a power cut (os) or a kill (process)"),
    ] = None
    retain: Retain = Retain()
    tokens: Annotated[TokenType, Meta(description="type of token ids; uint16 halves their bytes")] = "int32"
    rules: RulesSettings = RulesSettings()
    planned_mesh: PlannedMesh = PlannedMesh()
    precision: Annotated[
        Precision | None, Meta(description="FP8 format of the model; packs are padded to 128, 32 or 16 tokens a rank")
    ] = None
    streams: Annotated[dict[Name, StreamSettings], Meta(min_length=1)]
    fields: Annotated[
        dict[Name, FieldSettings], Meta(description="values that samples have beside their token ids")
    ] = msgspec.field(default_factory=dict)
    feeds: Annotated[dict[Name, FeedSettings], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: {"train": FeedSettings()}
    )
    limits: Limits = Limits()
    steps_ahead: Annotated[
        int, Meta(ge=1, le=64, description="most steps formed before the slowest rank has returned the first of them")
    ] = 8
    drain_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds after SIGTERM in which trainers can take the steps that are formed")
    ] = 25.0

    @property
    def safely(self) -> Literal["os", "process"]:
        """``durability``, or its default: ``os`` if any stream is pushed, else ``process``."""
        return self.durability or ("os" if any(stream.pushed for stream in self.streams.values()) else "process")

    @property
    def run_id(self) -> int:
        """Number that identifies the run in messages."""
        return int.from_bytes(hashlib.blake2b(self.run.encode(), digest_size=7).digest(), "little") or 1

    def plan(self, feed: str | None = None) -> Rules:
        """The rules of ``feed``, by default the first. Raises ConfigError where settings contradict each other."""
        feed = next(iter(self.feeds)) if feed is None else feed
        settings = self.rules_of(feed)
        mesh, layout = self.planned_mesh, self.feeds[feed].cp_layout
        align = derived_align(mesh.cp, mesh.tp, layout, self.precision, settings.align)
        fields = tuple(field.declared(name) for name, field in self.fields.items())
        streams = tuple(
            StreamRules(
                name, stream.weight, stream.partitions, None if stream.repeat else stream.passes,
                stream.overlong or settings.overlong, stream.poison or settings.poison, stream.on_exhaust,
                stream.pushed,
            )
            for name, stream in self.streams.items()
            if name in (self.feeds[feed].streams or self.streams)
        )  # fmt: skip
        try:
            return Rules(
                **settings.packing,
                budget=settings.budget, window=settings.window.samples, align=align,
                packs=settings.step.packs or Rules().packs, batch=settings.step.batch, warmup=settings.warmup,
                balance=settings.balance.planned(self.planned_mesh.dp), tail=settings.tail,
                weight_unit=settings.weight_unit, merge=self.feeds[feed].merge or self.merge,
                between_passes=settings.between_passes, max_policy_lag=settings.max_policy_lag, seed=self.seed,
                tokens=self.tokens, fields=fields, streams=streams,
            )  # fmt: skip
        except ValueError as error:
            where = f"feeds.{feed}.rules" if self.feeds[feed].rules else "rules"
            raise ConfigError(f"{where}: {error}") from None

    def rules_of(self, feed: str) -> RulesSettings:
        """Return the run's rules with a feed's own values in place of the run's."""
        if not self.feeds[feed].rules:
            return self.rules
        over = self.feeds[feed].rules
        tree = msgspec.to_builtins(self.rules)
        if isinstance(over.get("step"), dict) and any(kind in over["step"] for kind in STEP_KINDS):
            tree["step"] |= {kind: getattr(StepSettings(), kind) for kind in STEP_KINDS}
        tree = _laid_over(tree, over)
        try:
            return msgspec.convert(tree, RulesSettings)
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(explained(error, RulesSettings, tree, f"feeds.{feed}.rules")) from None


def _laid_over(tree: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Return ``tree`` with the values of ``overlay`` in place of its own, key by key at every level."""
    both = {key: _laid_over(tree[key], value) for key, value in overlay.items() if _are_trees(tree.get(key), value)}
    return tree | overlay | both


def _are_trees(one: Any, other: Any) -> bool:
    return isinstance(one, dict) and isinstance(other, dict)


class ProducerStream(SourceSettings, frozen=True, kw_only=True):
    """A stream to read, and its tokenizer where it differs from the file's."""

    tokenizer: TokenizerSettings | None = None


class ProducerConfig(_Settings, frozen=True, kw_only=True):
    """producer.yaml. ``broker`` is the producers' endpoint, or ``file://`` and the rendezvous file; ``key_file``: the
    key that it is shown, else that of STREAMPACK_KEY_FILE.
    """

    broker: Annotated[
        str, Meta(description="the producers' address of the broker, or file:// and its rendezvous file")
    ] = "tcp://127.0.0.1:7401"
    key_file: Annotated[
        str | None, Meta(description="key that the producer shows to the broker, where the broker asks for one")
    ] = None
    processes: Annotated[
        int,
        Meta(
            ge=1, le=1024, description="number of processes that read and tokenize; changes the speed, never the steps"
        ),
    ] = 1
    tokenizer: TokenizerSettings = TokenizerSettings()
    streams: Annotated[dict[Name, ProducerStream], Meta(min_length=1)]
