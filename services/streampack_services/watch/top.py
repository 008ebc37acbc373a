"""``streampack top``: show the status of a broker in the terminal until a key or Ctrl-C ends it.

One thread fetches the status; the main thread waits for a new status, a key or a new terminal size, and draws. While
the broker does not answer, the page shows its last status and the state "lost". If the output is not a terminal, the
page is printed once.
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
from streampack_services.terminal import new_console
from streampack_services.watch.top_text import plain
from streampack_services.watch.top_view import PageOptions, page
from streampack_services.watch.view_model import HISTORY_S, SMOOTH_S, BrokerView, Watch, as_tree

STUCK_AFTER_S = 5.0
"""Time without a new snapshot after which the broker's main loop is shown as stuck, in seconds."""


class StatusPoller:
    """Fetches a broker's status every ``interval_s`` seconds, in a thread of its own after ``start``."""

    def __init__(self, endpoint: str | None, interval_s: float, timeout_s: float, node: str | None = None) -> None:
        self._endpoint, self._interval_s, self._timeout_s = endpoint, interval_s, timeout_s
        self._node = node
        self._watch = Watch()
        self._stopping = threading.Event()
        self.news, self._tell = os.pipe()
        """File descriptor that is readable when there is a new status or error."""
        self._taken_at, self._turned = 0.0, time.monotonic()
        self.view: BrokerView | None = None
        """The last view."""
        self.trouble = ""
        """The reason that there is no newer view, or an empty string."""
        self.bug: Exception | None = None
        """An unexpected error in the thread."""
        self._thread = threading.Thread(target=self._run, name="streampack-top", daemon=True)

    def fetch(self) -> BrokerView:
        """Fetch the status, events and history once, and return the new view. Raise StreampackError on failure."""
        status = http_client.read_status(self._endpoint, self._timeout_s)
        if self._node is not None:
            pages = http_client.fetch_node(self._endpoint, status.feeds, self._node, self._timeout_s)
            status = http_client.of_node(status, pages)
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
        self.trouble = f"the broker's main loop has been stuck for {stuck:.0f} s" if stuck > STUCK_AFTER_S else ""
        return self.view

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current request, without waiting for it."""
        self._stopping.set()

    def _run(self) -> None:
        """Fetch the status every ``interval_s`` until ``stop``, and record errors in ``trouble`` and ``bug``."""
        while not self._stopping.wait(self._interval_s):
            try:
                self.fetch()
            except StreampackError as error:
                self.trouble = " ".join(str(error).split())
            except Exception as error:  # a bug: the main thread raises it
                self.bug = error
            os.write(self._tell, b"n")


def top(
    endpoint: str | None, *, interval_s: float, timeout_s: float, once: bool, as_json: bool, node: str | None = None
) -> None:
    """Show a broker's status until the user presses q or Ctrl-C.

    Args:
        endpoint: HTTP address of the broker, or None.
        interval_s: Seconds between two requests.
        timeout_s: Seconds to wait for an answer.
        once: Print the page once.
        as_json: Print one JSON object per line.
        node: Host whose ranks are shown; None for all ranks.

    Raises:
        StreampackError: The broker does not answer the first request. Later failures are shown on the page.
    """
    poller = StatusPoller(endpoint, interval_s, timeout_s, node)
    poller.fetch()
    console = new_console()
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            _print_json(poller, interval_s, once)
        elif once or not console.is_terminal:
            _print(console, poller)
        else:
            poller.start()
            for name in ("COLUMNS", "LINES"):  # set by the shell at its start: the terminal may have grown since
                os.environ.pop(name, None)
            console = new_console()
            try:
                _Screen(console, poller).show()
            finally:
                poller.stop()


def _print(console: Console, poller: StatusPoller) -> None:
    """Print a page for every feed."""
    assert poller.view is not None
    for number in range(len(poller.view.feeds)):
        console.print(_lines(console, poller.view, PageOptions(feed=number), None))


def _print_json(poller: StatusPoller, interval_s: float, once: bool) -> None:
    """Print the view as one line of JSON every ``interval_s``, or only once if ``once`` is true."""
    while True:
        assert poller.view is not None
        sys.stdout.write(json.dumps(as_tree(poller.view)) + "\n")
        sys.stdout.flush()
        if once:
            return
        time.sleep(interval_s)
        poller.fetch()


def _lines(console: Console, view: BrokerView, options: PageOptions, height: int | None) -> Group:
    """Return the lines of a page, in ASCII if the terminal supports only ASCII."""
    lines = page(view, options, console.width, height)
    return Group(*(map(plain, lines) if console.options.ascii_only else lines))


class _Screen:
    """The page on the whole terminal, and its keys."""

    def __init__(self, console: Console, poller: StatusPoller) -> None:
        self._console, self._poller = console, poller
        self._look = PageOptions(keys=sys.stdin.isatty())

    def show(self) -> None:
        """Draw the page until the user presses q or Ctrl-C."""
        resized, tell = os.pipe()
        with (
            _cbreak(self._look.keys),
            _on(signal.SIGWINCH, lambda *_: os.write(tell, b"r")),
            _on(signal.SIGTERM, _exit),
            _on(signal.SIGHUP, _exit),
            Live(console=self._console, screen=True, auto_refresh=False) as live,
        ):
            keyboard = [sys.stdin.fileno()] if self._look.keys else []
            while True:
                live.update(self._drawn(), refresh=True)
                ready, _, _ = select.select([resized, self._poller.news, *keyboard], [], [])
                for fd in ready:
                    pressed = os.read(fd, 1024)
                    if fd in keyboard and not self._press(pressed):
                        return

    def _press(self, pressed: bytes) -> bool:
        """Handle pressed keys; return False if a key ends ``top``."""
        for key in pressed.decode("ascii", "replace") or "q":  # the end of the input ends it, too
            if key == "q":
                return False
            if key in "f\t":
                self._look = replace(self._look, feed=self._look.feed + 1)
            elif key == "c":
                self._look = replace(self._look, measure="waits" if self._look.measure == "cost" else "cost")
        return True

    def _drawn(self) -> Group:
        """Return the page for the current view; raise an error of the polling thread."""
        assert self._poller.view is not None
        if self._poller.bug is not None:
            raise self._poller.bug
        options = replace(self._look, trouble=self._poller.trouble)
        return _lines(self._console, self._poller.view, options, self._console.height)


def _exit(number: int, _: object) -> None:
    """Exit with the code of a signal; on the way out, the blocks restore the terminal."""
    sys.exit(128 + number)


@contextlib.contextmanager
def _cbreak(wanted: bool) -> Iterator[None]:
    """Make the terminal deliver each key at once, without echo, until the end of the block."""
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
    """Call ``handler`` on the signal ``number`` until the end of the block."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
