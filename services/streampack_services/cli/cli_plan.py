"""The commands about utilization and padding: ``plan`` before a run, ``report`` after it.

The functions here read the arguments; ``plan.advisor`` and ``plan.savings`` compute the results.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from streampack.config.alignment import Precision
from streampack.core.model.keys.stream_keys import Overlong
from streampack.errors import UserError
from streampack_services.cli.cli_options import ADVANCED, DEFAULT_BROKER, AsJson, Feed, Timeout, print_result


def _png(file: Path | None) -> Path | None:
    """Return ``file``; raise UserError if no chart can be written to it, before the command computes for minutes."""
    if file is None:
        return None
    if file.suffix.lower() != ".png":
        raise UserError(f"--png is {file}. Pass a file name that ends in .png.")
    if not file.absolute().parent.is_dir():
        raise UserError(f"The folder of --png {file} does not exist. Create the folder first.")
    from streampack_services.plan import charts

    charts.import_figures()
    return file


Png = Annotated[
    Path | None,
    typer.Option("--png", metavar="FILE", callback=_png,
                 help="Also write a chart to this .png file. Needs matplotlib."),
]  # fmt: skip


def plan(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="LENGTHS|ENDPOINT|STATE_DIR",
            help="Source of the sample lengths: a file (.npy, or text with whole numbers), a state_dir, or a broker. "
            "Name a broker by its HTTP address, or by its rendezvous file as file://PATH.",
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", metavar="FILE",
                     help="A producer.yaml with the streams to read, or a broker.yaml with the rules, weights and "
                     "mesh to start from. Repeat the option to pass both files."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TOKENS[,...]",
                     help="Tokens per pack. The first budget is the base of the comparison. A single budget is "
                     "compared with half, twice and four times as many tokens. Default: the budget in broker.yaml, or "
                     "the best budget around 8192."),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option("--window", metavar="SAMPLES[,...]",
                     help="Number of samples that the packer chooses from. A single window is compared with 256, 1024 "
                     "and 4096 samples. Default: the window in broker.yaml, or auto."),
    ] = None,
    packer: Annotated[
        str | None,
        typer.Option("--packer", metavar="NAME[,...]",
                     help="Packers to compare. A single packer is compared with all other packers. Default: the packer "
                     "in broker.yaml, or exact_fill."),
    ] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option("--mesh", metavar="dp=N,cp=N,tp=N,pp=N",
                     help="Number of data-parallel ranks (dp), context-parallel ranks (cp), tensor-parallel ranks (tp) "
                     "and pipeline stages (pp). Repeat the option to compare meshes. Default: planned_mesh in "
                     "broker.yaml, or one rank."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="SHAPE",
                     help="Shape of packs: fixed, exact, multiple=512 or buckets=2048,4096. Repeat the option to "
                     "compare shapes. A single shape is compared with all other kinds. Default: the shape in "
                     "broker.yaml, or fixed."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", metavar="NAME", rich_help_panel=ADVANCED,
                     help=f"FP8 recipe of the training: {', '.join(get_args(Precision))}. The recipe determines the "
                     "multiple of tokens that packs are padded to. Default: precision in broker.yaml, or none."),
    ] = None,
    packs: Annotated[
        int | None,
        typer.Option("--packs", metavar="N", min=1,
                     help="Packs per optimizer step, over all ranks. Default: the number in broker.yaml, or 64."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="SAMPLES", min=1, max=2**24, rich_help_panel=ADVANCED,
                     help="Samples per step, if steps are batches of samples. Do not combine this option with "
                     "--packs. If broker.yaml has end_of_batch, pass the mean number of samples per batch. Default: "
                     "the number in broker.yaml."),
    ] = None,
    overlong: Annotated[
        str | None,
        typer.Option("--overlong", metavar="POLICY", rich_help_panel=ADVANCED,
                     help=f"Policy for samples longer than the budget: {', '.join(get_args(Overlong))}. Default: the "
                     "policy in broker.yaml. If that policy is error, plan shows the tokens that truncate would lose."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", min=1,
                     help="Number of samples to read from each stream of producer.yaml, or number of LENGTHS to pack. "
                     "Default: 20000 samples of each stream, or 50000 lengths."),
    ] = None,
    total: Annotated[
        int | None,
        typer.Option("--total", metavar="N", min=1, rich_help_panel=ADVANCED,
                     help="Number of samples in one pass over the data. Pass this number if LENGTHS has only a part "
                     "of the samples, or if a source does not report its size."),
    ] = None,
    stage: Annotated[
        bool,
        typer.Option("--stage", help="Recommend a stage for the running broker at ENDPOINT, as YAML for 'streampack "
                     "set stage', with the reasons as comments."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the stage of --stage to this file.")
    ] = None,
    feed: Feed = None,
    png: Png = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:  # fmt: skip
    """Recommend a budget, window, packer and mesh for your data.

    Use this command before a run, or to tune a run. Like a broker, the command
    forms steps from the lengths of your samples, for a grid of settings around your
    own settings. It prints utilization, padding by cause, load imbalance and steps
    per pass over the data. Then it prints the recommended settings, the reasons, and
    the lines for broker.yaml.

    For a feed with `cp: dynamic`, it compares groups of ranks with the best static
    size, with the cost of the exchange and without it.

    Lengths come from a file, from a run, or from the streams in producer.yaml. For
    producer.yaml, the command tokenizes some samples of each stream. If broker.yaml
    declares media, it also reads their sizes and keeps the limits of packs.

    \b
    Example:
        streampack plan lengths.npy --budget 8192 --mesh dp=16,cp=2
        streampack plan -c producer.yaml -c broker.yaml --png plan.png
        streampack plan http://node0:7400
        streampack plan http://node0:7400 --stage --out stage.yaml
    """
    from streampack_services.plan import advice, advisor, group_plan, plan_inputs, plan_options, plan_report, stage_plan
    from streampack_services.terminal import progress_line

    if out is not None and (not stage or not out.absolute().parent.is_dir()):
        missing = "without --stage. Pass both" if not stage else "in a folder that does not exist. Create it first"
        raise UserError(f"Got --out {out} {missing}.")

    inputs = plan_options.PlanInputs(
        what, config or [], budget, window, packer, mesh or [], shape or [], precision, packs, batch, overlong, samples,
        total, feed, timeout,
    )  # fmt: skip
    if stage:
        workload, options, running = plan_inputs.read_stage(inputs)
        with progress_line("planning") as show:
            report = stage_plan.advise_stage(workload, options, running, lambda text: show(f"planning: {text}"))
        _print_stage(report, out, as_json)
        return
    workload, options = plan_inputs.read(inputs)
    if options.dynamic is not None:
        if png is not None:
            raise UserError(f"Got --png {png} for a feed with `cp: dynamic`, which has no chart. Leave --png out.")
        with progress_line("planning") as show:
            report = group_plan.compare(workload, options, lambda text: show(f"planning: {text}"))
        report["why"] = group_plan.why(report, options.overlong)
        print_result(report, as_json, group_plan.show)
        return
    with progress_line("planning") as show:
        report = advisor.advise(workload, options, lambda text: show(f"planning: {text}"))
    report["why"] = advice.why(report, options.overlong)
    report["broker_yaml"] = advice.broker_yaml(report, options.overlong)
    print_result(report, as_json, plan_report.show_plan)
    if png is not None:
        from streampack_services.plan import charts

        charts.draw_plan(report, workload.lengths, png)
        print(f"wrote {png}", file=sys.stderr)


def _print_stage(report: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Print a recommended stage; write it to ``out`` unless there is none to recommend."""
    if out is not None and report["stage"] is not None:
        try:
            out.write_text(report["stage_yaml"])
        except OSError as error:
            raise UserError(f"--out {out} cannot be written: {error.strerror}. Choose another file.") from None
        print(f"wrote {out}", file=sys.stderr)
    if as_json or out is None or report["stage"] is None:
        print_result(report, as_json, lambda content: print(content["stage_yaml"], end=""))


def report(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="STATE_DIR|ENDPOINT",
            help="A run's state_dir, to report all steps in its log. A broker's HTTP address, or its rendezvous file "
            f"as file://PATH, to report the steps since the broker started. {DEFAULT_BROKER}",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1,
                     help="Number of GPUs. Default: the number of ranks attached to the broker."),
    ] = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option("--tokens-per-second", metavar="N", min=1e-9,
                     help="Tokens per second that one GPU computes, including padding. Default: the broker's current "
                     "rate, divided by the number of GPUs."),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option("--micro-batch", metavar="SAMPLES", min=1, rich_help_panel=ADVANCED,
                     help="Samples per micro-batch, for the comparison with padded batches. Default: the mean number "
                     "of samples per pack."),
    ] = None,
    feed: Feed = None,
    png: Png = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:  # fmt: skip
    """Show the hours lost to padding and to waits.

    It also shows the hours that packing saved, and the useful MFU.

    Use this command after a run, or while the broker runs. The hours are sums over
    all ranks; the broker records them in its state_dir. The command also compares
    the run with three other ways to batch the same samples in the same order:

    \b
    - padding to the longest sample of a micro-batch
    - greedy concatenation
    - first-fit decreasing over blocks of the window

    For a state_dir, it fits the cost of packs to the last step times. It says how
    well the cost explains them, and what a better cost would gain. A broker at an
    address does not have these times.

    \b
    Example:
        streampack report state/sft-8b --gpus 64 --tokens-per-second 9000
        streampack report http://node0:7400
    """
    from streampack_services.plan import plan_inputs, savings, step_time_fit

    run = plan_inputs.run_of(what, feed, timeout)
    folder = None if what is None or not Path(what).is_dir() else Path(what)
    fit = step_time_fit.OF_NO_LOG if folder is None else step_time_fit.fit_of(folder, feed)
    saved = savings.savings(run, micro_batch, savings.rate_of(run, gpus, tokens_per_second), fit)
    print_result(saved, as_json, savings.show_savings)
    if png is not None:
        from streampack_services.plan import charts

        charts.draw_savings(saved, savings.named_rows(saved), run.lengths, png)
        print(f"wrote {png}", file=sys.stderr)
