"""The documentation site: a strict build, in which every public name, command, key and variable has its place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import streampack
from docs.generate import api_index, cli, configuration
from streampack import errors
from tests.docs.pages import ROOT
from tests.integration.watching.chromium import Browser

PUBLIC = [f"streampack.{name}" for name in streampack.__all__]
PUBLIC += [name for page in api_index.PAGES for name in api_index.documented(page) if name != "streampack.local.local"]
PUBLIC += [f"streampack.errors.{name}" for name, kind in vars(errors).items() if isinstance(kind, type)]
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "srcset")}


class Html(HTMLParser):
    """The ids of a page, and the addresses that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids = set[str]()
        self.loads = set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            elif (tag, name) in LOADED:
                self.loads.add(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (built.returncode, built.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Html]:
    return {str(path.relative_to(site)): Html(path.read_text()) for path in site.rglob("*.html")}


def test_every_public_name_has_an_anchor(pages: dict[str, Html]) -> None:
    ids = set[str]().union(*(page.ids for page in pages.values()))
    assert set(PUBLIC) - ids == set()


def test_every_command_and_key_has_its_place(site: Path, pages: dict[str, Html]) -> None:
    commands = re.findall(r"^## (streampack .*)$", cli.page(), re.MULTILINE)
    assert len(commands) > 20
    assert {name.replace(" ", "-") for name in commands} - pages["reference/cli.html"].ids == set()
    rows = (site / "reference/configuration.html").read_text()
    assert [key for key in configuration.FEW_NEED if rows.count(f"<td><code>{key}</code></td>") != 1] == []


def test_every_generated_part_is_filled_in(site: Path) -> None:
    assert [path for path in site.rglob("*.html") if "<!-- generated" in path.read_text()] == []


def test_pages_load_nothing_from_elsewhere(site: Path, pages: dict[str, Html]) -> None:
    loads = {(name, address) for name, page in pages.items() for address in page.loads}
    assert [(name, address) for name, address in loads if urlsplit(address).scheme not in ("", "data")] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?(?:https?:)?//|@import", styles) == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser("--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=http://127.0.0.1:9")  # no network
    yield found
    found.close()


def test_a_browser_shows_pages_and_finds_words_without_a_network(site: Path, browser: Browser) -> None:
    """Open the pages from their folder, as from an unpacked archive; the browser reaches no network."""
    page = browser.page((site / "index.html").as_uri())
    try:
        for name in ("reference/api/trainer.html", "reference/cli.html", "concepts/packing.html"):
            page.go((site / name).as_uri())
            assert page.value("document.querySelector('h1').offsetHeight > 0")
        page.value("document.querySelector('.md-search__input').focus()")
        page.ask("Input.insertText", {"text": "pack_lengths"})
        page.press("End")
        page.until("document.querySelector('.md-search-result__item a') !== null")
        assert page.problems == []
        assert {urlsplit(address).scheme for address in page.requests} <= {"file", "data", "blob", "about"}
    finally:
        page.close()


def test_every_environment_variable_is_on_its_page() -> None:
    tracked = subprocess.run(
        ["git", "grep", "-ohE", "STREAMPACK_[A-Z_]+", "--", "streampack", "services"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/reference/environment.md").read_text(), re.MULTILINE))
    assert {name for name in tracked.stdout.split() if not name.endswith("_")} - rows == set()
