"""The thread that brings compiled kernels into this process.

Importing numba takes most of a second, and loading a kernel from the disk some hundredths. Compiling all kernels takes
half a minute, once on a machine. A second process (``helper``) compiles, since the compiler would hold the GIL much of
the time. Until a kernel is there, its plain form runs, with the same results.

A fork waits while the thread imports or loads. A child with a half-imported numba, whose locks belong to a thread that
no longer exists, would hang on importing numba. The end of the process waits, too, since LLVM would crash in the middle
of its work.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from streampack.core.jit import Kernel, Key
from streampack.kernels.helper import alone

log = logging.getLogger("streampack.kernels")
T = TypeVar("T")

SAY_AFTER_S = 2.0
"""Seconds for which kernels are compiled before the log says so."""
_MAIN = "from streampack.kernels.helper import main; main()"


class Compiler:
    """The compiled kernels that this process has asked for, and the thread that brings them."""

    def __init__(self) -> None:
        self._begun = threading.Lock()
        """Lock that guards ``_thread``."""
        self._busy = threading.Lock()
        """Held while numba is imported, and while it loads a kernel."""
        self._thread: threading.Thread | None = None
        self._requests: SimpleQueue[tuple[Kernel, Key]] = SimpleQueue()
        self._left: dict[Kernel, int] = {}
        """Number of keys of each kernel that are asked for and not there."""
        self._all_there = threading.Condition()
        self._failed: set[Kernel] = set()
        """Kernels that could not be compiled for some types; they stay plain."""
        self._over = threading.Event()
        """Set at the end of the process."""
        self._helper: Helper | None = None
        self._folder = ""
        """A folder for compiled kernels of this process alone; empty if numba has one on this machine."""
        self.works = True
        """False if numba is missing, broken, or told not to compile; then kernels stay as they are."""

    def ask(self, kernel: Kernel, keys: Sequence[Key]) -> None:
        """Ask for the compiled form of a kernel for all of these types. Any thread may call it."""
        if not self.works:
            return
        with self._all_there:
            self._left[kernel] = self._left.get(kernel, 0) + len(keys)
        for key in keys:
            self._requests.put((kernel, key))
        with self._begun:
            if self._thread is None:
                self._thread = threading.Thread(target=self._bring, name="streampack-kernels", daemon=True)
                self._thread.start()

    @property
    def missing(self) -> list[Kernel]:
        """Kernels that were requested and are not compiled yet."""
        return list(self._left)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all kernels that were asked for are there, or cannot be had; return False at the time-out."""
        with self._all_there:
            return self._all_there.wait_for(lambda: not self._left or not self.works, timeout_s)

    def _bring(self) -> None:
        """Body of the thread."""
        try:
            with self._busy:
                if self._over.is_set():
                    return
                import numba  # noqa: F401  # the import takes most of a second
        except Exception as error:
            self._give_up(f"numba is missing or does not work: {error!r}")
            return
        while True:
            kernel, key = self._requests.get()
            if self._over.is_set():
                return
            try:
                self._load(kernel, key)
            except ImportError as error:
                self._give_up(str(error))
                return
            except Exception:
                self._failed.add(kernel)
                log.exception("cannot compile the kernel %s; it stays plain Python, which is slow", kernel.__name__)
            with self._all_there:
                self._left[kernel] -= 1
                if not self._left[kernel]:
                    del self._left[kernel]
                is_last = not self._left
                if is_last:
                    self._all_there.notify_all()
            if is_last:
                with self._busy:
                    if self._helper is not None and not self._over.is_set():
                        self._helper.close()
                        self._helper = None
                with self._begun:
                    if self._requests.empty():
                        self._thread = None  # the next request begins another one
                        return

    def _give_up(self, why: str) -> None:
        """Leave all kernels as they are."""
        log.info("kernels stay plain Python, which is slow: %s", why)
        with self._all_there:
            self.works = False
            self._all_there.notify_all()

    def _load(self, kernel: Kernel, key: Key) -> None:
        """Load a kernel, after it was compiled if it must be, and let calls use it."""
        with self._busy:
            if not kernel.can_be_kept and not self._folder:
                self._make_folder()
                kernel.forget()
            is_missing = kernel.can_be_kept and not kernel.is_cached(key)
        error = self._let_compile(kernel, key) if is_missing else ""
        if error and not self._over.is_set():
            log.warning("the process that compiles kernels failed for %s: %s", kernel.__name__, error)
        with self._busy:
            if self._over.is_set():
                return
            with alone() if error else contextlib.nullcontext():
                kernel.compile(key)  # from the disk; if the helper has failed, here
            with self._all_there:
                if self._left[kernel] == 1 and kernel not in self._failed:
                    kernel.swap()

    def _let_compile(self, kernel: Kernel, key: Key) -> str:
        """Let the helper compile a kernel; return the error, empty if there is none."""
        try:
            with self._busy:
                if self._over.is_set():
                    return ""
                self._helper = self._helper or Helper(self._folder)
                helper = self._helper
            error = helper.compile(kernel, key)
            if helper.has_ended:
                helper.close()
                self._helper = None  # the next kernel starts another one
            return error
        except OSError as error:
            return f"it cannot be started: {error}"

    def _make_folder(self) -> None:
        """Make a folder for the kernels of this process, because numba finds none that it can write."""
        import numba

        config: Any = numba.config
        self._folder = config.CACHE_DIR = tempfile.mkdtemp(prefix="streampack-kernels-")
        atexit.register(_remove, self._folder, os.getpid())
        log.warning(
            "compiled kernels cannot be kept on this machine, so each process compiles them again: no folder can be "
            "written. Set NUMBA_CACHE_DIR to a folder that this user can write"
        )

    def end(self) -> None:
        """Stop loading, at the end of the process. The helper compiles the remaining kernels for the next process."""
        with self._busy:
            self._over.set()
            helper, self._helper = self._helper, None
        if helper is None:
            return
        if self._folder:
            helper.close()
            return
        with contextlib.suppress(Empty):
            while True:
                helper.ask(*self._requests.get_nowait())
        helper.leave()

    def load(self, function: Callable[[], T | None]) -> T | None:
        """Call a function that imports numba or compiles, and return its result; None once the process ends.

        A fork and the end of the process wait for the function.
        """
        with self._busy:
            return None if self._over.is_set() else function()

    def hold(self) -> None:
        """Wait until nothing is loaded, before a fork."""
        self._busy.acquire()

    def go_on(self) -> None:
        """Let the thread go on after a fork."""
        self._busy.release()


class Helper:
    """The second process.

    ``folder``: where it keeps compiled kernels; empty: where numba does. ``quiet``: do not log what goes on.
    """

    def __init__(self, folder: str, quiet: bool = False) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry and isinstance(entry, str))
        answers, write_end = os.pipe()
        self._answers = open(answers)  # noqa: SIM115  # until ``close``
        try:  # a process group of its own: Ctrl-C is for the parent. Whoever reads the parent's output does not wait
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, str(write_end)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, text=True, pass_fds=(write_end,), process_group=0,
                env={**os.environ, "PYTHONPATH": path, **({"NUMBA_CACHE_DIR": folder} if folder else {})},
            )  # fmt: skip
        except OSError:
            self._answers.close()
            raise
        finally:
            os.close(write_end)
        self._began = time.monotonic()
        self._report_timer = threading.Timer(SAY_AFTER_S, self._say)
        self._report_timer.daemon = True
        if not quiet:
            self._report_timer.start()

    def ask(self, kernel: Kernel, key: Key) -> None:
        """Let the process compile a kernel, and keep it on disk. Does nothing if the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps([kernel.__module__, kernel.__name__, repr(key)]) + "\n")
            self._process.stdin.flush()

    def compile(self, kernel: Kernel, key: Key) -> str:
        """Ask for a kernel, and wait until it is compiled; return the error, empty if there is none."""
        began = time.monotonic()
        self.ask(kernel, key)
        error = self._answers.readline()
        log.debug("%s: compiled in %.1f s", kernel.__name__, time.monotonic() - began)
        return error.strip() if error else "the process has ended"

    @property
    def has_ended(self) -> bool:
        """True if the process has ended by itself."""
        return self._process.poll() is not None

    def leave(self) -> None:
        """Leave the process alone; it ends when it has compiled what it was asked for."""
        self._report_timer.cancel()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.returncode = 0  # no warning of subprocess: it goes on by purpose

    def close(self) -> None:
        """End the process."""
        self._report_timer.cancel()
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a request that the process did not read
            self._process.stdin.close()
        self._answers.close()
        log.info("compiled kernels for %.0f s", time.monotonic() - self._began)

    @staticmethod
    def _say() -> None:
        log.warning(
            "compiling kernels in the background, once for each installation. Until they are there, in half a minute "
            "or more, packing is slower and has the same results. 'streampack kernels' compiles them ahead"
        )


def _remove(folder: str, pid: int) -> None:
    """Remove the folder at the end of the process that made it, but not at the end of its children."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


compiler = Compiler()
"""The kernels of this process."""


def start() -> None:
    """Let all kernels of this process run as plain Python until they are compiled in the background."""
    Kernel.when_missing = compiler.ask


def _after_fork() -> None:
    """Give a forked child a new compiler, because the thread of the old one does not run in the child.

    Kernels that were asked for and are missing are asked for again at their next call.
    """
    global compiler
    for kernel in compiler.missing:
        kernel.asked.clear()
    folder, compiler = compiler._folder, Compiler()
    compiler._folder = folder
    if Kernel.when_missing is not None:
        start()


os.register_at_fork(
    before=lambda: compiler.hold(), after_in_parent=lambda: compiler.go_on(), after_in_child=_after_fork
)
atexit.register(lambda: compiler.end())
