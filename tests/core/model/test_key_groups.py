"""Groups of keys: structs share keys, each in its own order, and new keys come last."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from streampack.core.model.keys.key_groups import Keys, values_of


class Sizes(Keys, frozen=True, kw_only=True):
    width: Annotated[int, Meta(ge=1, description="Width")] = 3
    depth: int = 4


class Names(Keys, frozen=True, kw_only=True):
    label: str
    tags: list[str] = msgspec.field(default_factory=list)


class File(Sizes, Names, frozen=True, kw_only=True, listed="label depth"):
    path: str = ""


class Recorded(Sizes, Names, frozen=True, kw_only=True, omit_defaults=True, listed="number label"):
    number: int
    depth: int = 5


def test_a_struct_has_the_keys_of_its_groups_in_the_listed_order() -> None:
    assert File.__struct_fields__ == ("label", "depth", "width", "tags", "path")
    assert Recorded.__struct_fields__ == ("number", "label", "width", "depth", "tags")
    assert msgspec.json.schema(File)["$defs"]["File"]["properties"]["width"]["description"] == "Width"
    assert File(label="a") == File(label="a", depth=4, width=3, tags=[], path="")
    assert File(label="a").tags is not File(label="b").tags


def test_a_struct_may_declare_a_key_of_its_group_again() -> None:
    assert msgspec.json.encode(Recorded(number=1, label="a", depth=4)) == b'{"number":1,"label":"a","depth":4}'
    assert msgspec.json.encode(Recorded(number=1, label="a")) == b'{"number":1,"label":"a"}'
    assert values_of(Recorded(number=1, label="a", width=7), Sizes) == {"width": 7, "depth": 5}


def test_bounds_and_unknown_keys_are_checked_as_in_the_group() -> None:
    for text in (b'{"label":"a","width":0}', b'{"label":"a","other":1}', b'{"width":1}'):
        try:
            msgspec.json.decode(text, type=File)
        except msgspec.ValidationError:
            continue
        raise AssertionError(text)
