"""Declared figures: which series a value has, and from which object a field of a status is filled."""

from __future__ import annotations

from typing import Annotated

import pytest
from msgspec import Struct
from streampack_services.figure import Series, counter, filled, gauge
from streampack_services.http.metrics import figures_of


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


def test_a_computed_figure_reads_as_an_attribute_and_is_no_field() -> None:
    shelf = Shelf(name="a", books=0)
    assert shelf.is_empty is True
    assert Shelf.__struct_fields__ == ("name", "books")


def test_a_field_without_a_value_is_read_from_the_one_source_that_has_it() -> None:
    assert filled(Shelf, Counts(), Pages(), name="a") == Shelf(name="a", books=7)
    for sources, got in (([Pages()], "none"), ([Counts(), Counts()], "Counts, Counts")):
        with pytest.raises(TypeError, match=rf"Shelf\.books: expected one source that has it, got {got}"):
            filled(Shelf, *sources, name="a")
