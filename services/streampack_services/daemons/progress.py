"""Add up the progress of a producer's processes, and show it as a table, as a log line, or as plain values.

Only samples and tokens that the broker has accepted count, so a sample that is read again counts once. The last half
second of a killed process may be missing. A stream's share is its delivered samples over those of all passes; shards
that are not opened yet count with the mean of the others. A stream that repeats, or whose samples cannot be counted,
has no share.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streampack.producer.loop import StreamProgress
from streampack_services.amounts import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

RATE_OVER_S = 5.0
"""Seconds over which tokens per second are measured."""
MOST_STREAMS = 16
"""Streams that a line names; the others are added up."""
BAR = 16
"""Width of a progress bar, in characters."""


@dataclass(slots=True)
class Overall:
    """Progress of all processes of one ``streampack produce``, as of the last ``update``; ``num_shards`` by stream."""

    num_shards: Mapping[str, int]
    streams: dict[str, StreamProgress] = field(default_factory=dict)
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    waiting: Sequence[str] = ()
    restarts: int = 0
    _seen: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)

    def update(
        self, now: float, parts: Iterable[Mapping[str, StreamProgress]], waiting: Sequence[str], restarts: int
    ) -> None:
        """Set the progress as of the time ``now``, in seconds.

        ``parts``: for each process so far its progress by stream. ``waiting``: for each running process the reason why
        the process waits, or ``""``. ``restarts``: number of restarts so far.
        """
        self.streams = add_up(self.num_shards, parts)
        self.waiting, self.restarts = waiting, restarts
        tokens = {name: stream.tokens for name, stream in self.streams.items()}
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_OVER_S:
            self._seen.popleft()
        then, before = self._seen[0]
        seconds = max(now - then, 1e-3)
        self.tokens_per_s = {name: (tokens[name] - before[name]) / seconds for name in tokens}

    def share(self, name: str) -> float | None:
        """Return the share of a stream's samples that is delivered, over all passes, 0 to 1; None if not known."""
        stream, of_a_pass = self.streams[name], self.samples_a_pass(name)
        if not stream.done and not stream.samples:
            return 0.0
        if stream.passes is None or of_a_pass is None:
            return None
        return min(sum(stream.done.values()) / max(stream.passes * of_a_pass, 1), 1.0)

    def samples_a_pass(self, name: str) -> float | None:
        """Return the samples in a pass of a stream, estimated from the opened shards; None before one is opened."""
        stream = self.streams[name]
        return stream.opened_samples / stream.opened_shards * self.num_shards[name] if stream.opened_shards else None

    @property
    def samples(self) -> int:
        """Delivered samples of all streams."""
        return sum(stream.samples for stream in self.streams.values())

    @property
    def tokens(self) -> int:
        """Delivered tokens of all streams."""
        return sum(stream.tokens for stream in self.streams.values())

    @property
    def rejected(self) -> Counter[str]:
        """Rejected samples of all streams, by reason."""
        return sum((Counter(stream.rejected) for stream in self.streams.values()), Counter())


def add_up(names: Iterable[str], parts: Iterable[Mapping[str, StreamProgress]]) -> dict[str, StreamProgress]:
    """Sum the progress of each stream over ``parts``; of each partition, take the furthest progress.

    ``names``: the streams to return. ``parts``: for each process its progress by stream.
    """
    total = {name: StreamProgress() for name in names}
    for part in parts:
        for name, one in part.items():
            all_ = total[name]
            all_.samples += one.samples
            all_.tokens += one.tokens
            all_.warnings = dict(Counter(all_.warnings) + Counter(one.warnings))
            all_.rejected = dict(Counter(all_.rejected) + Counter(one.rejected))
            all_.opened_shards += one.opened_shards
            all_.opened_samples += one.opened_samples
            for partition, done in one.done.items():
                all_.done[partition] = max(done, all_.done.get(partition, 0))
            all_.passes = one.passes if one.done else all_.passes
    return total


def line(overall: Overall) -> str:
    """Return the progress as a line: ``web 43% 1200 samples 48000 tokens 9600 tokens/s; 2 of 4 wait for credit``."""
    parts = [f"{_stream(overall, name)} {overall.tokens_per_s[name]:.0f} tokens/s" for name in _shown(overall)]
    return "; ".join([*parts, *_others(overall), *_restarts(overall), *_waits(overall)])


def summary(overall: Overall) -> str:
    """Return the final result as a line: ``1200 samples, 48000 tokens, 3 rejected (json 3); web ...; code ...``."""
    notes = [f"{overall.samples} samples", f"{overall.tokens} tokens", _rejected(overall.rejected), *_warnings(overall)]
    first = ", ".join(note for note in notes if note)
    parts = [_stream(overall, name) for name in _shown(overall)] if len(overall.streams) > 1 else []
    return "; ".join([first, *parts, *_others(overall), *_restarts(overall)])


def figures(overall: Overall) -> dict[str, Any]:
    """Return the progress as plain values for JSON."""
    streams = {
        name: {
            "samples": stream.samples, "tokens": stream.tokens, "share": overall.share(name),
            "tokens_per_s": round(overall.tokens_per_s[name], 1), "rejected": stream.rejected,
            "warnings": stream.warnings,
        }
        for name, stream in overall.streams.items()
    }  # fmt: skip
    waiting = dict(Counter(reason for reason in overall.waiting if reason))
    return {
        "samples": overall.samples, "tokens": overall.tokens, "restarts": overall.restarts, "waiting": waiting,
        "streams": streams,
    }  # fmt: skip


def table(overall: Overall) -> RenderableType:
    """Return the progress as a table with one row per stream, followed by rejected samples, restarts and waits."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("stream", overflow="fold", min_width=8)
    shown.add_column("done", no_wrap=True, width=BAR)
    for title in ("", "samples", "tokens", "tokens/s", "rejected"):
        shown.add_column(title, justify="right", no_wrap=True)
    for name, stream in overall.streams.items():
        share = overall.share(name)
        bar = Text(_without_end(overall, name)) if share is None else ProgressBar(1.0, share, width=BAR)
        rejected = sum(stream.rejected.values())
        shown.add_row(
            Text(name), bar, "" if share is None else f"{share:.0%}", f"{stream.samples:,}", short(stream.tokens),
            short(overall.tokens_per_s[name]), Text(f"{rejected:,}", style="yellow" if rejected else "dim"),
        )  # fmt: skip
    notes = [_rejected(overall.rejected), *_warnings(overall), *_restarts(overall), *_waits(overall)]
    return Group(shown, Text("; ".join(note for note in notes if note), style="dim"))


def _shown(overall: Overall) -> list[str]:
    """Return the names of the streams that a line shows."""
    return [*overall.streams][:MOST_STREAMS]


def _others(overall: Overall) -> list[str]:
    """Return the sum of the streams that a line does not show as text: ``592 more streams 1200 samples``."""
    others = [*overall.streams][MOST_STREAMS:]
    samples, tokens = (sum(getattr(overall.streams[name], key) for name in others) for key in ("samples", "tokens"))
    rate = sum(overall.tokens_per_s.get(name, 0.0) for name in others)
    return [f"{counted(len(others), 'more stream')} {samples} samples {tokens} tokens {rate:.0f} tokens/s"] * bool(
        others
    )


def short(number: float) -> str:
    """Return a number with about three digits: ``950``, ``12.3k``, ``4.0M``."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _stream(overall: Overall, name: str) -> str:
    """Return a stream's progress as text: ``web 43% 1200 samples 48000 tokens``."""
    stream, share = overall.streams[name], overall.share(name)
    rejected = _rejected(stream.rejected)
    where = "" if share is None else f"{share:.0%} "
    return f"{name} {where}{stream.samples} samples {stream.tokens} tokens" + (f" {rejected}" if rejected else "")


def _without_end(overall: Overall, name: str) -> str:
    """Return the progress of a stream without a share as text: ``pass 2, repeats``, or ``size not known``."""
    stream, of_a_pass = overall.streams[name], overall.samples_a_pass(name)
    if stream.passes is not None or of_a_pass is None:
        return "size not known"
    return f"pass {1 + int(sum(stream.done.values()) / max(of_a_pass, 1))}, repeats"


def _rejected(reasons: Mapping[str, int]) -> str:
    """Return ``3 rejected (json 2, empty 1)``, or nothing."""
    if not reasons:
        return ""
    counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    return f"{sum(reasons.values())} rejected ({counts})"


def _warnings(overall: Overall) -> list[str]:
    """Return the number of delivered samples with each warning as text: ``2 samples with the warning no_loss_mask``."""
    counts = sum((Counter(stream.warnings) for stream in overall.streams.values()), Counter())
    return [f"{counted(count, 'sample')} with the warning {word}" for word, count in sorted(counts.items())]


def _restarts(overall: Overall) -> list[str]:
    """Return ``["2 restarts"]``, or an empty list for none."""
    return [counted(overall.restarts, "restart")] if overall.restarts else []


def _waits(overall: Overall) -> list[str]:
    """Return the number of waiting processes for each reason as text: ``2 of 4 wait for credit``."""
    reasons, processes = Counter(reason for reason in overall.waiting if reason), len(overall.waiting)
    return [
        (f"{count} of {processes} wait" if processes > 1 else "waits") + f" for {reason}"
        for reason, count in reasons.most_common()
    ]
