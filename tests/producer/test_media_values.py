"""A sample's media as a program gives them: whatever form they have, the same bytes; wrong ones are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from streampack.core.model.fields import MEDIA, Field
from streampack.core.model.keys.field_keys import Placeholder
from streampack.producer.media_values import ITEMS, media_of
from tests.core.media.media_cases import DrawnMedia, media_of_samples

NONE = np.zeros(0, np.int64)
SCORES = (Field(name="size", dtype="int32", axis="item", shape=(2,)), Field(name="dots", dtype="uint8", axis="patch"))


@given(media_of_samples().filter(lambda drawn: any(len(each.patches) for each in drawn[1])))
def test_every_form_of_media_gives_the_same_bytes(drawn: tuple[tuple[Field, ...], list[DrawnMedia]]) -> None:
    fields = tuple(each for each in drawn[0] if each.dtype != "bfloat16") or (SCORES[1],)
    for media in drawn[1]:
        values = {each.name: media.values[each.name] for each in fields if each.name in media.values}
        if len(values) < len(fields):
            continue
        ends = np.cumsum(media.patches)[:-1]
        by_item = {
            each.name: np.split(values[each.name], ends)[: len(media.patches)]
            for each in fields
            if each.axis == "patch"
        }
        flat = media_of(values | {"patches": media.patches}, fields, NONE)
        forms = [values | by_item | {"patches": media.patches}]
        forms += [{key: [np.asarray(part).tolist() for part in value] for key, value in forms[0].items()}]
        if by_item:
            forms += [values | by_item]
        for form in forms:
            found = media_of(form, fields, NONE)
            assert isinstance(found, dict), found
            assert isinstance(flat, dict)
            assert found[MEDIA].tobytes() == flat[MEDIA].tobytes() == media.data(fields)
            assert found[ITEMS].tolist() == [len(media.patches)]


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"size": [[1, 2]]}, "dots: missing"),
        ({"patches": [3]}, "size: missing"),
        ({"size": [[1, 2]], "dots": [[1], [2]]}, "media: items"),
        ({"size": [[1, 2]], "dots": [[1, 2]], "patches": [1]}, "dots: patches"),
        ({"size": [[1, 2, 3]], "dots": [[1]]}, "size: shape"),
        ({"size": [[1, 2], [3]], "dots": [[1], [2]]}, "size: shape"),
        ({"size": [[1, 2]], "dots": [[[1]]]}, "dots: shape"),
        ({"size": [[1, 2]], "dots": [[999]]}, "dots: dtype"),
        ({"size": [[1, 2]], "dots": [["a"]]}, "dots: dtype"),
        ({"size": [[1, 2]], "dots": np.array([1, 2])}, "patches: missing"),
        ({"size": [[1, 2]], "dots": [[1]], "patches": [[1]]}, "patches: dtype"),
    ],
)
def test_media_that_do_not_fit_together_are_named(given_: dict[str, Any], said: str) -> None:
    assert media_of(given_, SCORES, NONE) == said


def test_a_sample_without_media_has_none() -> None:
    assert media_of({}, SCORES, NONE) == media_of({"patches": []}, SCORES, NONE) == {}
    found = media_of({"size": [], "dots": [], "patches": []}, SCORES, NONE)
    assert isinstance(found, dict)
    assert (found[ITEMS].tolist(), found[MEDIA].tolist()) == ([0], [])


@pytest.mark.parametrize(
    ("tokens", "patches", "said"),
    [
        ([1, 7, 7, 7, 2, 8], [8, 5], None),
        ([7, 7, 7, 7], [8, 8], None),
        ([1, 2], [], None),
        ([1, 7, 7, 2], [8, 5], "dots: placeholders"),
        ([7, 7, 7, 7, 7], [8, 8], "dots: placeholders"),
        ([1, 7], [], "dots: placeholders"),
    ],
)
def test_the_tokens_that_stand_for_items_are_counted(tokens: list[int], patches: list[int], said: str | None) -> None:
    """One of the tokens 7 and 8 for each four patches of an item, rounded up."""
    dots = Field(name="dots", dtype="uint8", axis="patch", placeholder=Placeholder((7, 8), 4))
    sample = {"dots": [np.zeros(each, np.uint8) for each in patches]} if patches else {}
    found = media_of(sample, (dots,), np.array(tokens))
    assert (found if isinstance(found, str) else None) == said
