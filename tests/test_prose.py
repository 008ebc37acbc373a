"""The prose check finds what it is for, and nothing else."""

import pytest

from tests import prose


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Those that came back first, first.", "opens with 'Those'"),
        ("Whether a stream has ended.", "opens with 'Whether'"),
        ("The hungriest rank waits.", "say longest data wait"),
        ("Tokens that are nobody's.", "say padding"),
        (" ".join(["word"] * 26) + ".", "26 words in a sentence"),
    ],
)
def test_a_riddle_is_found(text: str, fault: str) -> None:
    assert any(fault in each for each in prose.faults(text))


@pytest.mark.parametrize(
    "text",
    [
        "Return the padding, as a share of delivered tokens.",
        "What is a pack?",
        " ".join(["word"] * 25) + ".",
        "Short. " + " ".join(["word"] * 20) + ". Short again.",
        "`Those that` is code, and ``whose hungriest`` is too.",
    ],
)
def test_a_plain_sentence_passes(text: str) -> None:
    assert list(prose.faults(text)) == []


def test_docstrings_comments_and_messages_of_python_are_read_and_code_is_not() -> None:
    module = '"""Whose module.\n\n    >>> whose = 1\n"""\n# Of what it is.\n'
    source = module + 'raise ValueError(f"Those that {1} are too many")\n'
    pieces = [text for _, text in prose.python(source)]
    assert pieces == ["Whose module.", "Those that X are too many", "Of what it is."]


def test_code_blocks_of_markdown_are_not_read() -> None:
    text = "# Title\n\nA line\nthat goes on.\n\n```\nWhose code\n```\n\n| Those cells | b |\n|---|---|\n- Of a list\n"
    pieces = [piece.strip() for _, piece in prose.markdown(text)]
    assert pieces == ["Title", "A line that goes on.", "Those cells", "b", "---", "---", "Of a list"]
