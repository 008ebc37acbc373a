"""Options that several commands share, the help page that sets advanced options apart, and the printing of results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

ADVANCED = "Advanced options"
"""``rich_help_panel`` of the options that a user rarely needs."""


class Command(TyperCommand):
    """A command whose help page lists its advanced options last, in a section of their own."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], ADVANCED: []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                sections[getattr(param, "rich_help_panel", None) or kind].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", help="How long to wait for the broker's answer.", rich_help_panel=ADVANCED
    ),
]
Feed = Annotated[
    str | None,
    typer.Option(
        "--feed", metavar="NAME", show_default=False, rich_help_panel=ADVANCED,
        help="Feed to look at. Default: the run's first feed.",
    ),
]  # fmt: skip
Produce = Annotated[
    list[Path] | None,
    typer.Option(
        "--produce", "-p", metavar="FILE", show_default=False,
        help="producer.yaml of the streams that producers read. Repeat it for several files.",
    ),
]  # fmt: skip


def print_result(found: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Print ``found`` as one JSON object, or as text by ``show``."""
    if as_json:
        print(json.dumps(found))
    else:
        show(found)
