"""Settings that users write in broker.yaml and producer.yaml: one typed, frozen struct for each file.

The structs hold the keys with their types, defaults and descriptions; only ``streams`` has no default. From them
``BrokerConfig.plan`` makes the rules of a feed. Values of a wrong type are errors in ``typed_yaml``, and values that
contradict each other in ``config_validation``.
"""

from __future__ import annotations

import hashlib
import socket
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from streampack.config.alignment import AlignSettings, Precision, derived_align
from streampack.config.typed_yaml import explained
from streampack.core.model.fields import (
    GROUP,
    LABELS,
    LOSS_MASK,
    POLICY_VERSION,
    POSITION_IDS,
    DType,
    Field,
    Placeholder,
)
from streampack.core.model.rules import (
    LATE_TIMEOUT_S,
    PACKER_KEYS,
    Balance,
    Batch,
    BetweenPasses,
    MediaLimits,
    MergeOrder,
    NoLossTokens,
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
from streampack.core.model.samples import IGNORE_INDEX, Share
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
        str,
        Meta(
            description="Address (`host:port`) of the HTTP server for metrics, status, health checks and changes "
            "to the run"
        ),
    ] = "127.0.0.1:7400"
    control: Annotated[
        Literal["loopback", "any"],
        Meta(
            description="Clients that may change the run over HTTP: only clients on this machine (`loopback`), or "
            "every client that can connect (`any`)"
        ),
    ] = "loopback"
    keys: Annotated[
        str | None,
        Meta(
            description="Folder of keys made by `streampack keys new`. If this is set, producers and trainers need a "
            "key, and their traffic is encrypted. If not, the broker accepts anyone who can connect"
        ),
    ] = None
    token_file: Annotated[
        str | None,
        Meta(
            description="File with a token that every HTTP client must send. Default: the token in the environment "
            "variable `STREAMPACK_HTTP_TOKEN`. If neither is set, clients need no token"
        ),
    ] = None


class WindowSettings(_Settings, frozen=True, kw_only=True):
    """Size of the window that the packer chooses from."""

    samples: Annotated[
        Positive,
        Meta(
            description="Number of samples in the window, from which the packer chooses. A larger window gives "
            "fuller packs and mixes the order more"
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
            description="Number of packs in one optimizer step, over all data-parallel ranks. Default: 64, unless "
            "`samples` or `end_of_batch` is set"
        ),
    ] = None
    samples: Annotated[
        Annotated[int, Meta(ge=1, le=2**24)] | None,
        Meta(
            description="Number of samples in one optimizer step. Each step gets as many packs as its samples need. "
            "Set this instead of `packs`"
        ),
    ] = None
    end_of_batch: Annotated[
        bool,
        Meta(
            description="Let the programs that push samples end each step by a call of `end_of_batch`. Set this "
            "instead of `packs`"
        ),
    ] = False
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

    @property
    def batch(self) -> Batch | None:
        """Settings of a batch for the rules; None if steps are counted in packs. Raises ValueError for two units."""
        given = [key for key in STEP_KINDS if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(
                f"step: got {' and '.join(given)}, expected only one of {', '.join(STEP_KINDS)}. Remove the others"
            )
        of_batches = {key: getattr(self, key) for key in Batch.__struct_fields__ if key != "samples"}
        if given in ([], ["packs"]):
            for key, value in of_batches.items():
                if value != getattr(StepSettings(), key):
                    raise ValueError(
                        f"step: got {key} without samples or end_of_batch, expected one of these two keys. Set one of "
                        f"them, or remove {key}"
                    )
            return None
        return Batch(samples=self.samples, **of_batches)


class PlannedMesh(_Settings, frozen=True, kw_only=True):
    """The mesh that the run is planned for. Keys of ``align`` that are not set follow from it."""

    dp: Annotated[
        Positive,
        Meta(
            description="Planned number of data-parallel ranks, which must divide the number of packs in a step. "
            "Trainers may later connect with another divisor"
        ),
    ] = 1
    cp: Annotated[
        Positive,
        Meta(
            description="Planned number of context-parallel ranks. This number determines the default alignment of "
            "samples"
        ),
    ] = 1
    tp: Annotated[
        Positive,
        Meta(
            description="Planned number of tensor-parallel ranks. This number determines the default alignment of packs"
        ),
    ] = 1


class StalenessSettings(_Settings, frozen=True, kw_only=True):
    """Settings of the age of pushed samples, in versions of the policy that made them."""

    max_policy_lag: Annotated[
        Annotated[int, Meta(ge=0, lt=2**62)] | None,
        Meta(
            description="Maximum number of versions by which the policy of a pushed sample may be older than the "
            "newest policy. Default: no maximum"
        ),
    ] = None
    on_exceed: Annotated[
        Literal["drop", "wait"],
        Meta(
            description="With `drop`, older samples are dropped and counted. With `wait`, none gets older: programs "
            "ask with `Producer.wait_to_start` before they generate samples, and the oldest samples are packed first. "
            "This needs `step: {samples: N}`"
        ),
    ] = "drop"


class RulesSettings(_Settings, frozen=True, kw_only=True):
    """Settings of planning: packing, steps and balance. ``core.model.rules`` explains what follows from each."""

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
    window: WindowSettings = WindowSettings()
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
    align: AlignSettings | None = None
    shape: Annotated[
        Shape,
        Meta(
            description="Length of the packs that trainers get. `fixed` is the budget, and `exact` is the number of "
            "the pack's tokens. Other values allow a few sizes, of which the smallest that holds the pack is used. "
            "`fixed` suits compiled models; the other shapes save computation"
        ),
    ] = "fixed"
    step: StepSettings = StepSettings()
    warmup: Annotated[
        Warmup | None,
        Meta(description="Start with a smaller budget that grows over the first steps. Default: no warmup"),
    ] = None
    balance: Balance = Balance()
    overlong: Annotated[
        Overlong,
        Meta(
            description="Treatment of samples longer than the budget. `error` stops with an error, `drop` drops and "
            "counts the sample, `truncate` removes its end, and `split` divides it into several samples"
        ),
    ] = "error"
    poison: Annotated[
        Poison,
        Meta(
            description="Treatment of samples that cannot be used, such as invalid JSON: stop with an error "
            "(`error`), or drop and count the sample (`drop`)"
        ),
    ] = "error"
    no_loss_tokens: Annotated[
        NoLossTokens,
        Meta(
            description="Treatment of samples of which no token counts in the loss, also after a cut by `overlong`. "
            "`train` delivers and counts them, `drop` drops and counts them, and `error` stops with an error"
        ),
    ] = "train"
    tail: Annotated[
        Literal["pad", "drop"],
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
    staleness: StalenessSettings = StalenessSettings()
    late_timeout_s: Annotated[
        int,
        Meta(
            ge=1,
            lt=2**31,
            description="Seconds that a pushed sample waits for its late fields. Then `default` of the field is used; "
            "a sample that lacks a field without `default` is dropped and counted",
        ),
    ] = LATE_TIMEOUT_S
    limits: Annotated[
        MediaLimits | None, Meta(description="Hard limits of a pack for the media of its samples, beside the budget")
    ] = None
    share: Annotated[
        Share | None,
        Meta(
            description='With `prefix`, groups that producers send with `share="prefix"` are trees: the model '
            'computes their shared first tokens once. Trainers then need FlexAttention, with `masks="flex"`. '
            "Default: no sharing"
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
    on_exhaust: Annotated[
        OnExhaust,
        Meta(
            description="Action when the stream's last pass ends: let the other streams share its weight "
            "(`renormalise`), or end the feed (`stop`)"
        ),
    ] = "renormalise"
    overlong: Annotated[
        Overlong | None,
        Meta(
            description="Treatment of this stream's samples that are longer than the budget. Default: `rules.overlong`"
        ),
    ] = None
    poison: Annotated[
        Poison | None,
        Meta(description="Treatment of this stream's samples that cannot be used. Default: `rules.poison`"),
    ] = None
    no_loss_tokens: Annotated[
        NoLossTokens | None,
        Meta(
            description="Treatment of this stream's samples of which no token counts in the loss. Default: "
            "`rules.no_loss_tokens`"
        ),
    ] = None
    pushed: Annotated[
        bool,
        Meta(
            description="Receive the stream's samples from a program that uses `streampack.Producer`, for example in "
            "reinforcement learning. The log keeps these samples, because they cannot be read again"
        ),
    ] = False


class FeedSettings(_Settings, frozen=True, kw_only=True):
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
    rules: Annotated[
        dict[str, Any],
        Meta(description="Values of `rules` keys that apply only to this feed. Other keys keep the run's values"),
    ] = {}


class FieldSettings(_Settings, frozen=True, kw_only=True):
    """A field: values that samples have beside their token ids. ``core.model.fields`` explains each key.

    The names ``loss_mask``, ``labels``, ``position_ids``, ``group`` and ``policy_version`` have a meaning and their own
    defaults: ``{}`` declares such a field.
    """

    dtype: Annotated[
        DType | None,
        Meta(
            description="Type of the field's values. Required, except for `loss_mask`, `labels`, `position_ids`, "
            "`group` and `policy_version`"
        ),
    ] = None
    axis: Annotated[
        Literal["token", "sample", "item", "patch"] | None,
        Meta(
            description="Unit that each value of the field describes: one `token`, `sample`, `item` or `patch`. "
            "Default: `sample` for the fields `group` and `policy_version`, `token` for all others"
        ),
    ] = None
    shape: Annotated[
        tuple[Positive, ...], Meta(description="Shape of one value, such as `[4]`. Default: a single number")
    ] = ()
    align: Annotated[
        Literal["token", "target"] | None,
        Meta(
            description="Meaning of value t: it belongs to token t (`token`), or to the prediction of token t and is "
            "shifted together with the labels (`target`). Default: `target` for `loss_mask` and `labels`, else "
            "`token`"
        ),
    ] = None
    pad: Annotated[
        int | float | None, Meta(description="Value of the field at padding. Default: -100 for `labels`, else 0")
    ] = None
    default: Annotated[
        int | float | None,
        Meta(description="Value for samples that lack the field. Without a default value, such samples are rejected"),
    ] = None
    cp: Annotated[
        Literal["slice", "replicate"],
        Meta(
            description="Values that each context-parallel rank gets: the values of its own tokens (`slice`), or the "
            "values of the whole pack (`replicate`)"
        ),
    ] = "slice"
    late: Annotated[
        bool,
        Meta(
            description="The values come after the sample, for example rewards that another process computes. A pushed "
            "sample is packed once `Producer.amend` has given it all its late fields"
        ),
    ] = False
    placeholder: Annotated[
        Placeholder | None,
        Meta(
            description="The tokens that stand for media items. A sample with more or fewer of them than its items "
            "need is rejected by `poison`. Default: tokens are not compared with items"
        ),
    ] = None

    def declared(self, name: str) -> Field:
        """Return the declared field ``name`` with all defaults filled in. Raises ConfigError."""
        known = _KNOWN_FIELDS.get(name, {})
        given = {key: value for key, value in msgspec.structs.asdict(self).items() if value is not None}
        if "dtype" not in given | known:
            raise ConfigError(
                f"fields.{name}: got a field without `dtype`, expected one of: {', '.join(get_args(DType))}"
            )
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
        Meta(
            description="Number of committed checkpoints from which trainers can resume. The log deletes data that "
            "only older checkpoints need"
        ),
    ] = 3
    bytes: Annotated[
        str | int,
        Meta(
            description="Maximum size of the log. When the log reaches this size, the broker accepts no more pushed "
            "samples until trainers commit a checkpoint"
        ),
    ] = "200GiB"


class Limits(_Settings, frozen=True, kw_only=True):
    """Limits on samples, messages and the number of peers; the broker rejects what exceeds them."""

    sample_tokens: Annotated[
        Positive,
        Meta(
            description="Maximum number of tokens in a sample that a producer sends. The setting `overlong` "
            "determines the treatment of longer samples"
        ),
    ] = 262_144
    chunk: Annotated[
        str | int,
        Meta(
            description="Maximum bytes of samples in one message from a producer, such as `2MiB`. A message may also "
            "use at most a quarter of a partition's share of `memory`"
        ),
    ] = "2MiB"
    peers: Annotated[
        int,
        Meta(
            ge=1,
            le=2**18,
            description="Maximum number of producers that are connected at a time, and of trainer ranks in a feed. "
            "Each connection uses some memory",
        ),
    ] = 16_384
    keys: Annotated[
        int,
        Meta(
            ge=1,
            le=2**28,
            description="Maximum number of keys that the broker remembers for each pushed stream, until the writing "
            "job commits. Each key uses about 100 bytes of memory",
        ),
    ] = 1_048_576


class StandbySettings(_Settings, frozen=True, kw_only=True):
    """A second broker on another host, which has a copy of the log and takes over if the first one is lost.

    Both hosts have the same broker.yaml, except for ``name``, ``address``, ``listen`` and ``state_dir``.
    """

    arbiter: Annotated[
        str,
        Meta(
            min_length=1,
            description="Place that decides which broker is active. It is a path on a file system that both hosts "
            "share, a URL such as `s3://bucket/my-run`, or a Lease, `kubernetes:///NAME`. Each run "
            "needs a place of its own",
        ),
    ]
    listen: Annotated[
        str,
        Meta(
            description="Address at which the active broker sends its log to the standby: `tcp://host:port` with a "
            "fixed port"
        ),
    ] = "tcp://0.0.0.0:7403"
    address: Annotated[
        str | None,
        Meta(
            description="Address at which the other host reaches `listen`; `{name}` stands for the name of this host. "
            "Default: `listen` with this host's name in place of `0.0.0.0`"
        ),
    ] = None
    name: Annotated[
        Name | None,
        Meta(
            description="Name of this host, which must differ from the other's. Default: the host name",
        ),
    ] = None
    on_loss: Annotated[
        Literal["stall", "go_on"],
        Meta(
            description="Behavior of the active broker when it loses the standby. `stall` serves no new steps until a "
            "standby has the log. `go_on` serves them without a copy"
        ),
    ] = "stall"
    takeover_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=600.0,
            description="Seconds without a message after which the standby takes over, and after which the active "
            "broker counts the standby as lost",
        ),
    ] = 5.0

    @property
    def host(self) -> str:
        """The name of this host."""
        return self.name or socket.gethostname()


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
            description="File on a shared file system where the broker writes its addresses. Producers and trainers "
            "then connect to `file://` followed by this path. Use this if the broker's host is not known in advance"
        ),
    ] = None
    memory: Annotated[
        str | int,
        Meta(
            description="Size of the arena, such as `16GiB`. The arena is the memory for samples that are not "
            "delivered yet; the broker reserves it at startup"
        ),
    ] = MEMORY
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
    state_dir: Annotated[
        str | None,
        Meta(
            description="Folder of the log, on a local disk. With a log, a restarted broker continues where it "
            "stopped. Default: no log, so a restarted broker reads the data again"
        ),
    ] = None
    durability: Annotated[
        Literal["os", "process"] | None,
        Meta(
            description="Failure that the log's records survive: a power failure (`os`, which calls fsync every 20 "
            "ms), or only a crash of the broker's process (`process`). Default: `os` if a stream is pushed, else "
            "`process`"
        ),
    ] = None
    retain: Retain = Retain()
    standby: Annotated[
        StandbySettings | None,
        Meta(
            description="Settings of a second broker on another host, which copies the log and takes over when this "
            "host is lost. Without it, a broker whose host is lost must be started again where its `state_dir` is"
        ),
    ] = None
    tokens: Annotated[
        TokenType,
        Meta(
            description="Type of token ids. `uint16` halves memory and traffic, but limits the vocabulary to 65,536 ids"
        ),
    ] = "int32"
    rules: RulesSettings = RulesSettings()
    planned_mesh: PlannedMesh = PlannedMesh()
    precision: Annotated[
        Precision | None,
        Meta(
            description="FP8 format of the model's matrix products. It sets the multiple of tokens that packs are "
            "padded to on each rank: 128 (`fp8_blockwise`), 32 (`mxfp8`) or 16 (`fp8`). Default: no FP8"
        ),
    ] = None
    streams: Annotated[dict[Name, StreamSettings], Meta(min_length=1)]
    fields: Annotated[
        dict[Name, FieldSettings],
        Meta(
            description="Fields by name. A field holds values that samples have in addition to their token ids, such "
            "as a loss mask"
        ),
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
            description="Maximum number of steps that the broker forms ahead of the slowest rank. A higher number "
            "hides longer delays of producers but uses more memory",
        ),
    ] = 8
    drain_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after SIGTERM during which trainers can still fetch steps that are already formed. "
            "Keep this time below the scheduler's grace period, which is often 30 s",
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

    @property
    def digest(self) -> bytes:
        """Digest of the settings that decide the steps, 16 bytes. Raises ConfigError if settings contradict."""
        rules = "\n".join(f"{feed} {self.plan(feed).digest}" for feed in self.feeds)
        return hashlib.blake2b(rules.encode(), digest_size=16).digest()

    def plan(self, feed: str | None = None) -> Rules:
        """Return the rules of ``feed``, by default the first feed. Raises ConfigError if settings contradict."""
        feed = next(iter(self.feeds)) if feed is None else feed
        settings = self.rules_of(feed)
        mesh, layout = self.planned_mesh, self.feeds[feed].cp_layout
        align = derived_align(mesh.cp, mesh.tp, layout, self.precision, settings.align)
        declared = tuple(field.declared(name) for name, field in self.fields.items())
        fields, media_fields = (tuple(each for each in declared if each.of_media is media) for media in (False, True))
        streams = tuple(
            StreamRules(
                name, stream.weight, stream.partitions, None if stream.repeat else stream.passes,
                stream.overlong or settings.overlong, stream.poison or settings.poison, stream.on_exhaust,
                stream.pushed, stream.no_loss_tokens or settings.no_loss_tokens,
            )
            for name, stream in self.streams.items()
            if name in (self.feeds[feed].streams or self.streams)
        )  # fmt: skip
        late_s = None if settings.late_timeout_s == LATE_TIMEOUT_S else settings.late_timeout_s
        try:
            return Rules(
                **settings.packing,
                budget=settings.budget, window=settings.window.samples, align=align,
                packs=settings.step.packs or Rules().packs, batch=settings.step.batch, warmup=settings.warmup,
                balance=settings.balance.planned(self.planned_mesh.dp), tail=settings.tail,
                weight_unit=settings.weight_unit, merge=self.feeds[feed].merge or self.merge,
                between_passes=settings.between_passes, max_policy_lag=settings.staleness.max_policy_lag,
                paces=settings.staleness.on_exceed == "wait", seed=self.seed,
                late_timeout_s=late_s, share=settings.share, tokens=self.tokens, fields=fields,
                media_fields=media_fields, limits=settings.limits,
                streams=streams,
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
            description="The broker's address for producers (`listen.producers` in broker.yaml), or `file://` "
            "followed by the path of the broker's rendezvous file. Addresses of a broker and of another one that may "
            "take over are separated by commas"
        ),
    ] = "tcp://127.0.0.1:7401"
    key_file: Annotated[
        str | None,
        Meta(
            description="File with the producer's key, which is required if the broker sets `listen.keys`. Default: "
            "the path in the environment variable `STREAMPACK_KEY_FILE`"
        ),
    ] = None
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Number of processes that read and tokenize. Raise this number if trainers wait for data; "
            "the content of the steps does not change",
        ),
    ] = 1
    tokenizer: TokenizerSettings = TokenizerSettings()
    streams: Annotated[dict[Name, ProducerStream], Meta(min_length=1)]
