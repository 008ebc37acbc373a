"""Tables that lead from the kind of a message or an event to the method that handles it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from streampack.errors import InternalError

Owner = TypeVar("Owner")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
Context = ParamSpec("Context")
Result = TypeVar("Result")


class Handlers(dict[type, Callable[Concatenate[Any, Any, Context], Result]], Generic[Context, Result]):
    """The methods of a class that each handle some kinds of values.

    ``Context`` are the arguments after the value. A kind without a method of its own is handled by the method of its
    nearest base class. A kind of which no base class has a method raises InternalError.

    >>> class Counter:
    ...     _of_kinds = Handlers[[int], int]()
    ...
    ...     def count(self, value: object, times: int) -> int:
    ...         return self._of_kinds[type(value)](self, value, times)
    ...
    ...     @_of_kinds.of(str, bytes)
    ...     def _count_characters(self, value: str | bytes, times: int) -> int:
    ...         return times * len(value)
    >>> Counter().count("abc", 2)
    6
    """

    @overload
    def of(
        self, a: type[A], /
    ) -> Callable[
        [Callable[Concatenate[Owner, A, Context], Result]], Callable[Concatenate[Owner, A, Context], Result]
    ]: ...
    @overload
    def of(
        self, a: type[A], b: type[B], /
    ) -> Callable[
        [Callable[Concatenate[Owner, A | B, Context], Result]], Callable[Concatenate[Owner, A | B, Context], Result]
    ]: ...
    @overload
    def of(
        self, a: type[A], b: type[B], c: type[C], /
    ) -> Callable[
        [Callable[Concatenate[Owner, A | B | C, Context], Result]],
        Callable[Concatenate[Owner, A | B | C, Context], Result],
    ]: ...
    def of(self, *kinds: type) -> Any:
        """Return a decorator that makes a method the handler of these types."""

        def add(method: Callable[..., Result]) -> Callable[..., Result]:
            self.update(dict.fromkeys(kinds, method))
            return method

        return add

    def ignore(self: Handlers[Context, list[Any]], *kinds: type) -> None:
        """Ignore values of these types: their handler returns no effects."""
        no_effects: Any = lambda *_: []  # noqa: E731 - typed
        self.update(dict.fromkeys(kinds, no_effects))

    def require(self, kinds: Iterable[type], unless: type = object) -> None:
        """Raise InternalError unless each of these types has a handler of its own, other than that of ``unless``."""
        lacking = [kind.__name__ for kind in kinds if self[kind] is self.get(unless)]
        if lacking:
            raise InternalError(f"no method handles {', '.join(lacking)}")

    def __missing__(self, kind: type) -> Callable[Concatenate[Any, Any, Context], Result]:
        for base in kind.__mro__[1:]:
            if base in self:
                self[kind] = self[base]
                return self[base]
        raise InternalError(
            f"got {kind.__name__}, expected one of: {', '.join(sorted(other.__name__ for other in self))}"
        )
