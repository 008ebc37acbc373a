"""Links from pages to files of the repository outside ``docs/``, which work on the site, too.

The site has a copy of each such file under ``repository/``: Markdown and code as pages, others as they are. A link to a
folder leads to its README.md.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
SHOWN = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash", ".json": "json"}
"""Suffixes of files that become pages, and their languages."""
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#|/)([^)\s#]+)")
_CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def linked(files: Files) -> dict[str, Path]:
    """Return the files that pages link to, and those that these link to, by their place on the site."""
    texts = {file.src_uri: Path(file.abs_src_path or "").read_text() for file in files if file.is_documentation_page()}
    found = dict[str, Path]()
    while texts:
        uri, text = texts.popitem()
        for link in _links(text):
            path = _file(uri, link)
            place = None if path is None else _place(path)
            if path is not None and place is not None and place not in found:
                found[place] = path
                if path.suffix == ".md":
                    texts[place] = path.read_text()
    return found


def listing(path: Path) -> str:
    """Return a page that shows a file; the search leaves it out."""
    head = f"---\nsearch: {{exclude: true}}\n---\n# {path.name}\n\n`{path.relative_to(ROOT)}`\n\n"
    return f"{head}~~~~{SHOWN[path.suffix]}\n{path.read_text()}\n~~~~\n"


def relinked(text: str, uri: str) -> str:
    """Return a page's text with its links to files of the repository led to the copies on the site."""

    def target(link: str) -> str:
        path = _file(uri, link)
        if path is None:
            return link
        place = _place(path) or path.relative_to(ROOT / "docs").as_posix()
        return posixpath.relpath(place, posixpath.dirname(uri) or ".")

    pieces, last = list[str](), 0
    for code in _CODE.finditer(text):
        pieces += [_LINK.sub(lambda found: target(found[1]), text[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*pieces, _LINK.sub(lambda found: target(found[1]), text[last:])])


def _links(text: str) -> Iterator[str]:
    yield from (found[1] for found in _LINK.finditer(_CODE.sub("", text)))


def _file(uri: str, link: str) -> Path | None:
    """The file that a link of a page names, if the link is one that the site must lead elsewhere."""
    source = ROOT / uri.removeprefix("repository/") if uri.startswith("repository/") else ROOT / "docs" / uri
    path = Path(posixpath.normpath(source.parent / link))
    path = path / "README.md" if path.is_dir() else path
    inside = path.is_relative_to(ROOT / "docs") and not uri.startswith("repository/")
    return path if path.is_file() and path.is_relative_to(ROOT) and not inside else None


def _place(path: Path) -> str | None:
    """The path of a copy on the site; None for what is on the site as it is."""
    if path.is_relative_to(ROOT / "docs"):
        return None
    return f"repository/{path.relative_to(ROOT).as_posix()}" + (".md" if path.suffix in SHOWN else "")
