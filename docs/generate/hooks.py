"""Hooks of mkdocs: fill in generated parts, put figures into pages, and keep links to files of the repository."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from streampack_services.http import metrics

from docs.generate import (
    api_index,
    cli,
    configuration,
    errors,
    figures,
    messages,
    notebooks,
    repository,
    row_keys,
    sample_warnings,
    search_words,
)

GENERATED: dict[str, Callable[[], str]] = {
    "api": api_index.table,
    "cli": cli.page,
    "configuration": configuration.tables,
    "errors": errors.table,
    "messages": messages.messages,
    "metrics": metrics.text,
    "quickstart": notebooks.quickstart,
    "records": messages.records,
    "row_keys": row_keys.table,
    "sample_warnings": sample_warnings.table,
}
"""The text in place of each ``<!-- generated: NAME -->``, and of a quotation after it, which readers of a clone see."""
_MARK = re.compile(r"<!-- generated: (\w+) -->(?:\n+>.*)*")
ICON = repository.ROOT / "services/streampack_services/web/icon.svg"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link the repository that pyproject.toml names, once it is no placeholder."""
    project = tomllib.loads((repository.ROOT / "pyproject.toml").read_text())["project"]
    if "OWNER" not in project["urls"]["Repository"]:
        config.repo_url = project["urls"]["Repository"]
        config.repo_name = project["name"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the icon and the files that pages link to."""
    files.append(File.generated(config, "assets/icon.svg", abs_src_path=str(ICON)))
    for uri, path in repository.linked(files).items():
        if path.suffix in repository.SHOWN:
            files.append(File.generated(config, uri, content=repository.listing(path)))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill in what is generated, order the search, and point links into the repository to their copies on the site."""
    search_words.ordered(page.meta, page.file.src_uri)
    return repository.relinked(filled(markdown), page.file.src_uri)


def filled(markdown: str) -> str:
    """Return a page's text with its generated parts."""
    return _MARK.sub(lambda match: GENERATED[match[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put figures into the page itself, where they follow its colors."""
    return figures.inlined(html)
