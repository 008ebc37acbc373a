"""Declared figures: which series a value has, and from which object a field of a status is filled."""

from __future__ import annotations

from typing import Annotated

import pytest
from msgspec import Struct
from streampack_services.figure import Figure, Series, counter, figures_of, filled, gauge, places_in, row_of


class Shelf(Struct, frozen=True, kw_only=True):
    name: str
    books: Annotated[int, gauge("books", "Books of the shelf.")]

    @gauge("is_empty", "1 if the shelf has no book.")
    def is_empty(self) -> bool:
        return not self.books


class Library(Struct, frozen=True, kw_only=True):
    loans: Annotated[dict[str, int], counter("loans", "Books lent, by reader.", "reader")]
    shelves: Annotated[list[Shelf], Series("name")]
    first: Shelf | None = None


class Counts:
    books = 7


class Pages:
    pages = 3


def test_figures_have_the_labels_of_the_structs_that_they_are_in() -> None:
    figures = [(each.kind, each.name, each.labels) for each in figures_of(Library, "city")]
    of_shelf = [("gauge", "books"), ("gauge", "is_empty")]
    assert figures == [
        ("counter", "loans", ("city", "reader")),
        *((*each, ("city", "name")) for each in of_shelf),
        *((*each, ("city",)) for each in of_shelf),
    ]


@pytest.mark.parametrize(
    ("figure", "label", "unit", "text"),
    [
        (gauge("held_tokens", ""), "held tokens", "tokens", "12.3k"),
        (gauge("log_bytes", ""), "log", "bytes", "12.1 KiB"),
        (counter("form_seconds", ""), "form", "seconds", "3h25m"),
        (gauge("waste_ratio", ""), "waste", "ratio", "1234500.00%"),
        (gauge("ready", "", label="is ready"), "is ready", "count", "12.3k"),
        (gauge("cost_ratio", "", unit="quotient"), "cost", "quotient", "12345.000"),
    ],
)
def test_label_and_unit_follow_from_the_name(figure: Figure, label: str, unit: str, text: str) -> None:
    assert (figure.label, figure.unit, figure.text_of(12345)) == (label, unit, text)
    assert figure.text_of({"a": 12345, "b": 12345}) == f"a {text}, b {text}"


def test_a_row_has_the_label_and_the_value_of_a_figure_also_in_a_struct_within() -> None:
    shelf = Shelf(name="a", books=3)
    assert row_of(shelf, "books") == ("books", "3")
    assert places_in(Library)["books"].path == ("first", "books")
    library = Library(loans={"x": 2}, shelves=[shelf], first=shelf)
    assert row_of(library, "loans") == ("loans", "x 2")
    assert row_of(library, "books") == ("books", "3")
    assert row_of(Library(loans={}, shelves=[]), "books") == ("books", "-")


def test_a_computed_figure_reads_as_an_attribute_and_is_no_field() -> None:
    shelf = Shelf(name="a", books=0)
    assert shelf.is_empty is True
    assert Shelf.__struct_fields__ == ("name", "books")


def test_a_field_without_a_value_is_read_from_the_one_source_that_has_it() -> None:
    assert filled(Shelf, Counts(), Pages(), name="a") == Shelf(name="a", books=7)
    for sources, got in (([Pages()], "none"), ([Counts(), Counts()], "Counts, Counts")):
        with pytest.raises(TypeError, match=rf"Shelf\.books: expected one source that has it, got {got}"):
            filled(Shelf, *sources, name="a")
