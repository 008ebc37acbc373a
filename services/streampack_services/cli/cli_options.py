"""Options that several commands share, the layout of help pages, and the printing of results."""

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


DEFAULT_BROKER = (
    "Default: STREAMPACK_HTTP, else the rendezvous file in STREAMPACK_ENDPOINT, else your broker on this host, else "
    "http://127.0.0.1:7400."
)
"""The broker that a command asks if no argument names one."""
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", help="Seconds to wait for the broker's answer.", rich_help_panel=ADVANCED
    ),
]
BrokerYaml = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The run's broker.yaml.")]
StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", metavar="FOLDER", help="The broker's state_dir. Default: state_dir in broker.yaml."),
]  # fmt: skip
Dp = Annotated[int, typer.Option("--dp", metavar="N", min=1, help="Number of data-parallel ranks.")]
Cp = Annotated[int, typer.Option("--cp", metavar="N", min=1, help="Number of context-parallel ranks.")]
Feed = Annotated[
    str | None,
    typer.Option(
        "--feed", metavar="NAME", rich_help_panel=ADVANCED,
        help="Name of the feed. Default: the first feed of the run.",
    ),
]  # fmt: skip
Produce = Annotated[
    list[Path] | None,
    typer.Option(
        "--produce", "-p", metavar="FILE",
        help="A producer.yaml with the run's streams. Repeat the option for several files.",
    ),
]  # fmt: skip


def print_result(report: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Print ``found`` as one JSON object, or call ``show`` to print it as text."""
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
