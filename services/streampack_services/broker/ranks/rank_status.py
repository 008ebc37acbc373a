"""The part of a broker's status about the ranks of a feed: the types of each rank, of each node and of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Struct

from streampack.core.stats.media_figures import MEDIA_DROPPED
from streampack_services.amounts import counted, seconds_text
from streampack_services.figure import Series, counter, gauge

_FEW_RANKS = "Not with more than 1,024 ranks."
_MANY_RANKS = "Only with more than 1,024 ranks, of the 64 worst hosts."


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
    done_upto: Annotated[int, gauge(
        "reader_returned_steps", f"Steps of this iteration that the rank has returned. {_FEW_RANKS}")]  # fmt: skip
    have_upto: int
    """Steps of this iteration that the rank has received."""
    queued_bytes: int
    """Bytes sent to the rank and not confirmed."""
    silent_s: Annotated[float, gauge(
        "reader_silent_seconds", f"Time since the broker last heard from the rank. {_FEW_RANKS}")]  # fmt: skip
    data_wait: Annotated[float | None, gauge(
        "reader_starved_ratio", "Data wait of the rank over the last minute as a share of its time. "
        f"{_FEW_RANKS}")]  # fmt: skip
    """Data wait over the last 30 to 60 s, as a share of the rank's time; None if not known."""
    cause: str
    """Main cause of that wait, one of ``data_wait.CAUSES``; empty without a wait."""
    stream: str | None
    """The stream that the rank has waited for longest in that time; None if it has waited for none."""
    work_s: Annotated[float | None, gauge(
        "reader_work_seconds", "Time in which the rank's trainer works on a step, mean over the last minute. "
        f"{_FEW_RANKS}")]  # fmt: skip
    """Seconds in which the trainer works on a step, mean over the last minute; None if not known."""
    mfu: Annotated[float | None, gauge(
        "reader_mfu_ratio", "Useful MFU of the rank over the last minute: FLOPs of real tokens / FLOPs of its device "
        f"at its peak. {_FEW_RANKS}")]  # fmt: skip
    """Useful FLOPs over the last 30 to 60 s as a share of the device's peak; None if the trainer named no peak."""
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
    step_s: Annotated[float | None, gauge(
        "reader_step_seconds", "Time between two steps of the rank, mean of the "
        f"last steps. {_FEW_RANKS}")]  # fmt: skip
    """Seconds from one step to the next, mean of the last ones; None until the client has sent it."""

    @property
    def has_reported(self) -> bool:
        """True once the client has sent its figures. Until then ``starved_s`` and ``trainer_s`` are not known."""
        return bool(self.stats)

    @counter(
        "reader_starved_seconds",
        "Data wait of a rank, by cause. For the cause stream, the label stream names the stream whose samples were "
        f"missing. {_FEW_RANKS}",
        "cause",
        "stream",
    )
    def data_waits(self) -> dict[tuple[str, str], float] | None:
        """Seconds of data wait by cause; for the cause ``stream`` by stream, and the rest for the stream ``""``.

        None until the rank has reported. A 0 would look like a reset of the counter after a broker's restart, and old
        seconds would count again.
        """
        if not self.has_reported:
            return None
        waits = {(cause, ""): seconds for cause, seconds in self.starved_s.items()}
        if ("stream", "") in waits:
            unknown = waits["stream", ""] - sum(self.starved_streams.values())
            waits["stream", ""] = round(max(unknown, 0.0), 3)
        return waits | {("stream", name): seconds for name, seconds in self.starved_streams.items()}

    @counter("reader_trainer_seconds", f"Time from a step's delivery to the rank's next request. {_FEW_RANKS}")
    def reported_trainer_s(self) -> float | None:
        """``trainer_s``; None until the client has sent it."""
        return self.trainer_s if self.has_reported else None

    @gauge("reader_next_p99_seconds", f"99th percentile of the rank's data wait for a step. {_FEW_RANKS}")
    def next_p99_s(self) -> float | None:
        return self.stats["next_p99_ms"] * 1e-3 if "next_p99_ms" in self.stats else None

    @counter("reader_media_dropped", f"Media items that the rank could not have. {_FEW_RANKS}")
    def media_dropped(self) -> float | None:
        """Media items that the rank has dropped, of all reasons; None if its trainer does not drop any."""
        counts = [count for name, count in self.stats.items() if name.startswith(MEDIA_DROPPED)]
        return sum(counts) if counts else None


class NodeStatus(Struct, frozen=True, kw_only=True):
    """The ranks of one host. Figures of an attached rank are None while no rank is attached."""

    host: str
    """Host."""
    ranks: int
    """Ranks of the mesh that are attached from the host, or were last."""
    attached: int
    """Ranks that are attached."""
    data_wait: float | None
    """Longest data wait of a rank over the last 30 to 60 s, as a share of its time; None if not known."""
    cause: str
    """Main cause of that wait, one of ``data_wait.CAUSES``; empty without a wait."""
    stream: str | None
    """The stream that this rank has waited for longest in that time; None if it has waited for none."""
    worst_rank: list[int] | None
    """The rank with that wait: its numbers along dp, cp, tp and pp; None without a wait."""
    silent_s: Annotated[float | None, gauge(
        "node_silent_seconds", "Longest time since the broker last heard from a rank of "
        f"the host. {_MANY_RANKS}")]  # fmt: skip
    done_upto: Annotated[int | None, gauge(
        "node_returned_steps", "Fewest steps of this iteration that a rank of the host "
        f"has returned. {_MANY_RANKS}")]  # fmt: skip
    ahead: int | None
    """Fewest steps that a rank has received and not returned."""
    step_s: Annotated[float | None, gauge(
        "node_step_seconds", f"Longest time between two steps of a rank of the host. {_MANY_RANKS}")]  # fmt: skip
    cost: float | None
    """Highest cost of a rank's last step / mean over the step; None before a step was dealt."""
    queued_bytes: Annotated[int, gauge(
        "node_queued_bytes", f"Bytes sent to the host's ranks and not yet confirmed. {_MANY_RANKS}")]  # fmt: skip
    relay: Literal["connected", "lost"] | None = None
    """The relay of the host; ``lost`` if it has gone without a goodbye in the last hour; None without one."""

    @gauge("node_missing_ranks", f"Ranks last attached from the host that are not attached. {_MANY_RANKS}")
    def missing(self) -> int:
        return self.ranks - self.attached

    @gauge(
        "node_data_wait_ratio",
        f"Longest data wait of a rank of the host as a share of its time, with its main cause. {_MANY_RANKS}",
        "cause",
    )
    def data_waits(self) -> dict[str, float] | None:
        """``data_wait`` by its main cause; None if not known."""
        return None if self.data_wait is None else {self.cause: self.data_wait}


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


class SlowRank(Struct, frozen=True, kw_only=True):
    """The slowest rank, for which faster ranks wait."""

    name: str
    """Its place in the mesh: ``dp=2 tp=1``."""
    dp_rank: int
    """Data-parallel rank."""
    cp_rank: int
    """Context-parallel rank."""
    tp_rank: int
    """Tensor-parallel rank."""
    pp_rank: int
    """Pipeline stage."""
    host: str
    """Its host."""
    count: int
    """Slow ranks, with this one."""
    step_s: Annotated[float, gauge(
        "slow_rank_step_seconds", "Time that the trainer of the slowest rank takes for a step, while faster ranks wait "
        "for it.")]  # fmt: skip
    others_step_s: Annotated[float, gauge(
        "other_ranks_step_seconds", "Time that the trainers of those faster ranks take; the labels are of the slowest "
        "rank.")]  # fmt: skip

    @property
    def text(self) -> str:
        """One line: ``rank dp=2 takes 1.0 s a step, the others 0.10 s (on gpu7)``."""
        more = f" and {counted(self.count - 1, 'other rank')} take" if self.count > 1 else " takes"
        times = f"{seconds_text(self.step_s)} a step, the others {seconds_text(self.others_step_s)}"
        return f"rank {self.name}{more} {times} (on {self.host})"


def name_of(ranks: Iterable[int], in_use: Iterable[bool]) -> str:
    """Return a rank's place in the mesh: ``dp=2 tp=1``. An axis is left out unless it is dp or ``in_use``."""
    axes = zip(("dp", "cp", "tp", "pp"), ranks, in_use, strict=True)
    return " ".join(f"{axis}={rank}" for axis, rank, shown in axes if shown or axis == "dp")


class RanksStatus(Struct, frozen=True, kw_only=True):
    """The ranks of a feed in bounded bytes, by node.

    Nodes are listed worst first. Missing ranks count first, then silence of several pings, then data wait that other
    ranks do not cause. If these are equal, the fewest steps returned count, then data wait.
    """

    attached: Annotated[int, gauge("readers_connected", "Ranks attached.")]
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
    longest_silence_s: Annotated[float, gauge(
        "longest_silence_seconds", "Longest time since the broker last heard from an attached rank.")]  # fmt: skip
    longest_waits: Annotated[dict[str, float], gauge(
        "longest_data_wait_ratio", "Longest data wait of a rank over the last 3 to 5 minutes as a share of its time, "
        "by cause.", "cause")]  # fmt: skip
    recent_waits: Annotated[dict[str, float], gauge(
        "recent_data_wait_ratio", "Data wait of all ranks over the last minute as a share of their time, by "
        "cause.", "cause")]  # fmt: skip
    """Data wait of all ranks over the last 30 to 60 s as a share of their time, by cause."""
    recent_streams: Annotated[dict[str, float], gauge(
        "recent_stream_wait_ratio", "The part of recent_data_wait_ratio of the cause stream, by "
        "stream.", "stream")]  # fmt: skip
    """The part of the cause ``stream``, by stream."""
    recent_s: float
    """Seconds that these cover: the last 30 to 60 s, or since the first step was returned."""
    slow: Annotated[SlowRank | None, Series("dp_rank", "cp_rank", "tp_rank", "pp_rank", "host")]
    """The slowest rank, for which faster ranks wait; None if there is none."""
    trainer_s: Annotated[float, counter(
        "work_seconds", "Time in which the trainers of all ranks worked on steps since this broker "
        "began.")]  # fmt: skip
    """Seconds in which trainers worked on steps since this broker began, ranks that left included."""
    starved_s: Annotated[dict[str, float], counter(
        "starved_seconds", "Data wait of all ranks since this broker began, by cause.", "cause")]  # fmt: skip
    """Seconds that ranks have waited for data since this broker began, by cause, ranks that left included."""

    mfu: Annotated[float | None, gauge(
        "mfu_ratio", "Useful MFU of all ranks over the last minute: FLOPs of real tokens / FLOPs of their devices at "
        "their peak.", label="useful MFU", shown=True)] = None  # fmt: skip
    """Over the last 30 to 60 s, of the ranks whose trainers named the model and the peak; None without one."""
    useful_s: Annotated[float, counter(
        "useful_seconds", "Time that the FLOPs of real tokens need at the devices' peak, since this broker "
        "began.")] = 0.0  # fmt: skip
    """Seconds since this broker began, of all ranks that count useful FLOPs."""
    timed_s: Annotated[float, counter(
        "timed_seconds", "Time of the ranks that count useful FLOPs since this broker began: useful_seconds / this is "
        "their MFU.")] = 0.0  # fmt: skip
    """Seconds of these ranks, in which trainers worked or waited."""

    @gauge("slow_ranks", "Ranks that take longer for a step than the others, which wait for them.")
    def num_slow(self) -> int:
        return 0 if self.slow is None else self.slow.count

    @property
    def waits(self) -> dict[str, float]:
        """Data wait since this broker began as a share of all ranks' time, by cause."""
        seconds_of_all = max(self.trainer_s + sum(self.starved_s.values()), 1e-9)
        return {cause: seconds / seconds_of_all for cause, seconds in self.starved_s.items()}

    @Series("host")
    def listed_nodes(self) -> list[NodeStatus]:
        """The nodes that have series of their own: none if all ranks have."""
        return self.nodes if self.left_out else []


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
