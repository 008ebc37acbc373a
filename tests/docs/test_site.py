"""The documentation site: a strict build, in which every public name, command, key and variable has its place."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

import streampack
from docs.generate import api_index, cli, configuration, search_words
from streampack import errors
from tests.docs.pages import ROOT
from tests.integration.watching.chromium import Browser

PUBLIC = [f"streampack.{name}" for name in streampack.__all__]
PUBLIC += [name for page in api_index.PAGES for name in api_index.documented(page) if name != "streampack.local.local"]
PUBLIC += [f"streampack.errors.{name}" for name, kind in vars(errors).items() if isinstance(kind, type)]
FOUND = {
    "oom": "how-to/troubleshooting", "out of memory": "concepts/memory", "migrate": "migrate/from-dataloader",
    "dataloader": "migrate/from-dataloader", "limits": "reference/limits", "slurm": "how-to/slurm",
    "resume": "get-started/resume", "sequence parallel": "how-to/dynamic-cp", "loss mask": "reference/rows",
    "webdataset": "how-to/pretraining-mixture", "packing": "concepts/packing",
    "kubernetes": "how-to/run-on-kubernetes", "nccl timeout": "how-to/resume-and-elastic",
    "loss spike": "how-to/loss-rose", "trl": "how-to/sft-hf-trl", "accelerate": "how-to/accelerate",
    "memory": "concepts/memory", "faq": "how-to/troubleshooting", "upgrade": "how-to/upgrade",
    "sizing": "how-to/sizing", "how much memory": "how-to/sizing", "docker": "how-to/docker",
    "systemd": "how-to/systemd", "axolotl": "migrate/from-trl-packing", "mosaicml": "migrate/from-streaming-loaders",
    "learning rate": "how-to/packing-and-learning", "cu_seqlens": "reference/packs",
    "plan_step": "how-to/plan-one-step", "padded": "how-to/padded-rows",
}  # fmt: skip
"""Words that users type, and the page that must be among the first three results."""
SEARCH = """(async () => {
  const {search} = JSON.parse(document.getElementById("__config").textContent);
  const worker = new Worker(new URL(search, location)), answers = {};
  let next;
  worker.addEventListener("message", (event) => next(event.data));
  const ask = (type, data) => new Promise((answer) => { next = answer; worker.postMessage({type, data}); });
  await ask(0, {...__index, options: {suggest: false}});
  for (const query of QUERIES) {
    const pages = (await ask(2, query)).data.items.map((group) => group[0].location.split("#")[0].split(".html")[0]);
    answers[query] = [...new Set(pages)];
  }
  return answers;
})()"""
"""Ask the search of the site, in its own worker, and return the pages found in their order."""
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


@pytest.fixture(scope="module")
def found(site: Path, browser: Browser) -> dict[str, list[str]]:
    page = browser.page((site / "index.html").as_uri())
    try:
        page.until("typeof __index === 'object'")
        answers: dict[str, list[str]] = page.value(SEARCH.replace("QUERIES", json.dumps([*FOUND, "utilization"])))
        return answers
    finally:
        page.close()


@pytest.mark.parametrize("query", FOUND)
def test_a_word_of_a_user_finds_the_page_among_the_first_three(query: str, found: dict[str, list[str]]) -> None:
    assert FOUND[query] in found[query][:3]


def test_records_of_measurements_come_last(found: dict[str, list[str]]) -> None:
    records = {query: [page.startswith("repository/benchmarks") for page in pages] for query, pages in found.items()}
    assert [query for query, each in records.items() if any(each[:5])] == []
    assert any(records["utilization"])


def test_each_page_with_words_for_the_search_exists() -> None:
    assert [page for page in search_words.WORDS if not (ROOT / "docs" / page).exists()] == []


def in_nav(entry: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from in_nav(each)


def test_the_start_page_links_every_page_of_the_navigation() -> None:
    config = re.sub(r"!!python/\S+ ", "", (ROOT / "mkdocs.yml").read_text())
    pages = [page.removeprefix("repository/") for page in in_nav(yaml.safe_load(config)["nav"]) if page != "index.md"]
    links = re.findall(r"\]\((?:\.\./)?([^)#]+)", (ROOT / "docs/index.md").read_text())
    assert [page for page in pages if page not in links] == []


def test_every_generated_part_says_where_it_stands_in_a_clone() -> None:
    texts = {path: path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    parts = [(path.name, part) for path, text in texts.items() for part in text.split("<!-- generated: ")[1:]]
    assert len(parts) > 8
    assert [(name, part[:20]) for name, part in parts if not re.match(r"\w+ -->\n\n> .*\n?.*In a clone,", part)] == []


def test_every_name_of_a_public_module_has_a_place_in_the_reference() -> None:
    modules = [path for folder in ("integrations", "views") for path in (ROOT / "streampack" / folder).rglob("*.py")]
    public = set[str]()
    for path in modules:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        declared = re.search(r"^__all__ = (\[.*?\])", path.read_text(), re.MULTILINE | re.DOTALL)
        public |= {f"{module}.{name}" for name in ast.literal_eval(declared[1])} if declared else set()
    again = {name for name in public if name.split(".")[-1] in streampack.__all__ or ".megatron.megatron_lm." in name}
    assert public - again - set(PUBLIC) == set()


def test_every_environment_variable_is_on_its_page() -> None:
    tracked = subprocess.run(
        ["git", "grep", "-ohE", "STREAMPACK_[A-Z_]+", "--", "streampack", "services"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/reference/environment.md").read_text(), re.MULTILINE))
    assert {name for name in tracked.stdout.split() if not name.endswith("_")} - rows == set()
