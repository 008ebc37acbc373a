"""Kernels: functions that run as plain Python until numba has compiled them.

numba compiles a kernel and keeps the result on disk. The first call on a machine would wait for the compiler for some
seconds. So a service sets ``when_missing``, and a kernel runs as plain Python until ``streampack.kernels`` has its
compiled form; without it, the first call compiles. Without numba, kernels always run as plain Python.

A kernel is written once, with loops over numpy arrays. Where these loops are too slow in Python, ``plain`` is the same
function in numpy or over Python ints. Both forms have the same results.

Importing this module does not import numba, which takes most of a second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, overload

import numpy as np

Key = tuple[Any, ...]
"""The types of a call's arguments, in a form that ``repr`` and ``ast.literal_eval`` keep."""

_inside_plain = ContextVar("inside_plain", default=False)
"""True in a thread that runs the plain form of a kernel."""


class Kernel:
    """A function with a compiled form.

    Args:
        function: The function as numba compiles it: loops over numpy arrays.
        plain: The same function for Python without a compiler. Default: ``function``.
        keys: The only types for which the function is compiled, see ``key_of``; arguments of other types are converted.
            Default: the types of each call.

    Example:
        >>> @kernel
        ... def total(values):
        ...     result = 0
        ...     for value in values:
        ...         result += value
        ...     return result
        >>> int(total(np.arange(4))), int(total.py_func(np.arange(4)))
        (6, 6)
    """

    when_missing: ClassVar[Callable[[Kernel, Sequence[Key]], None] | None] = None
    """Called once for each kernel and key without a compiled form, in place of compiling."""

    def __init__(
        self, function: Callable[..., Any], plain: Callable[..., Any] | None = None, keys: Sequence[Key] = ()
    ) -> None:
        functools.update_wrapper(self, function)
        self.__name__: str = function.__name__
        self.py_func = function
        self.plain = plain or function
        self.keys = tuple(keys)
        self.asked: set[Key] = set()
        """The keys of calls that found no compiled form."""
        self._dispatcher: Any = None
        self._call: Callable[..., Any] = self._first

    def __call__(self, *args: Any) -> Any:
        """Run the compiled form, or the plain one."""
        return self._call(*args)

    @property
    def signatures(self) -> list[Any]:
        """The compiled signatures of this process."""
        return [] if self._dispatcher is None else list(self._dispatcher.signatures)

    @property
    def is_compiled(self) -> bool:
        """True if calls run the compiled form."""
        return self._dispatcher is not None and self._call is self._dispatcher

    @property
    def dispatcher(self) -> Any:
        """The compiled form, as numba has it. Raises ImportError without a numba that compiles.

        A compiled kernel contains the code of the kernels that it calls, but numba compiles it again only when its own
        file changes. So the stamp of the file on disk also covers the files of those kernels.
        """
        if self._dispatcher is None:
            made = compiled(self.py_func)
            if hasattr(made._cache, "_cache_file"):
                called = {
                    name: used.dispatcher._cache._cache_file._source_stamp
                    for name, used in self.py_func.__globals__.items()
                    if isinstance(used, Kernel) and used.__module__ != self.__module__
                }
                file = made._cache._cache_file
                file._source_stamp = (file._source_stamp, tuple(sorted(called.items())))
            self._dispatcher = made
        return self._dispatcher

    @property
    def _numba_type_(self) -> Any:
        """The type of a kernel that another kernel calls."""
        return self.dispatcher._numba_type_

    @property
    def can_be_kept(self) -> bool:
        """True if there is a folder for the compiled form. Raises ImportError without a numba that compiles."""
        return hasattr(self.dispatcher._cache, "_cache_file")

    def forget(self) -> None:
        """Forget the compiled form, so that numba looks for a folder again."""
        self._dispatcher = None

    def is_cached(self, key: Key) -> bool:
        """Return True if the compiled form for these types is on disk."""
        cache = self.dispatcher._cache
        of_machine = self.dispatcher.targetctx.codegen()
        return cache._index_key(_types(key), of_machine) in cache._cache_file._load_index()

    def compile(self, key: Key) -> None:
        """Load the compiled form for these types from the disk, or compile it and write it to the disk."""
        if (types := _types(key)) not in self.dispatcher.overloads:
            self.dispatcher.compile(types)

    def swap(self) -> None:
        """Let calls run the compiled form from now on; calls with other types go on as before."""
        if self.keys:
            self.dispatcher.disable_compile()
        elif self.when_missing is not None:
            self.dispatcher._compile_for_args = lambda *_: self._plain_for_now  # numba calls what this returns
        self._call = self.dispatcher

    def stay_plain(self) -> None:
        """Let calls run the plain form from now on, as on a machine without numba."""
        self._call = self._plain_for_good

    def _first(self, *args: Any) -> Any:
        """Choose the form for all calls, and call it."""
        if self.when_missing is not None:
            self._call = self._plain_for_now
        else:
            try:
                for key in self.keys:
                    self.compile(key)
                self.swap()
            except ImportError:
                self.stay_plain()
        return self._call(*args)

    def _plain_for_good(self, *args: Any) -> Any:
        return _as_python(self.plain(*args))

    def _plain_for_now(self, *args: Any) -> Any:
        """Run the plain form; ask for the compiled one, unless another kernel calls, whose compiled form has this."""
        if _inside_plain.get():
            return _as_python(self.plain(*args))
        if (key := key_of(*args)) not in self.asked and (ask := Kernel.when_missing) is not None:
            self.asked.add(key)
            ask(self, [key])
        outside = _inside_plain.set(True)
        try:
            return _as_python(self.plain(*args))
        finally:
            _inside_plain.reset(outside)


@overload
def kernel(function: Callable[..., Any]) -> Any: ...
@overload
def kernel(
    *, plain: Callable[..., Any] | None = None, keys: Sequence[Key] = ()
) -> Callable[[Callable[..., Any]], Any]: ...
def kernel(
    function: Callable[..., Any] | None = None, *, plain: Callable[..., Any] | None = None, keys: Sequence[Key] = ()
) -> Any:
    """Return a function as a ``Kernel``; use it as a decorator, with or without arguments."""
    return functools.partial(Kernel, plain=plain, keys=keys) if function is None else Kernel(function, plain, keys)


def compiled(function: Callable[..., Any]) -> Any:
    """Return a function that numba compiles at its first call and keeps on disk.

    It runs without the GIL. If there is no folder for it, as in a container with a read-only installation and no home,
    each process compiles again. Raises ImportError if numba is missing, broken, or told not to compile.
    """
    compiler = _compiler()
    try:
        return compiler(nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return compiler(nogil=True)(function)


def key_of(*args: Any) -> Key:
    """Return the types of arguments.

    Example:
        >>> key_of(np.zeros(3, np.int32), 7)
        (('array', '<i4', 1, 'C', True, True), 'int')
    """
    return tuple(map(_described, args))


def _described(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        flags = value.flags
        layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
        return "array", value.dtype.str, value.ndim, layout, bool(flags.writeable), bool(flags.aligned)
    if isinstance(value, tuple):
        kind = type(value)
        return "tuple", kind.__module__, kind.__qualname__, key_of(*value)
    if isinstance(value, np.generic):
        return value.dtype.str
    return type(value).__name__


_EXAMPLES = {"int": 1, "float": 1.0, "bool": True, "NoneType": None}


def _example(described: Any) -> Any:
    """Return a value with the described type."""
    if isinstance(described, str):
        return _EXAMPLES[described] if described in _EXAMPLES else np.dtype(described).type(1)
    if described[0] == "tuple":
        _, module, name, values = described
        examples = [_example(value) for value in values]
        return tuple(examples) if module == "builtins" else _class(module, name)(*examples)
    _, dtype, ndim, layout, writeable, aligned = described
    kind = np.dtype(dtype)
    if aligned:
        array = np.zeros((4,) * ndim, kind, order="F" if layout == "F" else "C")
    else:
        array = np.ndarray((4,) * ndim, kind, bytearray(4**ndim * kind.itemsize + 1), 1)
    if layout == "A":
        array = array[(slice(None, None, 2),) * ndim]
    array.flags.writeable = writeable
    return array


def _class(module: str, name: str) -> Any:
    import importlib

    return getattr(importlib.import_module(module), name)


def _types(key: Key) -> tuple[Any, ...]:
    """Return numba's types of a call."""
    import numba

    typeof: Any = numba.typeof
    return tuple(typeof(_example(described)) for described in key)


def _compiler() -> Any:
    """Return ``numba.njit``. Raises ImportError if numba is missing, broken, or told not to compile."""
    try:
        import numba

        config: Any = numba.config
        if not config.DISABLE_JIT:
            return numba.njit
    except Exception as error:  # a broken installation raises anything
        raise ImportError(f"numba does not work: {error!r}") from error
    raise ImportError("NUMBA_DISABLE_JIT is set")


def _as_python(result: Any) -> Any:
    """Return numpy scalars as the Python numbers that a compiled function returns."""
    if isinstance(result, np.generic):
        return result.item()
    if type(result) is tuple:
        return tuple(map(_as_python, result))
    return result
