"""Decides the headline of a feed: the line that every view shows.

In a busy pipeline the reason for the next step changes with every step. So a wait is named once it lasts, or once it
has taken a tenth of the ranks' time lately. Ranks that train are no fault. Ranks that wait for each other in turn are
none, either: only a rank for which all others wait is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from streampack_services.amounts import counted
from streampack_services.broker.causes.waiting_for import WaitingFor
from streampack_services.broker.ranks.rank_status import SlowRank

OFTEN = 0.1
"""Ranks wait for data too often from this share of their time on, as in the alert TrainerStarved."""
AT_LEAST_S = 5.0
"""Recent data waits are judged once they cover this time of each rank, in seconds."""
HANGS_S = 30.0
"""A trainer's step may take as long, in seconds."""
BY_LINK = ("network", "relay")
"""Causes of a data wait that are on the way to one host."""
BY_RANKS = ("peers", "memory", "join")
"""Causes of a data wait that ranks are behind, not the data service."""
CALM = "Steps are formed and delivered without long waits."


class Headline(Struct, frozen=True, kw_only=True):
    """The state of a feed in a line: the cause that delays its training, or that there is none."""

    kind: Literal["good", "waiting", "bad"]
    """``bad`` if somebody must act before training goes on."""
    cause: str
    """The cause: one of ``data_wait.CAUSES``, ``slow_rank``, ``lost_rank`` or another word; empty without one."""
    text: str
    """One or two sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlineFacts:
    """The facts that a headline follows from.

    Attributes:
        state: State of the broker.
        faults: (cause, text) of faults of the log and the standby that stop all feeds; the text is empty without one.
        waiting: The reason that the next step is missing; None at the end, and while the broker drains.
        still_s: Seconds since a step was formed or returned.
        stalled_s: The same while a rank waits for data; None otherwise.
        returned: Steps that all ranks have returned.
        end: Steps of the whole iteration; None until it is known.
        all_attached: Every rank of the mesh is attached.
        silent: Seconds since a producer of a stream was heard, for each stream that has none.
        slow: The rank for which all others wait; None without one.
        recent_waits: Recent data wait of all ranks as a share of their time, by cause.
        recent_streams: The part of the cause ``stream``, by stream.
        recent_s: Seconds that these cover.
        late: The rank that waits much longer for the network or its relay than most; empty without one.
    """

    state: str
    faults: tuple[tuple[str, str], ...]
    waiting: WaitingFor | None
    still_s: float
    stalled_s: float | None
    returned: int
    end: int | None
    all_attached: bool
    silent: dict[str, float]
    slow: SlowRank | None
    recent_waits: dict[str, float]
    recent_streams: dict[str, float]
    recent_s: float
    late: str


def headline_of(feed: HeadlineFacts) -> Headline:
    """Return the headline of a feed."""
    for cause, text in feed.faults:
        if text:
            return Headline(kind="bad", cause=cause, text=text)
    if feed.state == "starting":
        text = "The broker is starting. It loads its kernels and reads its log."
        return Headline(kind="waiting", cause="starting", text=text)
    waiting = feed.waiting
    if waiting is None:
        return _at_the_end(feed)
    if waiting.reason == "failed":
        return Headline(kind="bad", cause="failed", text=waiting.detail)
    by_ranks = waiting.reason in BY_RANKS
    if waiting.lost and by_ranks:
        return _waiting(feed, waiting, "lost_rank")
    if waiting.lost or feed.stalled_s is not None or (by_ranks and not feed.all_attached and feed.end is None):
        return _waiting(feed, waiting, waiting.reason)
    if feed.silent:
        return _silent(feed.silent)
    if feed.slow is not None:
        return Headline(kind="waiting", cause="slow_rank", text=f"{_sentence(feed.slow.text)}.")
    if feed.end is not None:
        left = counted(feed.end - feed.returned, "step")
        return Headline(kind="good", cause="", text=f"All steps were formed. The ranks train the last {left}.")
    if (often := _often(feed)) is not None:
        return often
    if by_ranks and feed.still_s >= HANGS_S:
        text = f"Data is ready. The ranks have been training{lasting(feed.still_s)}: {waiting.detail}."
        return Headline(kind="good", cause="", text=text)
    return Headline(kind="good", cause="", text=CALM)


def _at_the_end(feed: HeadlineFacts) -> Headline:
    """Return the headline of a feed that has ended or drains."""
    if feed.end is None:
        text = "The broker is draining. It serves the steps that are already formed, then stops."
        return Headline(kind="waiting", cause="draining", text=text)
    return Headline(kind="good", cause="", text=f"Done. All {feed.end:,} steps were returned.")


def _waiting(feed: HeadlineFacts, waiting: WaitingFor, cause: str) -> Headline:
    """Return the headline of a feed whose next step is missing."""
    seconds = feed.still_s if feed.stalled_s is None else feed.stalled_s
    return Headline(kind="waiting", cause=cause, text=f"{_sentence(waiting.text_after(lasting(seconds)))}.")


def _silent(silent: dict[str, float]) -> Headline:
    """Return the headline of a feed that trains on the last samples of ``silent`` streams."""
    names = ", ".join(map(repr, list(silent)[:3])) + (f" and {len(silent) - 3} more" if len(silent) > 3 else "")
    streams = "streams" if len(silent) > 1 else "stream"
    text = f"The broker has heard no producer of {streams} {names}{lasting(max(silent.values()))}."
    return Headline(kind="waiting", cause="stream", text=f"{text} Training goes on with the samples received before.")


def _often(feed: HeadlineFacts) -> Headline | None:
    """Return the headline of a feed whose ranks wait for data too often; None if they do not."""
    waits = {cause: share for cause, share in feed.recent_waits.items() if cause not in BY_RANKS and share}
    waited = sum(waits.values())
    if waited < OFTEN or feed.recent_s < AT_LEAST_S:
        return None
    cause = max(waits, key=waits.__getitem__)
    by_cause = ", ".join(f"{name} {share:.0%}" for name, share in by_stream(waits, feed.recent_streams)[:3])
    text = f"The ranks wait for data {waited:.0%} of their time in the last {feed.recent_s:.0f} s: {by_cause}."
    if feed.late and cause in BY_LINK:
        text += f" Messages come late to {feed.late}."
    return Headline(kind="waiting", cause=cause, text=text)


def by_stream(waits: dict[str, float], streams: dict[str, float]) -> list[tuple[str, float]]:
    """Return (cause, share) of each data wait, largest first, with ``stream NAME`` in place of ``stream``.

    >>> by_stream({"stream": 0.3, "log": 0.4}, {"web": 0.2, "code": 0.1})
    [('log', 0.4), ('stream web', 0.2), ('stream code', 0.1)]
    """
    shares = {cause: share for cause, share in waits.items() if share and (cause != "stream" or not streams)}
    if waits.get("stream"):
        shares |= {f"stream {name}": share for name, share in streams.items() if share}
    return sorted(shares.items(), key=lambda share: -share[1])


def lasting(seconds: float) -> str:
    """Return `` for 25 s`` in steps of 5 s, and later of minutes, since screen readers read every change."""
    if seconds < 5:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    if not minutes:
        return f" for {rest // 5 * 5} s"
    hours, minutes = divmod(minutes, 60)
    return f" for {hours} h {minutes} min" if hours else f" for {minutes} min"


def _sentence(text: str) -> str:
    """Return a text with a capital letter at its start."""
    return text[:1].upper() + text[1:]
