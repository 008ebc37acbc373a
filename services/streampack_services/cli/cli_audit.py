"""The commands that look back: ``why``, ``replay``, ``ledger verify``, ``ledger rebuild``. ``main`` adds them to its
own.

All work on a state_dir, while its broker runs or after it has ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streampack.errors import UserError

if TYPE_CHECKING:
    from streampack.sources import OpenedSource

StateDir = Annotated[
    Path | None, typer.Option("--state-dir", metavar="FOLDER", help="The broker's state_dir.", show_default=False)
]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Or its broker.yaml, that names it.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
ledger = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def why(
    step: Annotated[
        int | None, typer.Option("--step", metavar="K", min=0, help="What was in this step?", show_default=False)
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="STREAM:INDEX", show_default=False,
                     help="Where did this sample go? Or FILE:ROW, such as train.jsonl:101, with -p."),
    ] = None,
    produce: Annotated[
        list[Path] | None,
        typer.Option("--produce", "-p", metavar="FILE", show_default=False,
                     help="producer.yaml, to name the sample's file and row; may be given again."),
    ] = None,
    dp: Annotated[
        int | None,
        typer.Option("--dp", metavar="R", min=0, help="Only this data-parallel rank's packs.", show_default=False),
    ] = None,
    dp_size: Annotated[
        int | None,
        typer.Option("--dp-size", metavar="N", min=1, help="Deal the packs over so many ranks.", show_default=False),
    ] = None,
    pp_size: Annotated[
        int | None,
        typer.Option("--pp-size", metavar="N", min=1, show_default=False,
                     help="And stages of a pipeline, which how many packs there are and how long may depend on."),
    ] = None,
    feed: Annotated[
        str | None, typer.Option("--feed", metavar="NAME", help="Default: the run's first.", show_default=False)
    ] = None,
    state_dir: StateDir = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    r"""Say what was in a step, or where a sample went.

    A step: its samples by pack, digests, denominators, what changed at it; with --dp-size and --pp-size, which rank of
    such a mesh has which packs. A sample: its steps, packs and offsets; or that it was rejected, or is not read
    yet. With the producer.yaml: the file and row that it was read from.

    \b
    Example:
        streampack why --step 1200 --dp 3 --dp-size 16 -c broker.yaml
        streampack why --sample web:81234 --state-dir shared/sft-8b/state
        streampack why --sample train.jsonl:101 -c broker.yaml -p producer.yaml
    """
    from streampack_services.audit import audit_report
    from streampack_services.audit import why as audit
    from streampack_services.ledger.state_dir import open_ledger, state_folder

    if (step is None) == (sample is None):
        got = "nothing" if step is None else "--step and --sample"
        raise UserError(f"got {got} to explain, expected --step or --sample")
    if dp is not None and (dp_size is None or dp >= dp_size):
        raise UserError(f"got --dp {dp} and --dp-size {dp_size}, expected a rank below a size: which mesh is it of?")
    if pp_size is not None and dp_size is None:
        raise UserError(f"got --pp-size {pp_size} alone, expected --dp-size too: which mesh is it of?")
    with open_ledger(state_folder(state_dir, config)) as opened:
        if step is not None:
            found = audit.why_step(opened, step, feed, dp_size, pp_size or 1)
            if dp is not None:
                found["packs"] = [pack for pack in found["packs"] if pack["dp_rank"] == dp]
            _say(found, as_json, audit_report.show_step)
        elif sample is not None:
            found = audit.why_row(opened, sample, _sources(produce or []))
            _say(found, as_json, audit_report.show_row if "samples" in found else audit_report.show_sample)


def replay(
    step: Annotated[int, typer.Option("--step", metavar="K", min=0, help="Which step?", show_default=False)],
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The run's broker.yaml.")],
    produce: Annotated[
        list[Path] | None,
        typer.Option("--produce", "-p", metavar="FILE", show_default=False,
                     help="producer.yaml of the streams that are read; may be given again."),
    ] = None,
    feed: Annotated[
        str | None, typer.Option("--feed", metavar="NAME", help="Default: the run's first.", show_default=False)
    ] = None,
    dp: Annotated[int, typer.Option("--dp", metavar="N", min=1, help="Data-parallel ranks to deal it over.")] = 1,
    cp: Annotated[int, typer.Option("--cp", metavar="N", min=1, help="Context-parallel ranks to cut it for.")] = 1,
    pp: Annotated[
        int, typer.Option("--pp", metavar="N", min=1, help="Stages of the pipeline: what the first of them gets.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", show_default=False,
                     help="Write what every rank got as numpy arrays, dp0.cp0.0.input_ids: rank, micro-batch, name."),
    ] = None,
    lineage: Annotated[
        int | None,
        typer.Option("--lineage", metavar="L", min=0, help="Default: the one that counts.", show_default=False),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option("--state-dir", metavar="FOLDER", help="Instead of broker.yaml's.", show_default=False),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Give up when nothing moves for so long.")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    r"""Form a step again, bit for bit.

    From the log and the sources, as a broker does that is started again; beside a running one, too, which hears
    nothing of it. Exit code 1 if it comes out otherwise than it is recorded.

    \b
    Example:
        streampack replay --step 1200 -c broker.yaml -p producer.yaml -o s.npz
    """
    from streampack_services.audit import audit_report, replay
    from streampack_services.daemons import producer

    producer.import_from_here()
    options = replay.ReplayOptions(step, config, produce or [], feed, lineage, state_dir, dp, cp, pp, out, timeout)
    found = replay.replay(options)
    _say(found, as_json, audit_report.show_replayed)
    raise typer.Exit(0 if found["equal"] else 1)


@ledger.callback()
def _ledger() -> None:
    r"""Check the record of which sample went where, or make it again.

    \b
    Example:
        streampack ledger verify -c broker.yaml
    """


@ledger.command("verify")
def verify_(state_dir: StateDir = None, config: Config = None, as_json: AsJson = False) -> None:
    r"""Show that every sample is exactly once.

    Over the whole run: each is in one step that counts, or rejected, or not read yet; digests and chains follow from
    what is recorded. Exit code 1 if anything is lost, repeated or damaged; the first few are named.

    \b
    Example:
        streampack ledger verify -c broker.yaml
    """
    from streampack_services.audit import audit_report, verify
    from streampack_services.ledger.state_dir import open_ledger, state_folder

    with open_ledger(state_folder(state_dir, config)) as opened:
        found = verify.verify(opened)
    _say(found, as_json, audit_report.show_verified)
    raise typer.Exit(0 if found["good"] else 1)


@ledger.command()
def rebuild(state_dir: StateDir = None, config: Config = None, as_json: AsJson = False) -> None:
    r"""Make the ledger again from the log alone.

    Compared with what was there. What is older than the log is kept as far as it is good.

    \b
    Example:
        streampack ledger rebuild -c broker.yaml
    """
    from streampack_services.audit import audit_report
    from streampack_services.ledger.state_dir import rebuild, state_folder

    folder = state_folder(state_dir, config)
    found = rebuild(folder)
    _say(found, as_json, audit_report.show_rebuilt)


def _sources(paths: list[Path]) -> dict[str, OpenedSource]:
    """The sources of some producer.yaml, by stream."""
    from streampack.config.config_files import read_producer
    from streampack_services.daemons.producer import import_from_here, open_sources

    import_from_here()
    return {name: source for path in paths for name, source in open_sources(read_producer(path)).items()}


def _say(found: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    if as_json:
        print(json.dumps(found))
    else:
        show(found)
