"""Settings that users write in broker.yaml and producer.yaml: one typed, frozen struct for each file.

The structs hold the keys with their types, defaults and descriptions; only ``streams`` has no default. From them
``BrokerConfig.plan`` makes the rules of a feed. Values of a wrong type are errors in ``typed_yaml``, and values that
contradict each other in ``config_validation``.
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
"""Default size of a broker's arena."""
Name = Annotated[str, Meta(min_length=1, max_length=200)]
"""A name short enough for a message."""


class _Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all settings: unknown keys are errors."""


class Listen(_Settings, frozen=True, kw_only=True):
    """Addresses at which the broker listens, and who may connect.

    Addresses of ``producers`` and ``trainers`` are ``tcp://host:port`` (``*`` for a free port) or ``ipc:///path``. The
    address ``http`` is ``host:port``. Without ``token_file``, the variable STREAMPACK_HTTP_TOKEN may hold the token.
    """

    producers: Annotated[
        str,
        Meta(
            description="Address for producers: `tcp://host:port` or `ipc:///path`. Use `tcp://0.0.0.0:7401` if "
            "producers run on other machines"
        ),
    ] = "tcp://127.0.0.1:7401"
    trainers: Annotated[
        str,
        Meta(
            description="Address for trainers: `tcp://host:port` or `ipc:///path`. Use `tcp://0.0.0.0:7402` if "
            "trainers run on other machines"
        ),
    ] = "tcp://127.0.0.1:7402"
    http: Annotated[
        str, Meta(description="Address (`host:port`) of the HTTP server: metrics, status, health, changes to the run")
    ] = "127.0.0.1:7400"
    control: Annotated[
        Literal["loopback", "any"],
        Meta(
            description="Clients that may change the run over HTTP: those on this machine (`loopback`), or every "
            "client that can connect (`any`)"
        ),
    ] = "loopback"
    keys: Annotated[
        str | None,
        Meta(
            description="Folder of keys that `streampack keys new` made. With it, producers and trainers need a key, "
            "and their traffic is encrypted. Without it, anyone who can connect may take part"
        ),
    ] = None
    token_file: Annotated[
        str | None,
        Meta(
            description="File with a token that every HTTP client must send. Default: the variable "
            "`STREAMPACK_HTTP_TOKEN`, else no token"
        ),
    ] = None


class WindowSettings(_Settings, frozen=True, kw_only=True):
    """Size of the window that the packer chooses from."""

    samples: Annotated[
        Positive,
        Meta(
            description="Samples that wait in the window, from which the packer chooses. A larger window packs fuller "
            "and mixes the order more"
        ),
    ] = 1024


STEP_KINDS = ("packs", "samples", "end_of_batch")
"""Units of a step; a feed that sets one overrides the run's."""


class StepSettings(_Settings, frozen=True, kw_only=True):
    """Size of a step: a number of ``packs`` over all data-parallel ranks (default 64), or a batch packed by itself.

    A batch is a number of whole ``samples``, or the samples up to the producers' ``end_of_batch``. The other keys are
    for batches; ``core.model.rules.Batch`` explains each.
    """

    packs: Annotated[
        Positive | None,
        Meta(
            description="Packs of one optimizer step, over all data-parallel ranks. Default: 64, if neither `samples` "
            "nor `end_of_batch` is set"
        ),
    ] = None
    samples: Annotated[
        Annotated[int, Meta(ge=1, le=2**24)] | None,
        Meta(
            description="Samples of one optimizer step, in place of `packs`. They are packed by themselves, into as "
            "many packs as they need"
        ),
    ] = None
    end_of_batch: Annotated[
        bool,
        Meta(
            description="Let the programs that push samples end each step: a step is all samples before "
            "`end_of_batch`. It takes the place of `packs`"
        ),
    ] = False
    min_samples: Annotated[
        Positive,
        Meta(
            description="With `end_of_batch`, the fewest samples of a step. The samples of a smaller batch wait for "
            "the next `end_of_batch`"
        ),
    ] = 1
    micro_batch_multiple: Annotated[
        Annotated[int, Meta(ge=1, le=2**16)] | None,
        Meta(
            description="For batches: give each rank a multiple of this many micro-batches. Default: the number of "
            "pipeline stages"
        ),
    ] = None
    min_micro_batches: Annotated[
        int, Meta(ge=1, le=2**16, description="For batches: the fewest micro-batches of each rank in a step")
    ] = 1
    empty: Annotated[
        Literal["pad", "error"],
        Meta(
            description="For batches with too few samples for all ranks: give the other ranks empty packs (`pad`), or "
            "stop all ranks (`error`)"
        ),
    ] = "pad"

    @property
    def batch(self) -> Batch | None:
        """Settings of a batch for the rules; None if steps are counted in packs. Raises ValueError for two units."""
        given = [key for key in STEP_KINDS if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(
                f"step: got {' and '.join(given)}, expected one of {', '.join(STEP_KINDS)}: remove the others"
            )
        of_batches = {key: getattr(self, key) for key in Batch.__struct_fields__ if key != "samples"}
        if given in ([], ["packs"]):
            for key, value in of_batches.items():
                if value != getattr(StepSettings(), key):
                    raise ValueError(
                        f"step: got {key}, which is for batches: set step.samples or step.end_of_batch, or remove it"
                    )
            return None
        return Batch(samples=self.samples, **of_batches)


class PlannedMesh(_Settings, frozen=True, kw_only=True):
    """The mesh that the run is planned for. Keys of ``align`` that are not set follow from it."""

    dp: Annotated[
        Positive,
        Meta(
            description="Number of data-parallel ranks planned. It must divide the packs of a step; trainers may "
            "later connect with another number that does"
        ),
    ] = 1
    cp: Annotated[
        Positive,
        Meta(description="Number of context-parallel ranks planned. The default alignment of samples follows from it"),
    ] = 1
    tp: Annotated[
        Positive,
        Meta(description="Number of tensor-parallel ranks planned. The default alignment of packs follows from it"),
    ] = 1


class RulesSettings(_Settings, frozen=True, kw_only=True):
    """Settings of planning: packing, steps and balance. ``core.model.rules`` explains what follows from each."""

    packer: Annotated[
        PackerName,
        Meta(description="Algorithm that chooses the samples of a pack. The default needs the least padding"),
    ] = "exact_fill"
    budget: Annotated[
        Positive,
        Meta(
            description="Tokens of a pack, padding included: the sequence length of the model's input. Lower it if a "
            "GPU runs out of memory"
        ),
    ] = 8192
    window: WindowSettings = WindowSettings()
    max_samples_per_pack: Annotated[
        Positive | None, Meta(description="Most samples of a pack. Default: only the budget limits a pack")
    ] = None
    leftovers: Annotated[
        Leftovers | None,
        Meta(
            description="For the packer `modified_first_fit_decreasing`: how to pack the samples that remain after "
            "its size classes: longest first (`decreasing`), or into the emptiest pack (`emptiest`). Default: "
            "`decreasing`"
        ),
    ] = None
    micro_batch_size: Annotated[
        Positive | None, Meta(description="For the packer `none`: number of consecutive samples in a pack")
    ] = None
    padded: Annotated[
        bool,
        Meta(
            description="Build micro-batches of padded rows, one sample per row, as many as fit the budget (dynamic "
            "batching). For models that cannot take packed samples"
        ),
    ] = False
    align: AlignSettings | None = None
    shape: Annotated[
        Shape,
        Meta(
            description="Length of a pack as trainers get it: always the budget (`fixed`), the pack's own tokens "
            "(`exact`), or the next of a few sizes. `fixed` suits compiled models; the others save computation"
        ),
    ] = "fixed"
    step: StepSettings = StepSettings()
    warmup: Annotated[
        Warmup | None, Meta(description="Start with a smaller budget that grows over the first steps. Default: none")
    ] = None
    balance: Balance = Balance()
    overlong: Annotated[
        Overlong,
        Meta(
            description="Treatment of samples longer than the budget. `error` stops with an error, `drop` leaves them "
            "out and counts them, `truncate` cuts off their end, and `split` divides them into several samples"
        ),
    ] = "error"
    poison: Annotated[
        Poison,
        Meta(
            description="Treatment of samples that cannot be used, such as invalid JSON. `error` stops with an error, "
            "`drop` leaves them out and counts them"
        ),
    ] = "error"
    tail: Annotated[
        Literal["pad", "drop"],
        Meta(
            description="If the last samples do not fill a step: fill it up with empty packs (`pad`), or leave out "
            "these samples (`drop`)"
        ),
    ] = "pad"
    weight_unit: Annotated[
        WeightUnit, Meta(description="Unit in which streams get their shares: `tokens` or `samples`")
    ] = "tokens"
    between_passes: Annotated[
        BetweenPasses,
        Meta(
            description="Transition between two passes over all data. With `continue` a step may hold samples of "
            "both; with `drain` each pass ends with its own step"
        ),
    ] = "continue"
    max_policy_lag: Annotated[
        Annotated[int, Meta(ge=0, lt=2**62)] | None,
        Meta(
            description="For pushed samples: drop those whose policy is more than this many versions behind the "
            "newest. Default: keep all"
        ),
    ] = None

    @property
    def packing(self) -> dict[str, Any]:
        """Packing keys for the rules: ``packer`` and its options, ``shape`` and ``padded``.

        With ``padded``, keys left at their defaults become ``packer: none``, ``micro_batch_size: 1``, ``shape: exact``.
        """
        found = {key: getattr(self, key) for key in ("packer", *PACKER_KEYS, "shape", "padded")}
        alone = {"packer": "none", "micro_batch_size": 1, "shape": "exact"} if self.padded else {}
        return found | {key: value for key, value in alone.items() if found[key] == getattr(RulesSettings(), key)}


class StreamSettings(_Settings, frozen=True, kw_only=True):
    """Settings of a stream: its share of the feed, its passes and partitions, and its treatment of bad samples."""

    weight: Annotated[
        float,
        Meta(
            gt=0,
            le=1e9,
            description="Share of the stream in the feed, relative to the weights of the other streams. "
            "`rules.weight_unit` is its unit",
        ),
    ] = 1.0
    passes: Annotated[Positive, Meta(description="Number of passes over the stream's data")] = 1
    repeat: Annotated[
        bool, Meta(description="Read the stream's data again and again, without end, instead of `passes` times")
    ] = False
    partitions: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Fixed parts of the stream's files, each read by one producer process at a time. Set at least "
            "the number of producer processes; it cannot change during a run",
        ),
    ] = 4
    on_exhaust: Annotated[
        OnExhaust,
        Meta(
            description="At the end of the stream's last pass: the other streams share its weight (`renormalise`), or "
            "the feed ends (`stop`)"
        ),
    ] = "renormalise"
    overlong: Annotated[
        Overlong | None,
        Meta(description="Treatment of this stream's samples longer than the budget. Default: `rules.overlong`"),
    ] = None
    poison: Annotated[
        Poison | None,
        Meta(description="Treatment of this stream's samples that cannot be used. Default: `rules.poison`"),
    ] = None
    pushed: Annotated[
        bool,
        Meta(
            description="A program sends the samples with `streampack.Producer`, for example in reinforcement "
            "learning. They cannot be read again, so the log keeps them"
        ),
    ] = False


class FeedSettings(_Settings, frozen=True, kw_only=True):
    """Settings of a feed that trainers connect to: its streams (default: all), and its own values of ``rules``."""

    streams: Annotated[
        tuple[str, ...], Meta(description="Streams that the feed mixes; each stream is in one feed. Default: all")
    ] = ()
    merge: Annotated[
        MergeOrder | None, Meta(description="Order of the feed's samples: see `merge` of the run, which is the default")
    ] = None
    on_rewind: Annotated[
        Literal["replay", "discard"],
        Meta(
            description="When trainers resume from an older checkpoint: give the pushed samples since then in the "
            "same steps again (`replay`), or drop them (`discard`)"
        ),
    ] = "replay"
    cp_layout: Annotated[
        Literal["zigzag", "zigzag_pack", "contiguous", "whole"],
        Meta(
            description="Division of a pack over context-parallel ranks. `zigzag` divides each sample, `zigzag_pack` "
            "the pack, `contiguous` gives consecutive parts, and `whole` gives every rank the whole pack"
        ),
    ] = "zigzag"
    rules: Annotated[
        dict[str, Any], Meta(description="Keys of `rules` for this feed alone. Other keys keep the run's values")
    ] = {}


class FieldSettings(_Settings, frozen=True, kw_only=True):
    """A field: values that samples have beside their token ids. ``core.model.fields`` explains each key.

    The names ``loss_mask``, ``labels``, ``position_ids``, ``group`` and ``policy_version`` have a meaning and their own
    defaults: ``{}`` declares such a field.
    """

    dtype: Annotated[
        DType | None, Meta(description="Type of the field's values. Required, except for fields with a known name")
    ] = None
    axis: Annotated[
        Literal["token", "sample", "item", "patch"] | None,
        Meta(
            description="The field has one value for each `token`, `sample`, `item` or `patch`. Default: `token`, "
            "except for fields with a known name"
        ),
    ] = None
    shape: Annotated[
        tuple[Positive, ...], Meta(description="Shape of one value, such as `[4]`. Default: a single number")
    ] = ()
    align: Annotated[
        Literal["token", "target"] | None,
        Meta(
            description="Value t belongs to token t (`token`), or to the prediction of token t, so that it is shifted "
            "with the labels (`target`). Default: `token`, except for `loss_mask` and `labels`"
        ),
    ] = None
    pad: Annotated[
        int | float | None, Meta(description="Value of the field at padding. Default: 0, for `labels` -100")
    ] = None
    default: Annotated[
        int | float | None,
        Meta(description="Value for samples that lack the field. Default: such a sample is rejected"),
    ] = None
    cp: Annotated[
        Literal["slice", "replicate"],
        Meta(
            description="Each context-parallel rank gets the values of its own tokens (`slice`), or of the whole pack "
            "(`replicate`)"
        ),
    ] = "slice"

    def declared(self, name: str) -> Field:
        """Return the declared field ``name`` with all defaults filled in. Raises ConfigError."""
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
    """Limits of the log: number of committed checkpoints that it keeps, and bytes.

    A full log takes no more pushed samples until a checkpoint is committed; the broker logs a warning.
    """

    checkpoints: Annotated[
        Positive,
        Meta(description="Number of committed checkpoints from which trainers can resume; older ones leave the log"),
    ] = 3
    bytes: Annotated[
        str | int,
        Meta(
            description="Size of the log at which it takes no more samples in order of arrival. It goes on when "
            "trainers commit a checkpoint"
        ),
    ] = "200GiB"


class Limits(_Settings, frozen=True, kw_only=True):
    """Limits on samples, messages and the number of peers; the broker rejects what exceeds them."""

    sample_tokens: Annotated[
        Positive,
        Meta(
            description="Most tokens of a sample that a producer sends. The setting `overlong` decides about a longer "
            "one"
        ),
    ] = 262_144
    chunk: Annotated[
        str | int,
        Meta(
            description="Most bytes of samples in one message from a producer, such as `2MiB`. It is also limited to "
            "a quarter of a partition's share of `memory`"
        ),
    ] = "2MiB"
    peers: Annotated[
        int,
        Meta(
            ge=1,
            le=2**18,
            description="Most producers connected at a time, and most trainer ranks of a feed. Each costs some memory",
        ),
    ] = 16_384


class BrokerConfig(_Settings, frozen=True, kw_only=True):
    """The settings in broker.yaml."""

    run: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            description="Name of the run. The broker rejects producers and trainers of a run with another name",
        ),
    ] = "streampack"
    listen: Listen = Listen()
    rendezvous: Annotated[
        str | None,
        Meta(
            description="File on a shared file system into which the broker writes its addresses. Producers and "
            "trainers then connect to `file://` and this path. For jobs whose hosts are not known in advance"
        ),
    ] = None
    memory: Annotated[
        str | int,
        Meta(
            description="Size of the arena, which holds all samples that are not delivered yet. Write for example "
            "`16GiB`; the broker reserves it at its start"
        ),
    ] = MEMORY
    seed: Annotated[
        int,
        Meta(
            ge=0,
            lt=2**62,
            description="Seed of the order of shards and samples, of the merge, and of packers that shuffle. The same "
            "seed gives the same steps",
        ),
    ] = 0
    merge: Annotated[
        MergeOrder,
        Meta(
            description="Order of samples from several streams. `schedule` follows the weights and is the same in "
            "every run; `arrival` is the order in which samples come, which pushed streams need"
        ),
    ] = "schedule"
    state_dir: Annotated[
        str | None,
        Meta(
            description="Folder of the log, on a local disk. With it, a restarted broker continues where it stopped. "
            "Default: no log, and a restarted broker reads the data again"
        ),
    ] = None
    durability: Annotated[
        Literal["os", "process"] | None,
        Meta(
            description="A record of the log is safe once it survives a power failure (`os`: fsync every 20 ms), or "
            "the end of the broker's process (`process`). Default: `os` with pushed streams, else `process`"
        ),
    ] = None
    retain: Retain = Retain()
    tokens: Annotated[
        TokenType,
        Meta(description="Type of token ids. `uint16` halves memory and traffic, for vocabularies of up to 65,536 ids"),
    ] = "int32"
    rules: RulesSettings = RulesSettings()
    planned_mesh: PlannedMesh = PlannedMesh()
    precision: Annotated[
        Precision | None,
        Meta(
            description="FP8 format of the model's matrix products, if any. Packs are padded to the multiple that it "
            "needs on each rank: 128 (`fp8_blockwise`), 32 (`mxfp8`) or 16 (`fp8`) tokens"
        ),
    ] = None
    streams: Annotated[dict[Name, StreamSettings], Meta(min_length=1)]
    fields: Annotated[
        dict[Name, FieldSettings],
        Meta(description="Fields by name: values that samples have beside their token ids, such as a loss mask"),
    ] = msgspec.field(default_factory=dict)
    feeds: Annotated[dict[Name, FeedSettings], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: {"train": FeedSettings()}
    )
    limits: Limits = Limits()
    steps_ahead: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Most steps that are formed ahead of the slowest rank. A higher number hides longer delays of "
            "producers and costs memory",
        ),
    ] = 8
    drain_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after SIGTERM during which trainers can still fetch steps that are already formed. "
            "Keep it below the scheduler's grace period, often 30 s",
        ),
    ] = 25.0

    @property
    def safely(self) -> Literal["os", "process"]:
        """The durability that applies: the key's value, or by default ``os`` with a pushed stream, else ``process``."""
        return self.durability or ("os" if any(stream.pushed for stream in self.streams.values()) else "process")

    @property
    def run_id(self) -> int:
        """Number that identifies the run in messages, a hash of its name."""
        return int.from_bytes(hashlib.blake2b(self.run.encode(), digest_size=7).digest(), "little") or 1

    def plan(self, feed: str | None = None) -> Rules:
        """Return the rules of ``feed``, by default the first feed. Raises ConfigError if settings contradict."""
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
    """Return whether both values are mappings."""
    return isinstance(one, dict) and isinstance(other, dict)


class ProducerStream(SourceSettings, frozen=True, kw_only=True):
    """A source of one stream, and its tokenizer if it differs from that of the whole file."""

    tokenizer: TokenizerSettings | None = None


class ProducerConfig(_Settings, frozen=True, kw_only=True):
    """The settings in producer.yaml."""

    broker: Annotated[
        str,
        Meta(
            description="The broker's address for producers (`listen.producers` in broker.yaml), or `file://` and the "
            "path of its rendezvous file"
        ),
    ] = "tcp://127.0.0.1:7401"
    key_file: Annotated[
        str | None,
        Meta(
            description="File with the producer's key, if the broker has `listen.keys`. Default: the file that the "
            "variable `STREAMPACK_KEY_FILE` names"
        ),
    ] = None
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Number of processes that read and tokenize. Raise it if trainers wait for data; the steps "
            "stay the same",
        ),
    ] = 1
    tokenizer: TokenizerSettings = TokenizerSettings()
    streams: Annotated[dict[Name, ProducerStream], Meta(min_length=1)]
