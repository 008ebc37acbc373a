"""The stages of a run side by side: the rules of each, the meshes that can read it, and the memory that it needs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.rules_settings import PlannedMesh
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.model.capacity import needed_tokens, step_tokens
from streampack.core.model.keys.planning_keys import Warmup
from streampack.core.model.mesh import Mesh
from streampack.core.model.rule_changes import rules_of_stages
from streampack.core.model.rules import Rules
from streampack_services.amounts import count_text, size_text
from streampack_services.broker.memory_plan import Plan

MAX_RANKS = 64
"""Largest size of dp and cp to try."""
WIDTH = 80
Tree = dict[str, Any]
_ROWS = ("begins", "budget", "packs a step", "window", "packer", "tokens a step", "streams", "planned mesh",
         "micro-batches", "dp", "cp", "memory")  # fmt: skip
_IF_DIFFERENT = {"packer", "streams", "micro-batches", "dp", "cp"}
"""Rows that are left out if all columns have the same value."""


def stages_of(config: BrokerConfig, broker: Plan) -> dict[str, list[Tree]]:
    """Return a tree for the begin of the run and for each stage, by feed; without feeds that have no stages.

    ``misfits`` of a tree are texts about meshes that fit the begin, but not the stage. ``memory_bytes`` is the memory
    that the feed's window and steps need.
    """
    staged = (feed for feed in broker.feeds if feed.rules.stages)
    return {feed.name: list(_columns(config, feed.name, feed.rules, broker)) for feed in staged}


def _columns(config: BrokerConfig, feed: str, rules: Rules, broker: Plan) -> Iterator[Tree]:
    """Yield the trees of a feed with stages."""
    mesh, layout = config.planned_mesh, config.feeds[feed].layout
    first: list[int] = []
    settings = [None, *config.stages_of(feed)]
    for number, (written, after) in enumerate(zip(settings, rules_of_stages(rules), strict=True)):
        stage = rules.stages[number - 1] if number else None
        before, mesh = mesh, (written.planned_mesh or mesh) if written is not None else mesh
        dps = [size for size in range(1, MAX_RANKS + 1) if not mesh_refusal(Mesh(dp=size), after, layout)]
        cps = [size for size in range(1, MAX_RANKS + 1) if not mesh_refusal(Mesh(cp=size), after, layout)]
        first = first or dps
        packs = None if after.batch is not None else _grows(after.packs, after.packs_ramp)
        yield {
            "name": stage.name if stage is not None else "",
            "at": {"step": 0} if stage is None else msgspec.to_builtins(stage.at),
            "budget": _grows(after.budget, after.warmup),
            "packs": packs,
            "window": after.window,
            "packer": after.new_packer().name,
            "step_tokens": None if after.batch is not None else step_tokens(after),
            "streams": [stream.name for stream in after.streams if stream.gives],
            "planned_mesh": {"dp": mesh.dp, "cp": mesh.cp, "tp": mesh.tp},
            "micro_batches": [count // mesh.dp for count in packs]
            if isinstance(packs, list)
            else packs and packs // mesh.dp,
            "dp": dps,
            "cp": cps,
            "memory_bytes": needed_tokens(after, broker.capacity.max_sample_tokens) * broker.token_bytes,
            "misfits": list(_misfits(after, layout, before, mesh, [size for size in first if size not in dps])),
        }


def _grows(value: int, ramp: Warmup | None) -> int | list[int]:
    """Return a value of the rules; with a ramp, its first and last value."""
    return value if ramp is None else [ramp.init, value]


def _misfits(rules: Rules, layout: str, before: PlannedMesh, mesh: PlannedMesh, lost: Sequence[int]) -> Iterator[str]:
    """Yield texts about meshes that cannot read a stage with ``rules``.

    Args:
        rules: The rules of the stage.
        layout: The way in which context parallelism cuts packs.
        before: The planned mesh before the stage.
        mesh: The planned mesh of the stage.
        lost: Sizes of dp that fit the begin of the run, and not the stage.
    """
    if lost:
        packs = "a multiple of " * (rules.packs_ramp is not None) + f"{rules.packs_unit} packs"
        yield f"dp {_few(lost)} cannot read it: its steps have {packs}"
    if before != mesh and mesh_refusal(Mesh(dp=before.dp, cp=before.cp), rules, layout):
        yield (
            f"the mesh before ({_mesh_text(before)}) cannot read this stage: trainers save a checkpoint there, and "
            f"come back on {_mesh_text(mesh)}"
        )


def _mesh_text(mesh: PlannedMesh) -> str:
    """Return a mesh as text, without sizes of 1 beside dp."""
    sizes = [f"{name}={size}" for name, size in (("cp", mesh.cp), ("tp", mesh.tp)) if size > 1]
    return ", ".join([f"dp={mesh.dp}", *sizes])


def _few(sizes: Sequence[int]) -> str:
    """Return sizes as text, at most three of them."""
    return ", ".join(map(str, sizes)) if len(sizes) < 4 else f"{sizes[0]}, {sizes[1]} ... {sizes[-1]}"


def stage_lines(stages: dict[str, list[Tree]], several_feeds: bool) -> list[str]:
    """Return the stages of all feeds as tables, a column for each, and lines about meshes that do not fit."""
    lines = list[str]()
    for feed, columns in stages.items():
        lines += ["", f"  stages of {feed}" if several_feeds else "  stages"]
        for column in columns:
            for misfit in column["misfits"]:
                text = f"    {column['name']}: {misfit}"
                lines += textwrap.wrap(text, WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False)
        lines += _table([_cells(column) for column in columns])
    return lines


def _cells(column: Tree) -> list[str]:
    """Return the texts of a column: its title, then ``_ROWS``."""
    mesh = column["planned_mesh"]
    return [
        column["name"] or "run", _begin(column["at"]), _amount(column["budget"]), _amount(column["packs"]),
        str(column["window"]), column["packer"],
        "-" if column["step_tokens"] is None else count_text(column["step_tokens"]),
        str(len(column["streams"])), _mesh_text(PlannedMesh(**mesh)), _amount(column["micro_batches"]),
        _few(column["dp"]), _few(column["cp"]), size_text(column["memory_bytes"]),
    ]  # fmt: skip


def _begin(at: dict[str, int]) -> str:
    """Return the begin of a stage as text."""
    return f"step {at['step']:,}" if "step" in at else f"{count_text(at['tokens'])} tokens"


def _amount(value: int | list[int] | None) -> str:
    """Return a number, or the two ends of a ramp, as text."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else " to ".join(f"{part:,}" for part in value)


def _table(columns: list[list[str]]) -> list[str]:
    """Return a table of lines of at most ``WIDTH`` characters if possible; what does not fit follows below."""
    titles = ["", *_ROWS]
    rows = [
        at for at, title in enumerate(titles) if title not in _IF_DIFFERENT or len({row[at] for row in columns}) > 1
    ]
    head, columns = [titles[at] for at in rows], [[column[at] for at in rows] for column in columns]
    lead = max(map(len, head)) + 2
    lines = list[str]()
    while columns:
        widths = [max(map(len, column)) + 2 for column in columns]
        count = 1
        while count < len(columns) and 4 + lead + sum(widths[: count + 1]) <= WIDTH:
            count += 1
        for row, title in enumerate(head):
            cells = (f"{column[row]:<{width}}" for column, width in zip(columns[:count], widths, strict=False))
            lines.append(f"    {title:<{lead}}{''.join(cells)}".rstrip())
        columns = columns[count:]
    return lines
