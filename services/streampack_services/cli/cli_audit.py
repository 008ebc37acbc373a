"""The commands that ask what happened in a run: ``why``, ``replay``, ``ledger verify`` and ``ledger rebuild``.

They read the broker's state_dir, while the broker runs or after it has ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streampack.errors import UserError
from streampack_services.cli.cli_options import ADVANCED, AsJson, Command, Feed, Produce, print_result

if TYPE_CHECKING:
    from streampack.sources import OpenedSource

StateDir = Annotated[
    Path | None, typer.Option("--state-dir", metavar="FOLDER", help="The broker's state_dir.", show_default=False)
]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", show_default=False,
                 help="The run's broker.yaml, which names its state_dir."),
]  # fmt: skip
ledger = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def why(
    step: Annotated[
        int | None, typer.Option("--step", metavar="K", min=0, help="The step to explain.", show_default=False)
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="STREAM:INDEX", show_default=False,
                     help="The sample to find. With -p also FILE:ROW, such as train.jsonl:101."),
    ] = None,
    produce: Produce = None,
    dp: Annotated[
        int | None,
        typer.Option("--dp", metavar="R", min=0, help="Show only this data-parallel rank's packs.", show_default=False),
    ] = None,
    dp_size: Annotated[
        int | None,
        typer.Option("--dp-size", metavar="N", min=1, show_default=False,
                     help="Data-parallel ranks to deal the packs to. Needed with --dp."),
    ] = None,
    pp_size: Annotated[
        int | None,
        typer.Option("--pp-size", metavar="N", min=1, show_default=False, rich_help_panel=ADVANCED,
                     help="Pipeline stages. The number and length of packs may depend on them."),
    ] = None,
    feed: Feed = None,
    state_dir: StateDir = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show which samples a step holds, or where a sample went.

    Use it to trace a loss spike to its samples, or to prove that a sample was used.

    With --step it prints the samples of each pack, the digests and denominators of
    the step, and the settings that changed at it. With --dp-size it also prints
    which rank has which packs.

    With --sample it prints the sample's steps, packs and offsets, or that the
    sample was rejected or is not read yet. With -p it adds the file and row.

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
        got = "neither --step nor --sample" if step is None else "both --step and --sample"
        raise UserError(f"Got {got}. Pass exactly one of them.")
    if dp is not None and dp_size is None:
        raise UserError(f"--dp {dp} needs the number of data-parallel ranks. Pass --dp-size, too.")
    if dp is not None and dp_size is not None and dp >= dp_size:
        raise UserError(f"--dp is {dp}, but --dp-size {dp_size} has ranks 0 to {dp_size - 1}. Pass one of these.")
    if pp_size is not None and dp_size is None:
        raise UserError(f"--pp-size {pp_size} needs the number of data-parallel ranks. Pass --dp-size, too.")
    with open_ledger(state_folder(state_dir, config)) as opened:
        if step is not None:
            found = audit.why_step(opened, step, feed, dp_size, pp_size or 1)
            if dp is not None:
                found["packs"] = [pack for pack in found["packs"] if pack["dp_rank"] == dp]
            print_result(found, as_json, audit_report.show_step)
        elif sample is not None:
            found = audit.why_row(opened, sample, _sources(produce or []))
            print_result(found, as_json, audit_report.show_row if "samples" in found else audit_report.show_sample)


def replay(
    step: Annotated[int, typer.Option("--step", metavar="K", min=0, help="Step to form again.", show_default=False)],
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The run's broker.yaml.")],
    produce: Produce = None,
    feed: Feed = None,
    dp: Annotated[int, typer.Option("--dp", metavar="N", min=1, help="Data-parallel ranks to deal the step to.")] = 1,
    cp: Annotated[int, typer.Option("--cp", metavar="N", min=1, help="Context-parallel ranks that share a pack.")] = 1,
    pp: Annotated[
        int,
        typer.Option("--pp", metavar="N", min=1, rich_help_panel=ADVANCED,
                     help="Pipeline stages. The first stage's packs are formed."),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", show_default=False,
                     help="Write each rank's arrays to this .npz file, named RANK.MICRO_BATCH.NAME: "
                     "dp0.cp0.0.input_ids."),
    ] = None,
    lineage: Annotated[
        int | None,
        typer.Option("--lineage", metavar="L", min=0, show_default=False, rich_help_panel=ADVANCED,
                     help="Lineage of the step. Default: the latest that holds the step."),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option("--state-dir", metavar="FOLDER", show_default=False, rich_help_panel=ADVANCED,
                     help="The broker's state_dir, in place of broker.yaml's."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", rich_help_panel=ADVANCED,
                     help="Give up after this time without progress."),
    ] = 60.0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Form a recorded step again, bit for bit.

    Use it to get the exact arrays of a step, for example to debug a loss spike. It
    reads the log and the sources, as a restarted broker does. It does not disturb a
    broker that runs. The exit code is 1 if the step differs from its record.

    \b
    Example:
        streampack replay --step 1200 -c broker.yaml -p producer.yaml -o s.npz
    """
    from streampack_services.audit import audit_report, replay
    from streampack_services.daemons import producer

    producer.import_from_here()
    options = replay.ReplayOptions(step, config, produce or [], feed, lineage, state_dir, dp, cp, pp, out, timeout)
    found = replay.replay(options)
    print_result(found, as_json, audit_report.show_replayed)
    raise typer.Exit(0 if found["equal"] else 1)


@ledger.callback()
def _ledger() -> None:
    """Check or rebuild the record of where each sample went.

    \b
    Example:
        streampack ledger verify -c broker.yaml
    """


@ledger.command("verify", cls=Command)
def verify_(state_dir: StateDir = None, config: Config = None, as_json: AsJson = False) -> None:
    """Verify that a run has every sample exactly once.

    Use it after a run, or while its broker runs. Each sample must be in one step of
    the history that counts, or rejected, or not read yet. All digests are computed
    again from the records. The exit code is 1 if a sample is lost, repeated or
    damaged; the first few are printed.

    \b
    Example:
        streampack ledger verify -c broker.yaml
    """
    from streampack_services.audit import audit_report, verify
    from streampack_services.ledger.state_dir import open_ledger, state_folder

    with open_ledger(state_folder(state_dir, config)) as opened:
        found = verify.verify(opened)
    print_result(found, as_json, audit_report.show_verified)
    raise typer.Exit(0 if found["good"] else 1)


@ledger.command(cls=Command)
def rebuild(state_dir: StateDir = None, config: Config = None, as_json: AsJson = False) -> None:
    """Rebuild the ledger from the log.

    Use it when the ledger is damaged or missing. The result is compared with the
    old ledger. Intact entries that are older than the log are kept.

    \b
    Example:
        streampack ledger rebuild -c broker.yaml
    """
    from streampack_services.audit import audit_report
    from streampack_services.ledger.state_dir import rebuild, state_folder

    folder = state_folder(state_dir, config)
    found = rebuild(folder)
    print_result(found, as_json, audit_report.show_rebuilt)


def _sources(paths: list[Path]) -> dict[str, OpenedSource]:
    """Open the sources that the given producer.yaml files name, by stream."""
    from streampack.config.config_files import read_producer
    from streampack_services.daemons.producer import import_from_here, open_sources

    import_from_here()
    return {name: source for path in paths for name, source in open_sources(read_producer(path)).items()}
