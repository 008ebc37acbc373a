"""The status of a broker: the types of its snapshot, field by field.

``reporter`` takes a snapshot twice a second. ``/status`` sends it as JSON, encoded by msgspec. So names and order
of the fields are an interface, which a test records. ``/metrics``, ``/history``, systemd, ``streampack status``
and ``streampack top`` read the same fields. A new metric is one field here and one row in ``http.metrics``.

All structs are frozen. Counters count from the start of this broker process, unless the field says otherwise. "Formed"
means that FORM has chosen the packs of a step; "returned" that all ranks have returned it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from streampack.core.model.rules import Rules
from streampack_services.amounts import counted

State = Literal["starting", "serving", "waiting", "draining", "ended"]
FeedState = Literal["serving", "waiting", "ended"]
_WAITS_FOR = {"peers": "trainers", "join": "ranks", "stream": "samples", "memory": "room", "forming": "the packer"}


class WaitingFor(Struct, frozen=True, kw_only=True):
    """The reason that a feed's next step is missing."""

    reason: str
    """One of ``core.stats.data_wait.CAUSES``, or another word, such as ``failed``."""
    detail: str
    """A description for a person."""
    stream: str | None
    """The stream whose samples are missing; None for other reasons."""
    batch: bool
    """True while a program that pushes has not ended its batch, which is normal in on-policy training."""

    @property
    def text(self) -> str:
        """One line: ``waiting for trainers: no rank is attached``."""
        if self.reason == "failed":
            return self.detail
        if self.batch:
            return f"waiting for {self.detail}"
        return f"waiting for {_WAITS_FOR.get(self.reason, self.reason)}: {self.detail}"


class StepCounts(Struct, frozen=True, kw_only=True):
    """The steps of the iteration that is served."""

    formed: int
    """Steps formed."""
    returned: int
    """Steps that all ranks have returned."""
    end: int | None
    """Steps of the whole iteration; None until the broker knows it."""


class StepsLeft(Struct, frozen=True, kw_only=True):
    """An estimate of the steps that some rank has yet to return."""

    estimate: int
    """The most likely number of steps."""
    low: int
    """Lower bound, two standard deviations away, in steps."""
    high: int
    """Upper bound, two standard deviations away, in steps."""


class PackTotals(Struct, frozen=True, kw_only=True):
    """Totals over all steps formed, in all iterations."""

    steps: int
    """Steps formed."""
    packs: int
    """Packs, empty ones included. With dynamic batching: micro-batches dealt."""
    empty_packs: int
    """Packs without a sample."""
    samples: int
    """Samples in these packs."""
    tokens: int
    """Tokens of these samples, without padding. Each token that samples share counts once."""
    slot_tokens: int
    """Tokens of these samples, each padded to ``align.sample``."""
    square_tokens: int
    """Sum over packs of the square of ``tokens``."""
    square_slot_tokens: int
    """Sum over packs of the square of ``slot_tokens``."""
    dropped_samples: int
    """Samples that ``tail: drop`` left out."""
    dropped_tokens: int
    """Tokens of these samples."""
    shared_tokens: int
    """Tokens that samples share with samples before them (``share: prefix``), and that ``tokens`` counts once."""

    @property
    def shared_ratio(self) -> float:
        """``shared_tokens`` / tokens of all samples in these packs."""
        return self.shared_tokens / max(self.tokens + self.shared_tokens, 1)


class PackFigures(Struct, frozen=True, kw_only=True):
    """How full the packs are; ratios are fractions, not percent. ``core.stats.fill`` defines the figures."""

    packs: int
    """Packs."""
    tokens: int
    """Tokens in them."""
    utilization: float
    """``tokens`` / (``packs`` * budget)."""
    waste_ratio: float
    """1 - ``utilization``."""
    bin_balance: float
    """1 - standard deviation of the packs' tokens / their mean; may be negative."""
    theoretical_min_packs: int
    """Packs that the tokens alone would need."""
    packing_efficiency: float
    """``theoretical_min_packs`` / ``packs``."""


class FeedFigures(PackFigures, frozen=True, kw_only=True):
    """How full the packs are, and how evenly their cost is spread over ranks."""

    cost_max_over_mean: float
    """Cost of the most expensive pack / mean of its micro-batch; mean over all micro-batches dealt; 0 before one."""
    step_cost_max_over_mean: float
    """Cost of a step's most expensive rank / mean over its ranks; mean over all steps dealt; 0 before one."""


class LostTokens(Struct, frozen=True, kw_only=True):
    """Received tokens that no rank trains on, by cause."""

    truncated: int
    """Tokens cut off by ``overlong: truncate``."""
    dropped: int
    """Tokens of samples dropped by ``overlong: drop``."""
    policy_lag: int
    """Tokens of samples whose policy was older than ``max_policy_lag`` allows."""
    tail: int
    """Tokens that ``tail: drop`` left out."""
    skipped: int
    """Tokens of steps that were skipped."""


class TokenSpread(Struct, frozen=True, kw_only=True):
    """Tokens of a rank's step, without padding; each is a mean over all steps dealt."""

    min: float
    """Tokens of the rank with the fewest."""
    max: float
    """Tokens of the rank with the most."""
    mean: float
    """Mean over ranks, in tokens."""
    spread: float
    """``max`` - ``min``, in tokens."""


class RankTokens(Struct, frozen=True, kw_only=True):
    """Tokens of a rank's step, before and after DEAL balances the ranks."""

    before: TokenSpread
    """Before balancing: with packs dealt in the order of their numbers."""
    after: TokenSpread
    """With packs as they were dealt."""


class DealtPacks(Struct, frozen=True, kw_only=True):
    """Packs that the trainers' mesh added to batches."""

    split_packs: int
    """Packs added because a pack was split."""
    empty_packs: int
    """Empty packs added."""


class DynamicBatching(Struct, frozen=True, kw_only=True):
    """Tokens of padded micro-batches, summed over all ranks and steps."""

    valid_tokens: int
    """Tokens without padding."""
    original_tokens: int
    """Tokens of batches as wide as their longest sample."""
    actual_tokens: int
    """Tokens that ranks compute."""
    removed_padding_tokens: int
    """``original_tokens`` - ``actual_tokens``."""
    removed_padding_ratio: float
    """``removed_padding_tokens`` / ``original_tokens``, of 1."""


class Histogram(Struct, frozen=True, kw_only=True):
    """Counts of values by bucket."""

    bounds: list[float]
    """Upper bound of each bucket but the last, in the unit of the values."""
    counts: list[int]
    """``counts[i]`` values are at most ``bounds[i]`` and above the bound before; the last are above all bounds."""
    sum: float
    """Sum of the values, in their unit."""


class Histograms(Struct, frozen=True, kw_only=True):
    """The histograms of a feed."""

    pack_fill_ratio: Histogram
    """Tokens of each pack / budget, without padding, of 1."""
    pack_samples: Histogram
    """Samples of each pack."""
    next_wait_seconds: Histogram
    """Time that each rank waited for each step, in seconds."""


class MediaStatus(Struct, frozen=True, kw_only=True):
    """Media in the packs of all steps formed, in all iterations."""

    items: int
    """Media items."""
    patches: int
    """Patches of these items."""
    bytes: int
    """Bytes of these media that the broker holds and sends. For references, the bytes of the references."""
    most_items: int
    """Most items of a pack."""
    most_patches: int
    """Most patches of a pack."""
    bound_by: dict[str, int]
    """Packs with samples by the axis that is fullest: ``tokens``, ``patches`` or ``items``. An axis without a limit
    does not occur."""
    dropped: dict[str, int] = {}
    """Items that the clients of the attached ranks could not have since they began, by reason."""


class WindowStatus(Struct, frozen=True, kw_only=True):
    """Samples that are merged and not in a step yet."""

    samples: int
    """Samples in the window."""
    tokens: int
    """Their tokens, without padding."""
    oldest_steps: int
    """Steps that the oldest sample has waited."""


class WindowWaits(Struct, frozen=True, kw_only=True):
    """How long samples wait in the window, in steps."""

    p99_steps: int
    """Steps that 99 of 100 samples waited at most."""
    longest_steps: int
    """Most steps that a sample has waited."""
    bound_steps: int | None
    """Most steps that a sample can wait; None where the packer gives no bound."""
    outliers: int | None
    """Samples in the window that wait for others of similar cost (``balance: joint``); None with other packers."""


class RankStatus(Struct, frozen=True, kw_only=True):
    """One attached rank."""

    dp_rank: int
    """Data-parallel rank."""
    cp_rank: int
    """Context-parallel rank."""
    tp_rank: int
    """Tensor-parallel rank."""
    pp_rank: int
    """Pipeline stage."""
    where: str
    """Host and process id: ``host:pid``."""
    host: str
    """Host."""
    round: int
    """Iteration over the feed that the rank reads, from 0."""
    done_upto: int
    """Steps of this iteration that the rank has returned."""
    have_upto: int
    """Steps of this iteration that the rank has received."""
    queued_bytes: int
    """Bytes sent to the rank and not confirmed."""
    silent_s: float
    """Seconds since the broker heard the rank."""
    data_wait: float | None
    """Data wait over the last 10 to 20 s, as a share of the rank's time; None if not known."""
    stats: dict[str, float]
    """Figures that the client sends, by name; empty until it has sent any."""
    cost: list[float]
    """Cost of each micro-batch of the step dealt last / mean over the step; the first 64 micro-batches."""
    starved_s: dict[str, float]
    """Seconds that the rank has waited for steps since its client began, by each of ``data_wait.CAUSES``."""
    starved_streams: dict[str, float]
    """Seconds of the cause ``stream``, by stream."""
    trainer_s: float
    """Seconds that the trainer had a step and did not ask for the next."""
    step_s: float | None
    """Seconds from one step to the next, mean of the last ones; None until the client has sent it."""

    @property
    def has_reported(self) -> bool:
        """True once the client has sent its figures. Until then ``starved_s`` and ``trainer_s`` are not known."""
        return bool(self.stats)


class NodeStatus(Struct, frozen=True, kw_only=True):
    """The ranks of one host. Figures of an attached rank are None while no rank is attached."""

    host: str
    """Host."""
    ranks: int
    """Ranks of the mesh that are attached from the host, or were last."""
    attached: int
    """Ranks that are attached."""
    data_wait: float | None
    """Longest data wait of a rank over the last 10 to 20 s, as a share of its time; None if not known."""
    cause: str
    """Main cause of that wait, one of ``data_wait.CAUSES``; empty without a wait."""
    stream: str | None
    """The stream that this rank has waited for longest; None if it has waited for none."""
    worst_rank: list[int] | None
    """The rank with that wait: its numbers along dp, cp, tp and pp; None without a wait."""
    silent_s: float | None
    """Longest time since the broker heard a rank, in seconds."""
    done_upto: int | None
    """Fewest steps of this iteration that a rank has returned."""
    ahead: int | None
    """Fewest steps that a rank has received and not returned."""
    step_s: float | None
    """Longest time from one step to the next, in seconds; None until a rank has sent it."""
    cost: float | None
    """Highest cost of a rank's last step / mean over the step; None before a step was dealt."""
    queued_bytes: int
    """Bytes sent to the ranks and not confirmed."""
    relay: Literal["connected", "lost"] | None = None
    """The relay of the host; ``lost`` if it has gone without a goodbye in the last hour; None without one."""


class MeshExtent(Struct, frozen=True, kw_only=True):
    """Sizes of a mesh, as far as its ranks are attached: 1 + the highest number along each axis."""

    dp: int
    """Data-parallel ranks."""
    cp: int
    """Context-parallel ranks."""
    tp: int
    """Tensor-parallel ranks."""
    pp: int
    """Pipeline stages."""


class RanksStatus(Struct, frozen=True, kw_only=True):
    """The ranks of a feed in bounded bytes, by node.

    Nodes are listed worst first. Missing ranks count first, then silence of several pings, then data wait that other
    ranks do not cause. If these are equal, the fewest steps returned count, then data wait.
    """

    attached: int
    """Ranks that are attached."""
    left_out: int
    """Attached ranks that ``readers`` leaves out. ``/status?ranks=FIRST`` lists all, 256 at a time."""
    num_nodes: int
    """Hosts with a rank that is attached, or was last."""
    nodes: list[NodeStatus]
    """The 64 worst nodes, worst first."""
    nodes_left_out: int
    """Nodes that ``nodes`` leaves out. ``/status?node=HOST`` shows any node with its ranks."""
    age_s: float
    """Age of the oldest figure of a rank, in seconds: the broker reads 1,024 ranks every half second."""
    mesh: MeshExtent | None
    """The mesh of the attached ranks; None without one."""
    longest_silence_s: float
    """Longest time since the broker heard an attached rank, in seconds."""
    longest_waits: dict[str, float]
    """Longest data wait of a rank over the last 3 to 5 minutes as a share of its time, by each of ``CAUSES``."""
    starved_s: dict[str, float]
    """Seconds that ranks have waited for data since this broker began, by cause, ranks that left included."""


class RankPage(Struct, frozen=True, kw_only=True):
    """Some ranks of a feed, in their order: the answer to ``/status?node=HOST`` and ``/status?ranks=FIRST``."""

    feed: str
    """Name of the feed."""
    node: NodeStatus | None
    """The node that was asked for."""
    first: int
    """Attached ranks of the node, or of the feed, before the first that is listed."""
    attached: int
    """Attached ranks of the node, or of the feed."""
    readers: list[RankStatus]
    """At most 256 ranks."""


class FeedRules(Rules, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False):
    """The rules of a feed, without those that have their default, and their digest."""

    digest: str
    """32 hex digits that name the rules."""


class FeedStatus(Struct, frozen=True, kw_only=True):
    """One feed."""

    state: FeedState
    """``ended`` when the end of the iteration is known, ``waiting`` while ``stalled_s`` is set, else ``serving``."""
    stalled_s: float | None
    """Seconds since the last step, if a rank waits for data for 5 s or more; else None."""
    waiting_for: WaitingFor | None
    """The cause that delays the next step; None at the end of the feed and while the broker drains."""
    round: int
    """Iteration over the feed that is served, from 0."""
    steps: StepCounts
    """Steps of this iteration."""
    lineage: int
    """Number of the history of steps that the feed is on, from 0."""
    recorded_steps: int
    """Steps of this lineage that the log has recorded, over the life of the log."""
    committed: int | None
    """Step at which the last durable checkpoint begins; None before one."""
    steps_left: StepsLeft | None
    """Steps left of the iteration; None where they cannot be estimated."""
    totals: PackTotals
    """Totals over all steps formed."""
    figures: FeedFigures
    """How full the packs are, by ``totals.tokens``."""
    padded_figures: PackFigures
    """How full the packs are, by ``totals.slot_tokens``."""
    waste_tokens: dict[str, int]
    """Padding of the packs delivered, in tokens, by each of ``core.stats.padding.CAUSES``."""
    delivered_tokens: int
    """Tokens of the packs delivered, padding included."""
    lost_tokens: LostTokens
    """Received tokens that no rank trains on."""
    rank_tokens: RankTokens
    """Tokens of a rank's step."""
    dealt: DealtPacks
    """Packs that the trainers' mesh added."""
    dynamic_batching: DynamicBatching | None
    """Padding that dynamic batching removes; None without ``padded: true``."""
    lengths: list[tuple[int, int]]
    """(samples, tokens) of each bucket of lengths that holds any, shortest first."""
    waiting_lengths: list[tuple[int, int]] = []
    """The same of the samples that are merged and not in a step yet."""
    fills: list[tuple[float, int]]
    """(upper bound of the fill ratio, packs) of each bucket of ``histograms.pack_fill_ratio``."""
    histograms: Histograms
    """Histograms of packs and of waits."""
    tokens_per_s: float
    """Tokens formed per second over the last 5 seconds, without padding."""
    readers: list[RankStatus]
    """The ranks that are attached, in order. If there are more than 1,024: the 64 worst, worst first."""
    ranks: RanksStatus
    """All ranks, by node."""
    queued_bytes: int
    """Bytes sent to ranks and not confirmed."""
    queued_limit_bytes: int
    """Most bytes that may be sent to ranks and not confirmed."""
    resent_bytes: int
    """Bytes sent to ranks again because they were lost."""
    num_ranks: int
    """Ranks of the trainers' mesh that read."""
    all_ranks_attached: bool
    """True while every rank of the mesh is attached."""
    window: WindowStatus
    """Samples that are not in a step yet."""
    waits: WindowWaits
    """How long samples wait in the window."""
    held_tokens: int
    """Tokens merged and not yet returned by all ranks."""
    held_limit_tokens: int
    """Most tokens that may be held."""
    rules: FeedRules
    """The rules that the feed began with."""
    media: MediaStatus | None = None
    """Media in the packs formed; None for a feed without fields of axis item or patch."""


class StreamCredits(Struct, frozen=True, kw_only=True):
    """Tokens of a stream that may wait for the merge."""

    granted_tokens: int
    """Tokens that may wait."""
    used_tokens: int
    """Tokens that wait."""


class StreamLag(Struct, frozen=True, kw_only=True):
    """Credit of a stream: samples and tokens that producers may still send."""

    samples: int
    """Samples that have not come."""
    tokens: int
    """Tokens that have not come: ``granted_tokens`` - ``used_tokens``."""


class LateStatus(Struct, frozen=True, kw_only=True):
    """Pushed samples of a stream that wait for values of late fields."""

    samples: int
    """Samples that wait."""
    oldest_s: float
    """Seconds that the oldest of them has waited, since the broker started or the sample came; 0 if none waits."""
    fields: list[str]
    """Fields that this sample lacks."""
    refused: dict[str, int] = {}
    """Samples for which values came that are not trained, by reason, since the broker started."""


class StreamStatus(Struct, frozen=True, kw_only=True):
    """One stream of a feed."""

    stream: str
    """Name of the stream."""
    feed: str
    """Name of its feed."""
    weight: float
    """Its weight among the streams of the feed; 0 after it was removed."""
    partitions: int
    """Partitions of the stream."""
    ended_partitions: int
    """Partitions that have ended."""
    samples: int
    """Samples taken from producers."""
    tokens: int
    """Tokens taken from producers and kept."""
    overlong: int
    """Samples that the over-long policy cut, split or dropped."""
    lost_tokens: int
    """Tokens that the over-long policy cut off or dropped."""
    rejected: dict[str, int]
    """Samples that could not be used and were dropped, by reason."""
    warnings: dict[str, int]
    """Delivered samples with a warning, by word of ``core.stats.sample_warnings``; a piece of a split sample counts."""
    producers: int
    """Producers that offer the stream."""
    hosts: list[str]
    """The first of their hosts, by name."""
    last_seen_s: float | None
    """Seconds since the broker heard a producer of the stream; None if it never did."""
    credits: StreamCredits
    """Tokens that may wait for the merge."""
    lag: StreamLag
    """Samples and tokens that have not come."""
    late: LateStatus | None = None
    """Samples that wait for late fields; None for a stream without late fields."""


class MemoryStatus(Struct, frozen=True, kw_only=True):
    """Memory use of the arena, which holds the tokens and fields of all samples."""

    arena_bytes: int
    """Size of the arena, in bytes."""
    token_bytes: int
    """Bytes of one token with its fields."""
    live_tokens: int
    """Tokens held."""
    moved_tokens: int
    """Tokens copied within the arena to make room."""
    partition_limit_tokens: int
    """Most tokens of one partition that may wait for the merge."""
    media_bytes: int = 0
    """Bytes of the media of the samples held. They are outside the arena, and count in ``memory``."""


class LogStatus(Struct, frozen=True, kw_only=True):
    """The broker's log on disk. Records are counted over the life of the log."""

    durability: Literal["os", "process"]
    """The failure that a record survives: a power cut (``os``), or a crash of the broker (``process``)."""
    bytes: int
    """Size of the log's files."""
    limit_bytes: int
    """Most bytes that the files may take: ``retain.bytes``."""
    records: int
    """Records appended."""
    first_record: int
    """Number of the oldest record that is kept."""
    unsafe_records: int
    """Records that are not yet as safe as ``durability`` asks."""
    syncs: int
    """Syncs to disk."""
    sync_seconds: float
    """Time spent in syncs, in seconds."""
    stalled: str
    """The reason that the log takes no more records; empty while it takes them."""
    warning: str
    """The fault of the log's disk or ledger, and what to do; empty without one."""
    free_bytes: int
    """Free bytes of the log's disk."""


class StandbyStatus(Struct, frozen=True, kw_only=True):
    """The standby of the active broker."""

    name: str
    """Name of the standby; empty if none is connected."""
    is_member: bool
    """True if the standby has every safe record, so that it may take over."""
    lag_records: int
    """Records that the standby does not have on its disk yet."""
    stalled: str
    """The reason that no new steps are served; empty while they are."""
    unreachable: str
    """The reason that the arbiter cannot be reached; empty if it can, as far as is known."""
    entry: int
    """Number of the newest entry of the arbiter."""


class MessageCounts(Struct, frozen=True, kw_only=True):
    """Messages and connections that went wrong."""

    damaged: int
    """Messages that cannot be decoded."""
    refused: int
    """Producers and clients that the broker refused."""
    unsent: int
    """Messages that the broker could not send."""
    foreign: int
    """Messages of another run or of a newer broker."""
    strangers: int
    """Connections of peers whose key is not allowed."""
    cut: int
    """Connections that the broker cut because the peer sent too much."""


class RelayStatus(Struct, frozen=True, kw_only=True):
    """The relay of one host."""

    host: str
    """Host."""
    lost: bool
    """True if it has gone without a goodbye in the last hour, and is not back."""
    ranks: int
    """Ranks that read through it."""
    queued_bytes: int
    """Bytes sent to it and not confirmed."""


class RelaysStatus(Struct, frozen=True, kw_only=True):
    """The relays of all feeds in bounded bytes."""

    connected: int
    """Relays that are connected."""
    lost: int
    """Relays that have gone without a goodbye in the last hour."""
    ranks: int
    """Ranks that read through a relay."""
    hosts: list[RelayStatus]
    """At most 64 relays: lost ones first, then those with the most queued bytes."""

    @property
    def text(self) -> str:
        """One line, such as ``2 relays, 16 ranks; lost: gpu3``; empty without a relay."""
        if not self.connected and not self.lost:
            return ""
        said = f"{counted(self.connected, 'relay')}, {counted(self.ranks, 'rank')}"
        named = ", ".join(relay.host for relay in self.hosts[:3] if relay.lost)
        more = f" and {self.lost - 3} more" if self.lost > 3 else ""
        return f"{said}; lost: {named}{more}" if named else said


class BrokerStatus(Struct, frozen=True, kw_only=True):
    """A snapshot of a broker."""

    version: str
    """Version of streampack."""
    run: str
    """Name of the run."""
    epoch: int
    """Number of this broker process: the time at which it began, in nanoseconds since 1970."""
    endpoints: dict[str, str]
    """Addresses for ``producers`` and ``trainers``."""
    taken_at: float
    """Time of the snapshot, in seconds since 1970."""
    uptime_s: float
    """Seconds since the broker began."""
    state: State
    """``waiting`` while ``stalled_s`` is set, ``ended`` when all feeds have."""
    stalled_s: float | None
    """The longest ``stalled_s`` of the feeds; None if no rank waits for data for 5 s or more."""
    ready: bool
    """True while the broker serves: not while it starts or drains."""
    feeds: dict[str, FeedStatus]
    """The feeds, by name."""
    streams: list[StreamStatus]
    """The streams of all feeds."""
    producers: int
    """Producers that are connected."""
    vanished_producers: int
    """Producers that went without a goodbye: they fell silent or started again."""
    relays: RelaysStatus
    """The relays of trainer hosts."""
    memory: MemoryStatus
    """The arena."""
    log: LogStatus | None
    """The log; None without ``state_dir``."""
    standby: StandbyStatus | None
    """The standby; None without ``standby`` in broker.yaml."""
    messages: MessageCounts
    """Messages and connections that went wrong."""
    form_seconds: float
    """Time spent in FORM, in seconds."""
    sent_tokens: int
    """Tokens sent to trainers, padding included."""
