"""The commands that ask what happened in a run: ``why``, ``replay`` and ``ledger`` with its commands.

The commands read the broker's state_dir, while the broker runs or after the broker has ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streampack.errors import UserError
from streampack_services.cli.cli_options import (
    ADVANCED,
    AsJson,
    BrokerYaml,
    Command,
    Cp,
    Dp,
    Feed,
    Produce,
    StateDir,
    print_result,
)

if TYPE_CHECKING:
    from streampack_services.audit.sample_texts import RunSources

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="The run's broker.yaml, which names the state_dir."),
]  # fmt: skip
ledger = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def why(
    step: Annotated[
        str | None,
        typer.Option("--step", "--steps", metavar="A-B", help="The step to explain, such as 212, or a range of steps, "
                     "such as 210-215."),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="STREAM:INDEX",
                     help="The sample to find, such as web:81234. A program that pushes samples names them "
                     "STREAM:PARTITION:SEQ, such as rollouts:0:17. With -p you can pass FILE:ROW, too, such as "
                     "train.jsonl:101."),
    ] = None,
    produce: Produce = None,
    text: Annotated[
        bool,
        typer.Option("--text", help="Show the text of each sample of the step, or its tokens if its file has tokens. "
                     "Requires -p."),
    ] = False,
    dp: Annotated[
        int | None,
        typer.Option("--dp", metavar="R", min=0, help="Show only the packs of this data-parallel rank."),
    ] = None,
    dp_size: Annotated[
        int | None,
        typer.Option("--dp-size", metavar="N", min=1,
                     help="Number of data-parallel ranks that share the packs. Required with --dp."),
    ] = None,
    pp_size: Annotated[
        int | None,
        typer.Option("--pp-size", metavar="N", min=1, rich_help_panel=ADVANCED,
                     help="Number of pipeline stages, which can change the number and length of packs."),
    ] = None,
    cp_size: Annotated[
        int | None,
        typer.Option("--cp-size", metavar="N", min=1, rich_help_panel=ADVANCED,
                     help="Number of context-parallel ranks. Required with --dp-size for a feed with `cp: dynamic`, "
                     "to show which ranks shared each sample."),
    ] = None,
    feed: Feed = None,
    state_dir: StateDir = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show the samples of a step, or the steps that hold a sample.

    Use this command to trace a loss spike to its samples, or to prove that a
    run used a sample.

    With --step, the command prints the samples of each pack, the digests and
    denominators of the step, and the settings that changed at this step. With
    --dp-size, the command also prints the packs of each rank. With -p, the command
    prints the file and row of each sample. With --text, it reads the samples again,
    prints their text, and checks that they have not changed.

    With --sample, the command prints the steps, packs and offsets of the sample, or
    reports that the sample was rejected or is not read yet. It prints the values
    that trainers reported for the sample, and whether the sample waited for late
    fields. If a program has pushed a sample with images in files, the command prints
    where they are. With -p, the command also prints the file and row.

    \b
    Example:
        streampack why --step 1200 --dp 3 --dp-size 16 -c broker.yaml
        streampack why --step 210-215 --text -c broker.yaml -p producer.yaml
        streampack why --sample train.jsonl:101 -c broker.yaml -p producer.yaml
    """
    from streampack.core.model.rule_changes import parse_steps
    from streampack_services.audit import audit_report, sample_texts, why_sample
    from streampack_services.audit import why as audit
    from streampack_services.audit.named_media import references_of
    from streampack_services.ledger.state_dir import read_ledger, state_folder

    if (step is None) == (sample is None):
        got = "neither --step nor --sample" if step is None else "both --step and --sample"
        raise UserError(f"Got {got}. Pass exactly one of these options.")
    for option, value in (("--dp", dp), ("--pp-size", pp_size), ("--cp-size", cp_size)):
        if value is not None and dp_size is None:
            raise UserError(
                f"Got {option} {value} without --dp-size. Pass the number of data-parallel ranks as --dp-size."
            )
    if dp is not None and dp_size is not None and dp >= dp_size:
        raise UserError(
            f"Got --dp {dp} with --dp-size {dp_size}, expected a rank from 0 to {dp_size - 1}. Change --dp or "
            "--dp-size."
        )
    if text and (step is None or not produce):
        raise UserError("Got --text without --step and -p. Pass the step, and the producer.yaml files of its streams.")
    try:
        steps = None if step is None else parse_steps(step)
    except ValueError as error:
        raise UserError(f"--step: {error}. Pass a step such as 212, or a range such as 210-215.") from None
    folder = state_folder(state_dir, config)
    with read_ledger(folder) as opened:
        if steps is not None:
            numbers = range(steps.first, steps.last + 1)
            reports = [audit.why_step(opened, number, feed, dp_size, pp_size or 1, cp_size) for number in numbers]
            if dp is not None:
                for answer in reports:
                    answer["packs"] = [pack for pack in answer["packs"] if audit.of_rank(pack, dp, cp_size)]
            if produce:
                history = audit.feed_of(opened, feed)
                sample_texts.add_places(history, reports, _sources(produce), texts=text)
            report = reports[0] if step == str(steps.first) else {"run": opened.state.run, "steps": reports}
            print_result(report, as_json, audit_report.show_steps)
        elif sample is not None:
            places_report = why_sample.why_row(opened, sample, _sources(produce or []).sources)
            for places in places_report.get("samples", [places_report]):
                places["references"] = references_of(folder, opened, places)
            print_result(places_report, as_json, audit_report.show_row)


def replay(
    step: Annotated[int, typer.Option("--step", metavar="K", min=0, help="Step to replay.")],
    config: BrokerYaml,
    produce: Produce = None,
    feed: Feed = None,
    dp: Dp = 1,
    cp: Cp = 1,
    pp: Annotated[
        int,
        typer.Option("--pp", metavar="N", min=1, rich_help_panel=ADVANCED,
                     help="Number of pipeline stages, which can change the number and length of packs."),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE",
                     help="Write the arrays of all ranks to this .npz file. Each array is named "
                     "RANK.MICRO_BATCH.NAME, such as dp0.cp0.0.input_ids."),
    ] = None,
    lineage: Annotated[
        int | None,
        typer.Option("--lineage", metavar="L", min=0, rich_help_panel=ADVANCED,
                     help="Number of the lineage to replay the step from. Default: the lineage in effect at this "
                     "step."),
    ] = None,
    state_dir: StateDir = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", rich_help_panel=ADVANCED,
                     help="Give up after this many seconds without progress."),
    ] = 60.0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Form a recorded step again, bit for bit.

    Use this command to get the exact arrays of a step, for example to debug a loss
    spike. The command reads the log and the sources, as a restarted broker does. A
    running broker is not disturbed. The exit code is 1 if the step differs from its
    record.

    \b
    Example:
        streampack replay --step 1200 -c broker.yaml -p producer.yaml -o s.npz
    """
    from streampack_services.audit import audit_report, replay
    from streampack_services.daemons import producer

    producer.import_from_here()
    options = replay.ReplayOptions(step, config, produce or [], feed, lineage, state_dir, dp, cp, pp, out, timeout)
    report = replay.replay(options)
    print_result(report, as_json, audit_report.show_replayed)
    raise typer.Exit(0 if report["equal"] else 1)


@ledger.callback()
def _ledger() -> None:
    """Check or rebuild the ledger, the record of every sample.

    \b
    Example:
        streampack ledger verify -c broker.yaml
    """


@ledger.command("verify", cls=Command)
def verify_(state_dir: StateDir = None, config: Config = None, as_json: AsJson = False) -> None:
    """Check that no sample of a run is lost, repeated or damaged.

    Use this command after a run, or while the broker runs. Each sample must be in
    exactly one step, be rejected, or be unread. Steps that a later lineage replaced
    do not count. The command computes all digests again from the records. If a
    sample is lost, repeated or damaged, the command prints the first such samples,
    and the exit code is 1. It also prints how often the content of each stream came:
    the mean number of passes, and the samples whose content came before.

    \b
    Example:
        streampack ledger verify -c broker.yaml
    """
    from streampack_services.audit import audit_report, verify
    from streampack_services.ledger.state_dir import read_ledger, state_folder

    with read_ledger(state_folder(state_dir, config)) as opened:
        report = verify.verify(opened)
    print_result(report, as_json, audit_report.show_verified)
    raise typer.Exit(0 if report["good"] else 1)


@ledger.command(cls=Command)
def compare(
    other: Annotated[Path, typer.Argument(metavar="STATE_DIR", help="The state_dir of the second run.")],
    state_dir: StateDir = None,
    config: Config = None,
    feed: Feed = None,
    as_json: AsJson = False,
) -> None:
    """Find the first step in which two runs differ, and the reason.

    Use this command to prove that a run is reproducible, or to find out why two
    runs of the same data differ. The command compares the digests of all steps that
    both runs have. The exit code is 1 if a step differs, or if only one run skips
    it.

    \b
    Example:
        streampack ledger compare other/state -c broker.yaml
    """
    from streampack_services.audit import audit_report, compare_runs
    from streampack_services.ledger.state_dir import read_ledger, state_folder

    folders = state_folder(state_dir, config), state_folder(other, None)
    with read_ledger(folders[0]) as first, read_ledger(folders[1]) as second:
        report = compare_runs.compare(first, second, feed)
    print_result(report, as_json, audit_report.show_compared)
    raise typer.Exit(0 if report["equal"] else 1)


@ledger.command(cls=Command)
def rebuild(state_dir: StateDir = None, config: Config = None, as_json: AsJson = False) -> None:
    """Rebuild the ledger from the log.

    Use this command when the ledger is damaged or missing. The command compares the
    new ledger with the old ledger. It keeps intact entries that are older than the
    log.

    \b
    Example:
        streampack ledger rebuild -c broker.yaml
    """
    from streampack_services.audit import audit_report
    from streampack_services.ledger.state_dir import rebuild, state_folder

    print_result(rebuild(state_folder(state_dir, config)), as_json, audit_report.show_rebuilt)


def _sources(paths: list[Path]) -> RunSources:
    """Open the sources in the given producer.yaml files."""
    from streampack.config.config_files import read_producer
    from streampack_services.audit.sample_texts import RunSources
    from streampack_services.daemons.producer import import_from_here

    import_from_here()
    return RunSources.of(map(read_producer, paths))
