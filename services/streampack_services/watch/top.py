"""``streampack top``: asks a broker again and again, and shows it until a key or Ctrl-C ends it.

A thread asks; the one that shows waits for its news, for a key and for a terminal of another size. A broker that does
not answer is said to be lost, with what was known last, until it answers again. Where nobody looks (a pipe), it is
shown once.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live

from streampack.errors import StreampackError
from streampack_services.http import http_client
from streampack_services.watch.top_text import plain
from streampack_services.watch.top_view import Look, page
from streampack_services.watch.view_model import HISTORY_S, SMOOTH_S, BrokerView, Watch, as_tree

STUCK_AFTER_S = 5.0
"""A snapshot is taken twice a second."""


class Asking:
    """A thread that asks a broker every ``interval_s``; ``view`` and ``trouble`` are what it knows."""

    def __init__(self, endpoint: str | None, interval_s: float, timeout_s: float) -> None:
        self._endpoint, self._interval_s, self._timeout_s = endpoint, interval_s, timeout_s
        self._watch = Watch()
        self._stopping = threading.Event()
        self.news, self._tell = os.pipe()
        """Readable whenever something is new."""
        self._taken_at, self._turned = 0.0, time.monotonic()
        self.view: BrokerView | None = None
        self.trouble = ""
        self.bug: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="streampack-top", daemon=True)

    def ask(self) -> BrokerView:
        """Ask once. Raises StreampackError."""
        status = http_client.read_status(self._endpoint, self._timeout_s)
        now, history = time.monotonic(), {}
        if status.taken_at != self._taken_at:
            self._taken_at, self._turned = status.taken_at, now
        events = http_client.fetch_events(self._endpoint, self._watch.last_seq(status.epoch), self._timeout_s)
        if not self._watch.knows(status.epoch):
            since = status.uptime_s - HISTORY_S - SMOOTH_S
            history = http_client.fetch_history(self._endpoint, since, self._timeout_s)
        self._watch.add(status, events, history)
        self.view = self._watch.view()
        stuck = now - self._turned
        self.trouble = f"the broker's loop stands still, for {stuck:.0f} s" if stuck > STUCK_AFTER_S else ""
        return self.view

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End soon; an answer under way is not waited for."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self.ask()
            except StreampackError as error:
                self.trouble = " ".join(str(error).split())
            except Exception as error:  # of ours: who shows says so, instead of what was once
                self.bug = error
            os.write(self._tell, b"n")


def top(endpoint: str | None, *, interval_s: float, timeout_s: float, once: bool, as_json: bool) -> None:
    """Show it. Raises StreampackError if the broker does not answer at first; later it is waited for."""
    asking = Asking(endpoint, interval_s, timeout_s)
    asking.ask()
    console = Console(highlight=False, markup=False, emoji=False)
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            _print_json(asking, interval_s, once)
        elif once or not console.is_terminal:
            _print(console, asking)
        else:
            asking.start()
            for name in (
                "COLUMNS",
                "LINES",
            ):  # what a shell or readline has said once: the terminal may have grown since
                os.environ.pop(name, None)
            console = Console(highlight=False, markup=False, emoji=False)
            try:
                _Screen(console, asking).show()
            finally:
                asking.stop()


def _print(console: Console, asking: Asking) -> None:
    """Every feed."""
    assert asking.view is not None
    for number in range(len(asking.view.feeds)):
        console.print(_lines(console, asking.view, Look(feed=number), None))


def _print_json(asking: Asking, interval_s: float, once: bool) -> None:
    """An object a line."""
    while True:
        assert asking.view is not None
        sys.stdout.write(json.dumps(as_tree(asking.view)) + "\n")
        sys.stdout.flush()
        if once:
            return
        time.sleep(interval_s)
        asking.ask()


def _lines(console: Console, view: BrokerView, look: Look, height: int | None) -> Group:
    lines = page(view, look, console.width, height)
    return Group(*(map(plain, lines) if console.options.ascii_only else lines))


class _Screen:
    """A terminal, all of it, and its keys."""

    def __init__(self, console: Console, asking: Asking) -> None:
        self._console, self._asking = console, asking
        self._look = Look(keys=sys.stdin.isatty())

    def show(self) -> None:
        """Until q or Ctrl-C."""
        resized, tell = os.pipe()
        with (
            _keys_at_once(self._look.keys),
            _on(signal.SIGWINCH, lambda *_: os.write(tell, b"r")),
            _on(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)),  # the terminal as it was before
            _on(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP)),
            Live(console=self._console, screen=True, auto_refresh=False) as live,
        ):
            keyboard = [sys.stdin.fileno()] if self._look.keys else []
            while True:
                live.update(self._drawn(), refresh=True)
                ready, _, _ = select.select([resized, self._asking.news, *keyboard], [], [])
                for each in ready:
                    pressed = os.read(each, 1024)
                    if each in keyboard and not self._press(pressed):
                        return

    def _press(self, pressed: bytes) -> bool:
        """False at the end."""
        for key in pressed.decode("ascii", "replace") or "q":  # an end of the input, too, ends it
            if key == "q":
                return False
            if key in "f\t":
                self._look = replace(self._look, feed=self._look.feed + 1)
            elif key == "c":
                self._look = replace(self._look, measure="waits" if self._look.measure == "cost" else "cost")
        return True

    def _drawn(self) -> Group:
        assert self._asking.view is not None
        if self._asking.bug is not None:
            raise self._asking.bug
        look = replace(self._look, trouble=self._asking.trouble)
        return _lines(self._console, self._asking.view, look, self._console.height)


@contextlib.contextmanager
def _keys_at_once(wanted: bool) -> Iterator[None]:
    """Each key as it is pressed, and not shown."""
    if not wanted:
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _on(number: signal.Signals, handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
