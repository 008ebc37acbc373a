"""The status of a broker: the types of its snapshot, field by field.

``reporter`` takes a snapshot twice a second. ``/status`` sends it as JSON, encoded by msgspec. So names and order
of the fields are an interface, which a test records. ``/metrics``, ``/history``, systemd, ``streampack status``
and ``streampack top`` read the same fields. ``streampack_services.figure`` says how to add a figure.

All structs are frozen. Counters count from the start of this broker process, unless the field says otherwise. "Formed"
means that FORM has chosen the packs of a step; "returned" that all ranks have returned it.
"""

from __future__ import annotations

import platform
from typing import Annotated, Literal

from msgspec import Struct

from streampack.core.model.rules import Rules
from streampack_services.amounts import counted
from streampack_services.broker.causes.headline import Headline
from streampack_services.broker.causes.waiting_for import WaitingFor
from streampack_services.broker.changes.change_status import ChangesStatus
from streampack_services.broker.ranks.rank_status import RanksStatus, RankStatus
from streampack_services.figure import Series, counter, gauge, histogram

State = Literal["starting", "serving", "waiting", "draining", "ended"]
FeedState = Literal["serving", "waiting", "ended"]
PADDING_LABELS = {"pack_tail": "end of pack", "empty_pack": "empty packs"}
"""Words for causes of padding, if they differ from their keys."""


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

    steps: Annotated[int, counter("steps", "Steps formed.")]
    packs: Annotated[int, counter("packs", "Packs formed, empty packs included.")]
    """Packs, empty ones included. With dynamic batching: micro-batches dealt."""
    empty_packs: int
    """Packs without a sample."""
    samples: Annotated[int, counter("packed_samples", "Samples in the packs formed.")]
    tokens: Annotated[int, counter("packed_tokens", "Real tokens in the packs formed.")]
    slot_tokens: int
    """Tokens of these samples, each padded to ``align.sample``."""
    square_tokens: int
    """Sum over packs of the square of ``tokens``."""
    square_slot_tokens: int
    """Sum over packs of the square of ``slot_tokens``."""
    dropped_samples: Annotated[int, counter(
        "tail_dropped_samples", "Samples left out at the end of each iteration by `tail: drop`.")]  # fmt: skip
    dropped_tokens: int
    """Tokens of these samples."""
    shared_tokens: Annotated[int, counter(
        "shared_tokens", "Tokens that samples share with samples before them in a pack; packed_tokens counts them "
        "once.")]  # fmt: skip

    @gauge("shared_ratio", "Shared tokens / tokens of the samples in the packs formed, since the start.")
    def shared_ratio(self) -> float:
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


class AlignedFigures(PackFigures, frozen=True, kw_only=True):
    """How full the packs are, with each sample padded to ``align.sample``."""

    utilization: Annotated[
        float, gauge("padded_utilization_ratio", "Utilization, with each sample padded to align.sample.")
    ]
    packing_efficiency: Annotated[
        float, gauge("padded_packing_efficiency_ratio", "Packing efficiency, with each sample padded to align.sample.")
    ]
    bin_balance: Annotated[
        float, gauge("padded_bin_balance_ratio", "Bin balance, with each sample padded to align.sample.")
    ]


class FeedFigures(PackFigures, frozen=True, kw_only=True):
    """How full the packs are, and how evenly their cost is spread over ranks."""

    utilization: Annotated[
        float, gauge("utilization_ratio", "Utilization: real tokens / (packs * budget), since the start.")
    ]
    waste_ratio: Annotated[float, gauge("waste_ratio", "Padding ratio: 1 - utilization.")]
    packing_efficiency: Annotated[
        float, gauge("packing_efficiency_ratio", "Packing efficiency: fewest packs for the tokens / packs formed.")
    ]
    bin_balance: Annotated[float, gauge(
        "bin_balance_ratio", "Bin balance: 1 - standard deviation / mean of tokens per pack; may be < 0.",
        unit="quotient")]  # fmt: skip
    cost_max_over_mean: Annotated[float, gauge(
        "cost_max_over_mean_ratio", "Load imbalance: max / mean cost over the packs of a micro-batch, mean over "
        "micro-batches; 1.0 is perfect.", unit="quotient")]  # fmt: skip
    """Cost of the most expensive pack / mean of its micro-batch; mean over all micro-batches dealt; 0 before one."""
    step_cost_max_over_mean: Annotated[float, gauge(
        "step_cost_max_over_mean_ratio", "Load imbalance: max / mean cost over the ranks of a step, mean over steps; "
        "1.0 is perfect.", unit="quotient")]  # fmt: skip
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

    split_packs: Annotated[int, counter(
        "split_packs", "Packs added by splitting packs, because the trainers' mesh needed more packs.")]  # fmt: skip
    empty_packs: Annotated[int, counter(
        "added_empty_packs", "Empty packs added because the trainers' mesh needed more packs.")]  # fmt: skip


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
    removed_padding_ratio: Annotated[float, gauge(
        "removed_padding_ratio", "Share of the original tokens that dynamic batching removes.")]  # fmt: skip

    @counter(
        "dynamic_batching_tokens",
        "Tokens of padded micro-batches: without padding (valid), padded to the longest sample of the batch "
        "(original), as computed (actual), original - actual (removed_padding).",
        "kind",
    )
    def kinds(self) -> dict[str, int]:
        kinds = ("valid", "original", "actual", "removed_padding")
        return {kind: getattr(self, f"{kind}_tokens") for kind in kinds}


class GroupsStatus(Struct, frozen=True, kw_only=True):
    """Groups of ranks of dynamic context parallelism, summed over steps.

    They are compared with static context parallelism whose size is the smallest with room for a step's longest sample.
    """

    groups: Annotated[dict[str, int], counter(
        "cp_groups", "Groups of ranks that shared a pack with `cp: dynamic`, by their number of ranks.", "ranks",
        label="groups by ranks", shown=True)]  # fmt: skip
    """Groups with samples, by their number of ranks."""
    exchanged_tokens: Annotated[dict[str, int], counter(
        "cp_exchanged_tokens", "Tokens that ranks get in a ring from others of their group. With the label static, the "
        "longest sample of a step sets the size of all groups.", "cp")]  # fmt: skip
    saved_exchange_ratio: Annotated[float | None, gauge(
        "saved_exchange_ratio", "Share of the tokens exchanged by static context parallelism that groups of ranks "
        "save.", label="exchange saved", shown=True)]  # fmt: skip
    """None where static context parallelism has no exchange either."""
    chunk_padding_tokens: Annotated[dict[str, int], counter(
        "cp_chunk_padding_tokens", "Padding of samples to 2 chunks for each rank of their group. With the label "
        "static, the longest sample of a step sets the size of all groups.", "cp")]  # fmt: skip
    saved_chunk_padding_ratio: Annotated[float | None, gauge(
        "saved_chunk_padding_ratio", "Share of the padding of static context parallelism to chunks that groups of "
        "ranks save.", label="padding saved", shown=True)]  # fmt: skip
    """None where static context parallelism has no such padding either."""


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

    pack_fill_ratio: Annotated[Histogram, histogram(
        "pack_fill_ratio", "Real tokens / budget of each pack formed; 0 is an empty pack.")]  # fmt: skip
    pack_samples: Annotated[Histogram, histogram("pack_samples", "Samples of each pack formed.")]
    next_wait_seconds: Annotated[Histogram, histogram("next_wait_seconds", "Data wait of each rank for each step.")]


class MediaStatus(Struct, frozen=True, kw_only=True):
    """Media in the packs of all steps formed, in all iterations."""

    items: Annotated[int, counter("media_items", "Media items in the packs formed. Only of feeds with media.")]
    patches: Annotated[int, counter("media_patches", "Patches of these media items.")]
    bytes: int
    """Bytes of these media that the broker holds and sends. For references, the bytes of the references."""
    most_items: int
    """Most items of a pack."""
    most_patches: int
    """Most patches of a pack."""
    bound_by: Annotated[dict[str, int], counter(
        "media_bound_packs", "Packs formed, by the axis that is fullest compared with its limit: tokens, patches or "
        "items. Only of feeds with media.", "axis")]  # fmt: skip
    """Packs with samples by the axis that is fullest: ``tokens``, ``patches`` or ``items``. An axis without a limit
    does not occur."""
    dropped: dict[str, int] = {}
    """Items that the clients of the attached ranks could not have since they began, by reason."""


class WindowStatus(Struct, frozen=True, kw_only=True):
    """Samples that are merged and not in a step yet."""

    samples: Annotated[int, gauge("window_samples", "Samples in the window: merged but not in a step yet.")]
    tokens: Annotated[int, gauge("window_tokens", "Tokens of the samples in the window.")]
    oldest_steps: Annotated[int, gauge("window_oldest_steps", "Wait of the oldest sample in the window, in steps.")]


class WindowWaits(Struct, frozen=True, kw_only=True):
    """How long samples wait in the window, in steps."""

    p99_steps: Annotated[int, gauge("wait_p99_steps", "99th percentile of a sample's wait in the window, in steps.")]
    longest_steps: Annotated[int, gauge(
        "longest_wait_steps", "Longest wait of a sample in the window so far, in steps.")]  # fmt: skip
    bound_steps: Annotated[int | None, gauge(
        "wait_bound_steps", "Longest wait in the window that the packer allows for a sample, in steps.")]  # fmt: skip
    """Most steps that a sample can wait; None where the packer gives no bound."""
    outliers: Annotated[int | None, gauge(
        "outliers_waiting", "Samples in the window that wait for samples of similar "
        "cost (`balance: joint`).")]  # fmt: skip


class DisplacementStatus(Struct, frozen=True, kw_only=True):
    """Steps between samples and their turns, in the last 100 steps that this broker formed."""

    p50: int
    """Median of the absolute displacement."""
    p99: int
    """Its 99th percentile."""
    early: int
    """Most steps that a sample left before its turn."""
    late: int
    """Most steps that a sample left after its turn."""


class MeanLength(Struct, frozen=True, kw_only=True):
    """Mean tokens of a sample."""

    recent: float
    """In the last 100 recorded steps."""
    total: float
    """In all steps that this broker formed."""


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
    """The reason that the next step is missing; None at the end of the feed and while the broker drains. In a busy
    pipeline it changes with every step."""
    headline: Headline
    """The cause that delays training, or that there is none, as ``status``, ``top`` and the page show it."""
    round: Annotated[int, gauge("round", "Number of the current iteration over the feed, from 0.")]
    steps: StepCounts
    """Steps of this iteration."""
    lineage: int
    """Number of the history of steps that the feed is on, from 0."""
    recorded_steps: int
    """Steps of this lineage that the log has recorded, over the life of the log."""
    committed: Annotated[int | None, gauge(
        "committed_step", "Step at which a resume from the last durable checkpoint begins.")]  # fmt: skip
    steps_left: Annotated[StepsLeft | None, gauge(
        "steps_left", "Steps left in this iteration: the estimate, and its bounds at "
        "two standard deviations.", "bound")]  # fmt: skip
    totals: PackTotals
    """Totals over all steps formed."""
    figures: FeedFigures
    """How full the packs are, by ``totals.tokens``."""
    padded_figures: AlignedFigures
    """How full the packs are, by ``totals.slot_tokens``."""
    waste_tokens: Annotated[dict[str, int], counter(
        "waste_tokens", "Padding in the packs delivered, in tokens, by cause.", "cause")]  # fmt: skip
    """Padding of the packs delivered, in tokens, by each of ``core.stats.padding.CAUSES``."""
    delivered_tokens: Annotated[int, counter("delivered_tokens", "Tokens of the packs delivered, padding included.")]
    lost_tokens: Annotated[LostTokens, counter(
        "untrained_tokens", "Received tokens that no rank trains on, by the policy "
        "that excluded them.", "policy")]  # fmt: skip
    rank_tokens: Annotated[RankTokens, gauge(
        "rank_tokens", "Real tokens per rank in a step, before and after balancing, mean "
        "over steps.", "when", "figure")]  # fmt: skip
    dealt: DealtPacks
    """Packs that the trainers' mesh added."""
    dynamic_batching: DynamicBatching | None
    """Padding that dynamic batching removes; None without ``padded: true``."""
    groups: GroupsStatus | None
    """Groups of ranks; None without ``cp: dynamic``."""
    lengths: list[tuple[int, int]]
    """(samples, tokens) of each bucket of lengths that holds any, shortest first."""
    waiting_lengths: list[tuple[int, int]] = []
    """The same of the samples that are merged and not in a step yet."""
    mean_length: Annotated[MeanLength | None, gauge(
        "mean_sample_tokens", "Mean tokens of a sample: in the last 100 steps (recent), and in all steps that this "
        "broker formed (total).", "over", label="mean length")] = None  # fmt: skip
    """None before a step."""
    displacement: Annotated[DisplacementStatus | None, gauge(
        "displacement_steps", "Steps between a sample and its turn in merge order, in the last 100 steps: "
        "percentiles without sign, most steps early and late.", "figure",
        label="displacement")] = None  # fmt: skip
    """None before a step. ``core.stats.displacement`` defines it."""
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
    queued_bytes: Annotated[int, gauge("queued_bytes", "Bytes sent to ranks and not yet confirmed.")]
    queued_limit_bytes: Annotated[int, gauge(
        "queued_limit_bytes", "Limit of bytes sent to ranks and not yet confirmed.")]  # fmt: skip
    resent_bytes: Annotated[int, counter("resent_bytes", "Bytes sent to ranks again after they were lost.")]
    num_ranks: Annotated[int, gauge("readers_expected", "Ranks of the trainers' mesh that read the feed.")]
    all_ranks_attached: bool
    """True while every rank of the mesh is attached."""
    window: WindowStatus
    """Samples that are not in a step yet."""
    waits: WindowWaits
    """How long samples wait in the window."""
    held_tokens: Annotated[int, gauge("held_tokens", "Tokens merged but not yet returned by all ranks.")]
    held_limit_tokens: Annotated[int, gauge("held_limit_tokens", "Limit of tokens that the feed holds.")]
    rules: FeedRules
    """The rules that the feed began with."""
    changes: ChangesStatus
    """The rules in force, the changes that wait, and the last that took effect."""
    media: MediaStatus | None = None
    """Media in the packs formed; None for a feed without fields of axis item or patch."""

    @gauge("delayed", "1 while something delays the feed's training; the label names the cause, as `streampack status` "
           "does.", "cause")  # fmt: skip
    def delays(self) -> dict[str, int]:
        return {self.headline.cause: 1} if self.headline.cause else {}

    @gauge("ended", "1 after all ranks have returned the last step of this iteration, else 0.")
    def has_ended(self) -> bool:
        return self.steps.end is not None and self.steps.returned >= self.steps.end

    @Series("dp_rank", "cp_rank", "tp_rank", "pp_rank", "host")
    def listed_ranks(self) -> list[RankStatus]:
        """The ranks that have series of their own: all, or none of too many."""
        return [] if self.ranks.left_out else self.readers


class StreamCredits(Struct, frozen=True, kw_only=True):
    """Tokens of a stream that may wait for the merge."""

    granted_tokens: Annotated[int, gauge(
        "stream_granted_tokens", "Credit of the stream: limit of tokens that wait for the merge.")]  # fmt: skip
    used_tokens: Annotated[int, gauge("stream_used_tokens", "Tokens of the stream that wait for the merge.")]


class StreamLag(Struct, frozen=True, kw_only=True):
    """Credit of a stream: samples and tokens that producers may still send."""

    samples: Annotated[int, gauge("stream_lag_samples", "Samples that producers have credit for but have not sent.")]
    tokens: Annotated[int, gauge("stream_lag_tokens", "Tokens that producers have credit for but have not sent.")]
    """Tokens that have not come: ``granted_tokens`` - ``used_tokens``."""


class LateStatus(Struct, frozen=True, kw_only=True):
    """Pushed samples of a stream that wait for values of late fields."""

    samples: Annotated[int, gauge("late_samples", "Samples that wait for values of late fields.")]
    oldest_s: Annotated[float, gauge("late_oldest_seconds", "Seconds that the oldest of these samples has waited.")]
    """Seconds that the oldest of them has waited, since the broker started or the sample came; 0 if none waits."""
    fields: list[str]
    """Fields that this sample lacks."""
    refused: Annotated[dict[str, int], counter(
        "late_refused_samples", "Samples whose values came too late or were "
        "refused, by reason.", "reason")] = {}  # fmt: skip


class StreamStatus(Struct, frozen=True, kw_only=True):
    """One stream of a feed."""

    stream: str
    """Name of the stream."""
    feed: str
    """Name of its feed."""
    weight: Annotated[float, gauge(
        "stream_weight", "Weight of a stream among the streams of its feed; 0 after its removal.", unit="weight",
        label="weight")]  # fmt: skip
    share: Annotated[float | None, gauge(
        "stream_share_ratio", "Share of the next samples that the weights in force give to the stream. Weights of "
        "streams that have ended or wait for the next pass go to the others.", label="share")]  # fmt: skip
    """In tokens, or in samples with ``weight_unit: samples``; None with ``merge: arrival``, which has no weights."""
    recent_share: Annotated[float | None, gauge(
        "recent_share_ratio", "Share of the stream in the samples of the last 100 recorded steps, in the unit of the "
        "weights: tokens, or samples with `weight_unit: samples`.", label="recent")] = None  # fmt: skip
    """None before a step."""
    ended: Annotated[bool, gauge("stream_ended", "1 after all samples of the stream are merged, else 0.")]
    passes: Annotated[int | None, gauge(
        "stream_passes", "Whole passes over the data of the stream that producers have sent.",
        label="passes")]  # fmt: skip
    """None for a pushed stream."""
    trained_samples: Annotated[int, gauge(
        "trained_samples", "Samples of the stream in steps that every rank has returned. Each recorded step counts "
        "once, over the life of the log.")]  # fmt: skip
    trained_tokens: Annotated[int, gauge(
        "trained_tokens", "Tokens of the stream in steps that every rank has returned. Each recorded step counts "
        "once, over the life of the log.")]  # fmt: skip
    """Each sample counts with all its tokens, also with shared ones. ``core.stats.trained_samples`` has the rules."""
    trained_share: Annotated[float | None, gauge(
        "trained_ratio", "Trained tokens of the stream / trained tokens of all streams of its feed.")]  # fmt: skip
    """None before a step was returned."""
    partitions: int
    """Partitions of the stream."""
    ended_partitions: int
    """Partitions that have ended."""
    samples: Annotated[int, counter("received_samples", "Samples received from producers.", label="samples")]
    tokens: Annotated[int, counter("received_tokens", "Tokens received from producers and kept.", label="received")]
    overlong: Annotated[int, counter(
        "overlong_samples", "Samples that the over-long policy truncated, split or dropped.")]  # fmt: skip
    lost_tokens: Annotated[int, counter("lost_tokens", "Tokens that the over-long policy truncated or dropped.")]
    rejected: Annotated[dict[str, int], counter(
        "rejected_samples", "Samples that could not be used and were dropped, by reason.", "reason")]  # fmt: skip
    warnings: Annotated[dict[str, int], counter(
        "sample_warnings", "Delivered samples that may not mean what you intend, by warning.", "warning")]  # fmt: skip
    """Delivered samples with a warning, by word of ``core.stats.sample_warnings``; a piece of a split sample counts."""
    producers: Annotated[int, gauge("stream_producers", "Producers that offer the stream.")]
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

    arena_bytes: Annotated[int, gauge("arena_capacity_bytes", "Size of the arena.")]
    token_bytes: Annotated[int, gauge("arena_token_bytes", "Bytes per token, including the values of its fields.")]
    live_tokens: Annotated[int, gauge("arena_live_tokens", "Tokens held in the arena.")]
    moved_tokens: Annotated[int, counter("arena_moved_tokens", "Tokens copied within the arena to make room.")]
    partition_limit_tokens: int
    """Most tokens of one partition that may wait for the merge."""
    media_bytes: int = 0
    """Bytes of the media of the samples held. They are outside the arena, and count in ``memory``."""


class LogStatus(Struct, frozen=True, kw_only=True):
    """The broker's log on disk. Records are counted over the life of the log."""

    durability: Literal["os", "process"]
    """The failure that a record survives: a power cut (``os``), or a crash of the broker (``process``)."""
    bytes: Annotated[int, gauge("log_bytes", "Size of the log's files.")]
    limit_bytes: Annotated[int, gauge("log_limit_bytes", "Most bytes of the log's files: retain.bytes.")]
    records: Annotated[int, counter("log_records", "Records appended since the log began.")]
    first_record: int
    """Number of the oldest record that is kept."""
    unsafe_records: Annotated[int, gauge(
        "log_unsafe_records", "Records that are not yet stored as the durability setting requires.")]  # fmt: skip
    syncs: Annotated[int, counter("log_syncs", "Syncs of the log to disk.")]
    sync_seconds: Annotated[float, counter("log_sync_seconds", "Time spent in syncs of the log.")]
    stalled: Annotated[str, gauge(
        "log_stalled", "1 while the log accepts no records: the disk or retain.bytes is full.")]  # fmt: skip
    """The reason that the log takes no more records; empty while it takes them."""
    warning: Annotated[str, gauge(
        "log_warning", "1 while the log's disk has no space for the next segment, or old segments "
        "cannot be deleted.")]  # fmt: skip
    """The fault of the log's disk or ledger, and what to do; empty without one."""
    free_bytes: Annotated[int, gauge("log_disk_free_bytes", "Free bytes of the log's disk.")]


class StandbyStatus(Struct, frozen=True, kw_only=True):
    """The standby of the active broker."""

    name: str
    """Name of the standby; empty if none is connected."""
    is_member: Annotated[bool, gauge(
        "standby_member", "1 if a standby has every safe record, so that it may take over.")]  # fmt: skip
    lag_records: Annotated[int, gauge("standby_lag_records", "Records that the standby does not have on its disk yet.")]
    stalled: Annotated[str, gauge(
        "standby_stalled", "1 while no new steps are served, because the standby does not have them.")]  # fmt: skip
    """The reason that no new steps are served; empty while they are."""
    unreachable: str
    """The reason that the arbiter cannot be reached; empty if it can, as far as is known."""
    entry: int
    """Number of the newest entry of the arbiter."""


BAD_MESSAGES = {
    "damaged": "damaged", "refused": "from refused peers", "foreign": "of another run",
    "strangers": "from peers without an allowed key", "cut": "connections cut",
}  # fmt: skip
"""Words for the counts of ``MessageCounts`` that are faults of peers. A peer that is gone causes ``unsent`` ones."""


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

    @property
    def bad(self) -> int:
        """Number of messages and connections that peers are at fault for."""
        return sum(getattr(self, reason) for reason in BAD_MESSAGES)

    @property
    def bad_text(self) -> str:
        """Numbers of bad messages by reason, such as '3 damaged, 1 of another run'; empty without any."""
        counts = ((getattr(self, reason), words) for reason, words in BAD_MESSAGES.items())
        return ", ".join(f"{count:,} {words}" for count, words in counts if count)


class RelayStatus(Struct, frozen=True, kw_only=True):
    """The relay of one host."""

    host: str
    """Host."""
    lost: bool
    """True if it has gone without a goodbye in the last hour, and is not back."""
    ranks: Annotated[int, gauge("relay_ranks", "Ranks that read through the relay of a host. At most 64 relays.")]
    queued_bytes: Annotated[int, gauge(
        "relay_queued_bytes", "Bytes sent to the relay of a host and not yet confirmed. At "
        "most 64 relays.")]  # fmt: skip

    @gauge(
        "relay_up",
        "1 while the relay of a host is connected. 0 after it has gone without a goodbye, until it is back or 1 h has "
        "passed. At most 64 relays, lost ones first.",
    )
    def up(self) -> bool:
        return not self.lost


class RelaysStatus(Struct, frozen=True, kw_only=True):
    """The relays of all feeds in bounded bytes."""

    connected: int
    """Relays that are connected."""
    lost: int
    """Relays that have gone without a goodbye in the last hour."""
    ranks: int
    """Ranks that read through a relay."""
    hosts: Annotated[list[RelayStatus], Series("host")]
    """At most 64 relays: lost ones first, then those with the most queued bytes."""

    @property
    def text(self) -> str:
        """One line, such as ``2 relays, 16 ranks; lost: gpu3``; empty without a relay."""
        if not self.connected and not self.lost:
            return ""
        relays_text = f"{counted(self.connected, 'relay')}, {counted(self.ranks, 'rank')}"
        named = ", ".join(relay.host for relay in self.hosts[:3] if relay.lost)
        more = f" and {self.lost - 3} more" if self.lost > 3 else ""
        return f"{relays_text}; lost: {named}{more}" if named else relays_text


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
    ready: Annotated[bool, gauge("ready", "1 while the broker serves, 0 while it starts or drains.")]
    feeds: Annotated[dict[str, FeedStatus], Series("feed")]
    """The feeds, by name."""
    streams: Annotated[list[StreamStatus], Series("stream")]
    """The streams of all feeds."""
    producers: Annotated[int, gauge("producers_connected", "Producers connected.", label="producers")]
    vanished_producers: Annotated[int, counter(
        "vanished_producers", "Producers that disconnected without notice: silent or restarted.")]  # fmt: skip
    relays: RelaysStatus
    """The relays of trainer hosts."""
    memory: MemoryStatus
    """The arena."""
    log: LogStatus | None
    """The log; None without ``state_dir``."""
    standby: StandbyStatus | None
    """The standby; None without ``standby`` in broker.yaml."""
    messages: Annotated[MessageCounts, counter(
        "bad_messages", "Messages that cannot be decoded (damaged), are of another run (foreign), or were not sent "
        "because the peer was gone (unsent). Also peers that were refused, peers without an allowed key (strangers), "
        "and connections cut.", "reason")]  # fmt: skip
    form_seconds: Annotated[float, counter("form_seconds", "Time spent in FORM, which packs samples.")]
    sent_tokens: Annotated[int, counter("sent_tokens", "Tokens sent to trainers, padding included.")]

    @gauge("build_info", "Always 1; the labels are the versions of streampack and Python.", "version", "python")
    def build_info(self) -> dict[tuple[str, str], int]:
        return {(self.version, platform.python_version()): 1}

    @gauge(
        "run_info", "Always 1; the labels are the run, its feed and the digest of its rules.", "run", "feed", "rules"
    )
    def run_info(self) -> dict[tuple[str, str, str], int]:
        return {(self.run, name, feed.rules.digest): 1 for name, feed in self.feeds.items()}

    @gauge(
        "stream_last_seen_timestamp_seconds",
        "Time at which the broker last heard from a producer of the stream.",
        "stream",
    )
    def last_seen_at(self) -> list[tuple[str, float]]:
        return [(row.stream, self.taken_at - row.last_seen_s) for row in self.streams if row.last_seen_s is not None]

    @gauge("arena_media_bytes", "Bytes of the media of the samples held, outside the arena. Only with media.")
    def held_media_bytes(self) -> int | None:
        return self.memory.media_bytes if any(feed.media is not None for feed in self.feeds.values()) else None
