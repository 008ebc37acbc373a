"""Compile kernels before they are needed, for this processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from streampack.core.jit import Kernel, Key
from streampack.kernels.background import Helper

Wanted = list[tuple[Kernel, Key]]


def wanted_by(calls: Iterable[Callable[[], object]]) -> Wanted:
    """Return the kernels that calls need, with the types of their arguments, each once."""
    wanted: dict[tuple[str, str, Key], tuple[Kernel, Key]] = {}
    before = Kernel.when_missing

    def ask(kernel: Kernel, keys: Sequence[Key]) -> None:
        for key in keys:
            wanted[kernel.__module__, kernel.__name__, key] = kernel, key

    Kernel.when_missing = ask
    try:
        for call in calls:
            call()
    finally:
        Kernel.when_missing = before
    return list(wanted.values())


def missing(wanted: Wanted) -> Wanted:
    """Return the kernels that are not on disk. Raises ImportError without a numba that compiles."""
    return [(kernel, key) for kernel, key in wanted if not (kernel.can_be_kept and kernel.is_cached(key))]


def compile_all(wanted: Wanted, on_done: Callable[[Kernel], None]) -> list[str]:
    """Compile kernels in another process; return the errors. ``on_done``: called after each kernel."""
    errors, helper = list[str](), Helper("", quiet=True)
    try:
        for kernel, key in wanted:
            if error := helper.compile(kernel, key):
                errors.append(f"{kernel.__name__}: {error}")
            on_done(kernel)
    finally:
        helper.close()
    return errors + [f"{kernel.__name__}: it is not on disk" for kernel, _ in missing(wanted) if not errors]
