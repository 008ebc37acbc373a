"""Brace patterns are expanded as bash expands them."""

from __future__ import annotations

import subprocess
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.errors import ConfigError
from streampack.sources.files.braces import expand_braces
from streampack.sources.files.listing import expand

NUMBERS = st.integers(-12, 12).map(str) | st.integers(0, 12).map("{:03d}".format)
LETTERS = st.sampled_from("abyzAZ")
ENDS = st.tuples(NUMBERS, NUMBERS) | st.tuples(st.sampled_from("abyz"), st.sampled_from("abyz"))
RANGES = st.tuples(ENDS, st.none() | st.integers(-4, 4)).map(
    lambda each: "{" + "..".join([*each[0], *([] if each[1] is None else [str(each[1])])]) + "}"
)
PATTERNS = st.recursive(
    st.text("ab.,-", max_size=3) | st.sampled_from(["\\{", "\\,", "\\}", "\\\\", "{}", "{a}"]) | RANGES,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner.filter(bool), min_size=2, max_size=3).map(lambda each: "{" + ",".join(each) + "}")
    ),
    max_leaves=5,
)


def bash(pattern: str) -> list[str]:
    """What bash makes of it; the marks keep empty words."""
    done = subprocess.run(["bash", "-c", rf"printf '%s\n' +{pattern}+"], capture_output=True, text=True, check=True)
    return [line[1:-1] for line in done.stdout.splitlines()]


@settings(max_examples=60)
@given(PATTERNS)
def test_a_pattern_is_expanded_as_bash_does(pattern: str) -> None:
    assert expand_braces(pattern) == bash(pattern)


@given(st.lists(st.lists(st.text("ab.-", min_size=1, max_size=3), min_size=2, max_size=3), max_size=4))
def test_groups_side_by_side_are_their_product_the_last_one_fastest(groups: list[list[str]]) -> None:
    pattern = "/".join("{" + ",".join(names) + "}" for names in groups)
    assert expand_braces(pattern) == ["/".join(names) for names in product(*groups)]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("web-{008..011}.tar", ["web-008.tar", "web-009.tar", "web-010.tar", "web-011.tar"]),
        ("{9..0..4}", ["9", "5", "1"]),
        ("{-01..3..2}", ["-01", "001", "003"]),
        ("{a,}b{c,{d,e}f}", ["abc", "abdf", "abef", "bc", "bdf", "bef"]),
        ("{{1..2}}", ["{1}", "{2}"]),
        ("{1..a}{1.5..3}", ["{1..a}{1.5..3}"]),
        (r"\{a,b\}{c\,d,e}", ["{a,b}c,d", "{a,b}e"]),
        ("{a..b,c}", ["a..b", "c"]),
    ],
)
def test_a_pattern_expands_as_by_hand(pattern: str, names: list[str]) -> None:
    assert expand_braces(pattern) == names


@pytest.mark.parametrize("pattern", ["{0..3", "{a,b}}", "{a,{b,c}", "a}{b,c}", "{a,b\\"])
def test_braces_that_do_not_match_are_an_error_that_shows_a_pattern_that_would_do(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"unmatched braces, expected a pattern such as web-{000\.\.511}\.tar"):
        expand([pattern])
