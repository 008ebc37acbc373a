"""How far a producer's processes are, added up: as a table on a terminal, as a line in a log, as figures in JSON.

Samples and tokens are those that the broker has taken: what is read again, since a partition moved to another process,
counts once (of a process that is killed the last half second may be missing). A share is of the samples, over all
passes: those in the shards that were not opened yet are taken to be as many as in the others. A stream that repeats has
none, nor one whose samples nobody can count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streampack.producer.loop import StreamProgress

if TYPE_CHECKING:
    from rich.console import RenderableType

RATE_OVER_S = 5.0
BAR = 16
"""Characters."""


@dataclass(slots=True)
class Overall:
    """All processes of one ``streampack produce``: ``num_shards`` by stream, and what ``update`` was told last."""

    num_shards: Mapping[str, int]
    streams: dict[str, StreamProgress] = field(default_factory=dict)
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    waiting: Sequence[str] = ()
    restarts: int = 0
    _seen: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)

    def update(
        self, now: float, parts: Iterable[Mapping[str, StreamProgress]], waiting: Sequence[str], restarts: int
    ) -> None:
        """``parts``: what each process that ever ran has delivered; ``waiting``: what each waits for now, or ``""``."""
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
        """0..1 of the stream's samples, over all passes; None where it repeats, or their number is not known."""
        stream, of_a_pass = self.streams[name], self.samples_a_pass(name)
        if not stream.done and not stream.samples:
            return 0.0
        if stream.passes is None or of_a_pass is None:
            return None
        return min(sum(stream.done.values()) / max(stream.passes * of_a_pass, 1), 1.0)

    def samples_a_pass(self, name: str) -> float | None:
        """How many samples a pass has, as far as shards were opened; None where none was."""
        stream = self.streams[name]
        return stream.opened_samples / stream.opened_shards * self.num_shards[name] if stream.opened_shards else None

    @property
    def samples(self) -> int:
        return sum(stream.samples for stream in self.streams.values())

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams.values())

    @property
    def rejected(self) -> Counter[str]:
        """By reason, all streams together."""
        return sum((Counter(stream.rejected) for stream in self.streams.values()), Counter())


def add_up(names: Iterable[str], parts: Iterable[Mapping[str, StreamProgress]]) -> dict[str, StreamProgress]:
    """The streams ``names``, each summed over ``parts``; of a partition, the furthest that any has come."""
    total = {name: StreamProgress() for name in names}
    for part in parts:
        for name, one in part.items():
            all_ = total[name]
            all_.samples += one.samples
            all_.tokens += one.tokens
            all_.unmasked += one.unmasked
            all_.rejected = dict(Counter(all_.rejected) + Counter(one.rejected))
            all_.opened_shards += one.opened_shards
            all_.opened_samples += one.opened_samples
            for partition, done in one.done.items():
                all_.done[partition] = max(done, all_.done.get(partition, 0))
            all_.passes = one.passes if one.done else all_.passes
    return total


def line(overall: Overall) -> str:
    """``web 43% 1200 samples 48000 tokens 9600 tokens/s; 1 restart; 2 of 4 wait for credit: ...``."""
    parts = [f"{_stream(overall, name)} {overall.tokens_per_s[name]:.0f} tokens/s" for name in overall.streams]
    return "; ".join([*parts, *_restarts(overall), *_waits(overall)])


def summary(overall: Overall) -> str:
    """``1200 samples, 48000 tokens, 3 rejected (json 3); web ...; code ...``, at the end."""
    notes = [f"{overall.samples} samples", f"{overall.tokens} tokens", _rejected(overall.rejected), _unmasked(overall)]
    first = ", ".join(note for note in notes if note)
    parts = [_stream(overall, name) for name in overall.streams] if len(overall.streams) > 1 else []
    return "; ".join([first, *parts, *_restarts(overall)])


def figures(overall: Overall) -> dict[str, Any]:
    """The same as plain values."""
    streams = {
        name: {
            "samples": stream.samples, "tokens": stream.tokens, "share": overall.share(name),
            "tokens_per_s": round(overall.tokens_per_s[name], 1), "rejected": stream.rejected,
            "unmasked": stream.unmasked,
        }
        for name, stream in overall.streams.items()
    }  # fmt: skip
    waiting = dict(Counter(reason for reason in overall.waiting if reason))
    return {
        "samples": overall.samples, "tokens": overall.tokens, "restarts": overall.restarts, "waiting": waiting,
        "streams": streams,
    }  # fmt: skip


def table(overall: Overall) -> RenderableType:
    """For a terminal: a row a stream, and beneath what is waited for."""
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
    notes = [_rejected(overall.rejected), _unmasked(overall), *_restarts(overall), *_waits(overall)]
    return Group(shown, Text("; ".join(note for note in notes if note), style="dim"))


def short(number: float) -> str:
    """Three digits or so: ``950``, ``12.3k``, ``4.0M``."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _stream(overall: Overall, name: str) -> str:
    stream, share = overall.streams[name], overall.share(name)
    rejected = _rejected(stream.rejected)
    where = "" if share is None else f"{share:.0%} "
    return f"{name} {where}{stream.samples} samples {stream.tokens} tokens" + (f" {rejected}" if rejected else "")


def _without_end(overall: Overall, name: str) -> str:
    """How far a stream without a share is: which pass is under way, from 1, where it repeats."""
    stream, of_a_pass = overall.streams[name], overall.samples_a_pass(name)
    if stream.passes is not None or of_a_pass is None:
        return "size not known"
    return f"pass {1 + int(sum(stream.done.values()) / max(of_a_pass, 1))}, repeats"


def _rejected(reasons: Mapping[str, int]) -> str:
    if not reasons:
        return ""
    each = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    return f"{sum(reasons.values())} rejected ({each})"


def _unmasked(overall: Overall) -> str:
    count = sum(stream.unmasked for stream in overall.streams.values())
    return f"{count} without the declared loss_mask, trained on as a whole" if count else ""


def _restarts(overall: Overall) -> list[str]:
    return [f"{overall.restarts} restart{'s' * (overall.restarts > 1)}"] if overall.restarts else []


def _waits(overall: Overall) -> list[str]:
    reasons, processes = Counter(reason for reason in overall.waiting if reason), len(overall.waiting)
    return [
        (f"{count} of {processes} wait" if processes > 1 else "waits") + f" for {reason}"
        for reason, count in reasons.most_common()
    ]
