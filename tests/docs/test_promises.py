"""Pages about security: every promise names a test that there is, and the first lines say what is not promised."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import NAMED, PAGES, ROOT, names_in

SECURITY = [ROOT / "SECURITY.md", ROOT / "docs/concepts/security.md"]


@pytest.mark.parametrize("page", SECURITY, ids=lambda page: page.name)
def test_each_promise_of_a_page_about_security_names_a_test(page: Path) -> None:
    lines = PAGES[page].splitlines()
    headings = [row for row, line in enumerate(lines) if line.startswith(("| guarantee |", "| resource |"))]
    promises = [
        line for row in headings for line in lines[row + 2 : row + 2 + lines[row + 2 :].index("")]
    ]  # fmt: skip
    assert len(promises) > 10
    assert [line for line in promises if not NAMED.search(line)] == []
    missing = [(file, name) for file, name in NAMED.findall(PAGES[page]) if name not in names_in(file)]
    assert missing == [], "these tests do not exist"


@pytest.mark.parametrize("page", SECURITY, ids=lambda page: page.name)
def test_a_page_about_security_begins_with_what_is_not_promised(page: Path) -> None:
    assert "**Not promised**" in "".join(PAGES[page].splitlines()[:4])
