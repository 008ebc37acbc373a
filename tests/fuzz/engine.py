"""A coverage-guided fuzzer in a process of its own, for one target: runs, keeps what reached new lines, watches memory.

An input is bytes. A target says what they mean (``forms``), gives the first ones, and runs one: an exception is a
crash, and so is an input that takes ``HANG_S``. What was reached is lines of this project's modules, by the
interpreter's own trace; an input that reached a new one is kept and changed further. Kernels that are compiled, and
libraries in C, have no lines: of them only what they raise is seen, and what they do to memory.

Memory is that of the process, every two seconds, without what nothing refers to. It must not grow: a line is laid
through the samples after the first third of the time, in which caches fill, and what it rises by over the rest is held
to ``MAX_GROWTH``.
"""

from __future__ import annotations

import gc
import hashlib
import resource
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

from tests.fuzz.forms import Form
from tests.fuzz.mutate import mutated, mutated_bytes

HANG_S = 10.0
"""Seconds of the processor that an input may take: on a busy machine, the clock runs on meanwhile."""
MAX_GROWTH = 24 << 20
"""Bytes by which the process may grow in the last two thirds of a run."""
MOST_MEMORY = 4 << 30
"""Bytes of addresses of a process that fuzzes."""
SAMPLE_S = 2.0
TRACED = 0.3
"""Of the inputs: the trace takes four times as long as what it follows."""
MOST_KEPT = 4000
"""Inputs; beyond it the oldest that were not given at first go."""
_ROOT = Path(__file__).parents[2]
_MINE = (str(_ROOT / "streampack"), str(_ROOT / "services"))


@dataclass(frozen=True)
class Target:
    """``run`` raises for what must not be; ``seeds`` gives the first inputs, in ``form``."""

    name: str
    form: Form
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], object]


class Hang(Exception):
    """An input took too long."""


class Crash(Exception):
    """``data`` made the target raise ``__cause__``."""

    def __init__(self, data: bytes, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.data, self.__cause__ = data, cause

    @property
    def name(self) -> str:
        return hashlib.blake2b(self.data, digest_size=5).hexdigest()

    @property
    def text(self) -> str:
        return "".join(traceback.format_exception(self.__cause__))


@dataclass
class Fuzzer:
    """One target's; ``seed`` gives the same inputs again."""

    target: Target
    seed: int = 0
    executions: int = 0
    kept: list[bytes] = field(default_factory=list)
    lines: int = 0
    """Of this project's modules that were reached."""
    memory: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, bytes of the process)."""

    def __post_init__(self) -> None:
        self._rng = Random(self.seed)
        self._first = 0
        self._unseen: dict[CodeType, set[int]] = {}  # lines of a function that were not reached yet

    def begin(self, more: list[bytes]) -> None:
        """Run the target's first inputs, and ``more``: those that once crashed it. Raises Crash."""
        for data in [*self.target.seeds(), *more]:
            self.run(data)
            self.kept.append(data)
        self._first = len(self.kept)

    def run(self, data: bytes, traced: bool = True) -> bool:
        """Run the target with an input; did it reach a new line, as far as that is ``traced``? Raises Crash."""
        before = self.lines
        self.executions += 1
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
        signal.setitimer(signal.ITIMER_REAL, 10 * HANG_S)
        sys.settrace(self._called if traced else None)
        try:
            self.target.run(data)
        except Exception as error:
            sys.settrace(None)
            raise Crash(data, error) from error
        finally:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        return self.lines > before

    def step(self) -> None:
        """One changed input. Raises Crash."""
        data = self.changed()
        if self.run(data, traced=self._rng.random() < TRACED):
            self.kept.append(data)
            if len(self.kept) > MOST_KEPT:
                del self.kept[self._first]

    def changed(self) -> bytes:
        """Another input, of those that are kept: the last ones most."""
        rng, kept = self._rng, self.kept
        data = kept[-1 - int(len(kept) * rng.random() ** 2)]
        form = self.target.form
        tree = form.read(data) if rng.random() < 0.9 else None
        if tree is None:
            return mutated_bytes(data, rng)
        others = [other for other in (form.read(rng.choice(kept)),) if other is not None]
        return form.write(mutated(tree, others, rng))

    def _called(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if code not in self._unseen:
            mine = code.co_filename.startswith(_MINE)
            self._unseen[code] = {line for _, _, line in code.co_lines() if line} if mine else set()
        return self._line if self._unseen[code] else None  # one that was seen whole costs no more

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        unseen = self._unseen[frame.f_code]
        if event == "line" and frame.f_lineno in unseen:
            unseen.discard(frame.f_lineno)
            self.lines += 1
        return self._line

    def for_seconds(self, seconds: float, tell: Callable[[Fuzzer], None], every_s: float) -> None:
        """Run changed inputs for so long; ``tell`` is called now and then. Raises Crash."""
        began = time.monotonic()
        told = sampled = 0.0
        while (now := time.monotonic() - began) < seconds:
            if now - sampled >= SAMPLE_S:
                sampled = now
                gc.collect()
                self.memory.append((now, resident_bytes()))
            if now - told >= every_s:
                told = now
                tell(self)
            self.step()

    @property
    def growth(self) -> int:
        """Bytes by which the process grew, by a line through its samples, after the first third of them."""
        later = self.memory[len(self.memory) // 3 :]
        if len(later) < 3:
            return 0
        slope = statistics.linear_regression(*zip(*later, strict=True)).slope
        return int(slope * (later[-1][0] - later[0][0]))


def resident_bytes() -> int:
    """Memory of this process."""
    with Path("/proc/self/statm").open() as statm:
        return int(statm.read().split()[1]) * 4096


def watch_for_hangs() -> None:
    """Have an input that takes too long raise Hang, in the main thread."""

    def hang(_number: int, _frame: FrameType | None) -> None:
        raise Hang(f"took more than {HANG_S:.0f} s of the processor, or ten times as long")

    signal.signal(signal.SIGVTALRM, hang)
    signal.signal(signal.SIGALRM, hang)


def bound_memory() -> None:
    """Have this process get no more than ``MOST_MEMORY``: an input that takes more is a crash."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, most))
