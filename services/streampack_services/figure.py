"""The declaration of a figure: on a field, or on a computed value, of a status struct.

To add a figure:

1. Count it in the core, as an attribute of an object that the ``reporter`` hands to ``filled``. For ``FeedStatus``
   these are the feed, its readers, attempts, history, memory and flows; for ``PackTotals`` the ``Totals``. Test it
   there.
2. Declare a field of the same name in the struct of ``broker.status`` that it belongs to:
   ``window_tokens: Annotated[int, gauge("window_tokens", "Tokens of the samples in the window.")]``.
   A figure that follows from other fields is a method under ``@gauge(...)``, and reads as an attribute.
3. Write the recorded figures anew: ``python -m streampack_services.http.metrics > deploy/prometheus/METRICS.md``,
   ``python -m docs.generate.dashboard``, ``python -m tests.services.http.test_same_figures``,
   ``python -m tests.services.watch.test_command_texts`` and ``python -m tests.integration.watching.test_status_json``.

``/status`` has it under the field's name, ``/metrics`` and METRICS.md under the figure's. A dict has a series for each
key, a struct of numbers for each field: the declaration ends with the names of these labels. None has no series. A text
counts as 1 unless it is empty.

A figure that is declared with ``shown=True`` has a row of its own, under its ``label``, in ``streampack status``,
``streampack top`` and the live page. A figure of a stream has a column there. In Grafana, it has a panel. Other figures
are in the texts and panels that name them. The page reads ``/status``, so only a field can be ``shown``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import attrgetter
from types import UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)  # fmt: skip

from msgspec import Struct
from msgspec.structs import asdict

from streampack_services.amounts import count_text, duration_text, size_text

S = TypeVar("S", bound=Struct)
T = TypeVar("T")


class Declared:
    """A declaration, with the names of labels; over a method, it makes a computed attribute of the struct."""

    def __init__(self, *labels: str) -> None:
        self.labels = labels

    def __call__(self, read: Callable[[Any], T]) -> Computed[T]:
        """Return the attribute of a struct that ``read`` computes."""
        return Computed(self, read)


class Unit(NamedTuple):
    """The unit of a figure: how a terminal shows a value, and Grafana's names of the unit and of a rate in it."""

    text: Callable[[float], str]
    grafana: str = "none"
    grafana_rate: str = "cps"


UNITS = {
    "tokens": Unit(count_text, "si:tok", "si:tok/s"),
    "samples": Unit(count_text, "si:smp", "si:smp/s"),
    "bytes": Unit(size_text, "bytes", "Bps"),
    "seconds": Unit(duration_text, "s", "percentunit"),
    "ratio": Unit("{:.2%}".format, "percentunit"),
    "quotient": Unit("{:.3f}".format),
    "weight": Unit("{:g}".format),
    "count": Unit(count_text),
}
"""Units by name. A metric's name ends with its unit; ``count`` is that of all other names."""


class Figure(Declared):
    """A figure as Prometheus has it: its name without prefix and ``_total``, and its help text.

    The labels are those of a value that is a dict or a struct.

    Attributes:
        metric: The whole name.
        unit: A name of ``UNITS``; by default the one that ends the name.
        label: Name of a row, column or panel; by default the name, without a unit that the value's text has.
        shown: The figure has a row, column or panel of its own everywhere.
    """

    def __init__(
        self, kind: Literal["counter", "gauge", "histogram"], name: str, text: str, *labels: str,
        unit: str | None = None, label: str | None = None, shown: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(*labels)
        stem, _, last = name.rpartition("_")
        self.kind, self.name, self.text, self.shown = kind, name, text, shown
        self.metric = f"streampack_{name}_total" if kind == "counter" else f"streampack_{name}"
        self.unit = unit or (last if last in UNITS else "count")
        self.label = label or (stem if last in ("bytes", "seconds", "ratio") else name).replace("_", " ")

    def __call__(self, read: Callable[[Any], T]) -> Computed[T]:
        """Return the attribute of a struct that ``read`` computes; raise TypeError if the figure is ``shown``."""
        if self.shown:
            raise TypeError(
                f"{self.name}: got shown=True over a method, expected it over a field, because /status has fields "
                f"alone and the live page reads it. Declare a field, and fill it in the reporter."
            )
        return super().__call__(read)

    def labeled(self, *labels: str) -> Figure:
        """Return the same figure with these labels."""
        return Figure(self.kind, self.name, self.text, *labels, unit=self.unit, label=self.label, shown=self.shown)

    def text_of(self, value: Any) -> str:
        """Return a value as text for a terminal: one number, or ``key number`` of each key of a dict or struct."""
        if isinstance(value, Struct):
            value = asdict(value)
        if isinstance(value, dict):
            return ", ".join(f"{key} {self.text_of(part)}" for key, part in value.items())
        return value if isinstance(value, str) else UNITS[self.unit].text(value)


counter, gauge, histogram = partial(Figure, "counter"), partial(Figure, "gauge"), partial(Figure, "histogram")
"""A counter only rises while the broker runs."""


class Series(Declared):
    """Marks a list or a dict of structs: each has its own series of the figures that are declared in it.

    The labels are attributes of the struct. The label of a dict is its key.
    """


class Computed(Generic[T]):
    """An attribute of a struct that is computed from its fields, with its declaration; not a part of ``/status``."""

    def __init__(self, declared: Declared, read: Callable[[Any], T]) -> None:
        self._declared, self.read = declared, read
        self.__doc__ = read.__doc__

    @property
    def hint(self) -> Any:
        """The annotation that a field with this declaration would have."""
        kind = get_type_hints(self.read)["return"]
        return Annotated[kind, self._declared]

    @overload
    def __get__(self, struct: None, kind: type) -> Self: ...

    @overload
    def __get__(self, struct: Struct, kind: type) -> T: ...

    def __get__(self, struct: Struct | None, kind: type) -> Self | T:
        return self if struct is None else self.read(struct)


class Member(NamedTuple):
    """An attribute of a struct that is a figure or has some."""

    name: str
    kind: Any
    """The struct that the value is, or consists of; None for a figure of numbers."""
    declared: Declared
    single: bool
    """True if the value is one struct or None, not a list or dict of them."""
    read: Callable[[Any], Any]
    """Returns the value of a struct."""


@cache
def members(struct: type) -> list[Member]:
    """Return a struct's figures, and the structs in it; a single struct counts as a series without labels."""
    hints = get_type_hints(struct, include_extras=True)
    hints |= {name: value.hint for name in dir(struct) if isinstance(value := getattr(struct, name), Computed)}
    rows = []
    for name, hint in hints.items():
        parts = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        kinds = [kind for kind in (*get_args(parts[0]), parts[0]) if _is_struct(kind)]
        declared = next((part for part in parts[1:] if isinstance(part, Declared)), None)
        single = bool(kinds) and get_origin(parts[0]) in (None, UnionType)
        if declared is not None or single:
            computed = getattr(struct, name)
            read = computed.read if isinstance(computed, Computed) else attrgetter(name)
            rows.append(Member(name, kinds[0] if kinds else None, declared or Series(), single, read))
    return rows


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def figures_of(struct: type, *labels: str) -> Iterator[Figure]:
    """Yield the figures that are declared in a struct and in the structs in it, with all their labels.

    ``labels``: the names of the labels of each such struct.
    """
    for member in members(struct):
        of_all = (*labels, *member.declared.labels)
        if isinstance(member.declared, Figure):
            yield member.declared.labeled(*of_all)
        else:
            yield from figures_of(member.kind, *of_all)


class FigurePlace(NamedTuple):
    """A figure of a struct, or of a single struct in it, and the path of attributes to its value."""

    path: tuple[str, ...]
    figure: Figure


@cache
def places_in(struct: type) -> dict[str, FigurePlace]:
    """Return the figures of a struct, and of single structs in it, by name."""
    places: dict[str, FigurePlace] = {}
    for name, kind, declared, single, _ in members(struct):
        if isinstance(declared, Figure):
            places[declared.name] = FigurePlace((name,), declared)
        elif single:
            places |= {key: FigurePlace((name, *path), figure) for key, (path, figure) in places_in(kind).items()}
    return places


def shown_in(struct: type) -> list[FigurePlace]:
    """Return the figures of ``places_in`` that are ``shown``."""
    return [place for place in places_in(struct).values() if place.figure.shown]


def row_of(struct: Struct, name: str) -> tuple[str, str]:
    """Return the label of the figure ``name``, and its value in a struct as text: ``-`` for None."""
    path, figure = places_in(type(struct))[name]
    value: Any = struct
    for attribute in path:
        value = None if value is None else getattr(value, attribute)
    return figure.label, "-" if value is None else figure.text_of(value)


def shown_rows(struct: Struct) -> list[tuple[str, str]]:
    """Return (label, text) of each figure of ``shown_in`` that has a value."""
    rows = [row_of(struct, place.figure.name) for place in shown_in(type(struct))]
    return [(label, text) for label, text in rows if text != "-"]


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
