"""The declaration of a figure: on a field, or on a computed value, of a status struct.

To add a figure:

1. Count it in the core, as an attribute of an object that the ``reporter`` hands to ``filled``. Test it there.
2. Declare a field of the same name in the struct of ``broker.status`` that it belongs to:
   ``window_tokens: Annotated[int, gauge("window_tokens", "Tokens of the samples in the window.")]``.
   A figure that follows from other fields is a method under ``@gauge(...)``, and reads as an attribute.
3. Write the recorded figures anew: ``python -m streampack_services.http.metrics > deploy/prometheus/METRICS.md``,
   ``python -m tests.services.http.test_same_figures`` and ``python -m tests.services.watch.test_command_texts``.

``/status`` has it under the field's name, ``/metrics`` and METRICS.md under the figure's. A dict has a series for each
key, a struct of numbers for each field: the declaration ends with the names of these labels. None has no series. A text
counts as 1 unless it is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, get_type_hints, overload

from msgspec import Struct

S = TypeVar("S", bound=Struct)
T = TypeVar("T")


class Declared:
    """A declaration, with the names of labels; over a method, it makes a computed attribute of the struct."""

    def __init__(self, *labels: str) -> None:
        self.labels = labels

    def __call__(self, read: Callable[[Any], T]) -> Computed[T]:
        """Return the attribute of a struct that ``read`` computes."""
        return Computed(self, read)


class Figure(Declared):
    """A figure as Prometheus has it: its name without prefix and ``_total``, and its help text.

    The labels are those of a value that is a dict or a struct.
    """

    def __init__(self, kind: Literal["counter", "gauge", "histogram"], name: str, text: str, *labels: str) -> None:
        super().__init__(*labels)
        self.kind, self.name, self.text = kind, name, text


counter, gauge, histogram = partial(Figure, "counter"), partial(Figure, "gauge"), partial(Figure, "histogram")
"""A counter only rises while the broker runs."""


class Series(Declared):
    """Marks a list or a dict of structs: each has its own series of the figures that are declared in it.

    The labels are attributes of the struct. The label of a dict is its key.
    """


class Computed(Generic[T]):
    """An attribute of a struct that is computed from its fields, with its declaration; not a part of ``/status``."""

    def __init__(self, declared: Declared, read: Callable[[Any], T]) -> None:
        self._declared, self._read = declared, read
        self.__doc__ = read.__doc__

    @property
    def hint(self) -> Any:
        """The annotation that a field with this declaration would have."""
        kind = get_type_hints(self._read)["return"]
        return Annotated[kind, self._declared]

    @overload
    def __get__(self, struct: None, kind: type) -> Self: ...

    @overload
    def __get__(self, struct: Struct, kind: type) -> T: ...

    def __get__(self, struct: Struct | None, kind: type) -> Self | T:
        return self if struct is None else self._read(struct)


def filled(struct: type[S], *sources: object, **values: Any) -> S:
    """Return a struct with these ``values``; each other field is the attribute of its name that one source has.

    Sources of the same types have the same attributes.

    Raises:
        TypeError: No source has the attribute, or several have it.
    """
    kinds = (struct, *map(type, sources), *values)
    if (places := _PLACES.get(kinds)) is None:
        missing = [name for name in struct.__struct_fields__ if name not in values]
        places = _PLACES[kinds] = [(name, _place(struct, name, sources)) for name in missing]
    for name, place in places:
        values[name] = getattr(sources[place], name)
    return struct(**values)


def _place(struct: type[Struct], name: str, sources: Sequence[object]) -> int:
    """Return the index of the source that has an attribute."""
    places = [at for at, source in enumerate(sources) if hasattr(source, name)]
    if len(places) != 1:
        got = ", ".join(type(sources[at]).__name__ for at in places) or "none"
        raise TypeError(f"{struct.__name__}.{name}: expected one source that has it, got {got}")
    return places[0]


_PLACES: dict[tuple[object, ...], list[tuple[str, int]]] = {}
"""Names of the fields, and the indices of their sources, by the types of struct and sources and the names of values."""
