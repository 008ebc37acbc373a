"""The commands about utilization and padding: ``plan`` before a run, ``report`` after it.

The functions here read the arguments; ``plan.advisor`` and ``plan.savings`` compute the results.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, get_args

import typer

from streampack.config.alignment import Precision
from streampack.core.model.rules import Overlong
from streampack.errors import UserError
from streampack_services.cli.cli_options import ADVANCED, AsJson, Feed, Timeout, print_result


def _png(file: Path | None) -> Path | None:
    """Return ``file``; raise UserError if its name does not end in .png."""
    if file is not None and file.suffix.lower() != ".png":
        raise UserError(f"--png is {file}. Pass a file name that ends in .png.")
    return file


Png = Annotated[
    Path | None,
    typer.Option("--png", metavar="FILE", help="Also draw a chart to this file. Needs matplotlib.", show_default=False,
                 callback=_png),
]  # fmt: skip


def plan(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="LENGTHS|ENDPOINT|STATE_DIR", show_default=False,
            help="A file of sample lengths (.npy, or text with whole numbers); a broker's http://host:port, or "
            "file:// and its rendezvous file; or a state_dir.",
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", metavar="FILE", show_default=False,
                     help="producer.yaml: the streams to read. broker.yaml: rules, weights and mesh to start from. "
                     "Repeat it for both."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TOKENS[,...]", show_default=False,
                     help="Tokens per pack. The first is compared with the others; a single one with half, twice and "
                     "four times of it. Default: broker.yaml's, or the best around 8192."),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option("--window", metavar="SAMPLES[,...]", show_default=False,
                     help="Samples that the packer chooses from. Default: broker.yaml's, 1024, 256 and 4096."),
    ] = None,
    packer: Annotated[
        str | None,
        typer.Option("--packer", metavar="NAME[,...]", show_default=False,
                     help="Packers to compare. Default: broker.yaml's, exact_fill, and all others."),
    ] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option("--mesh", metavar="dp=N,cp=N,tp=N,pp=N", show_default=False,
                     help="Data, context and tensor parallel ranks, and pipeline stages. Repeat it to compare meshes. "
                     "Default: broker.yaml's planned_mesh, or one rank."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="SHAPE", show_default=False,
                     help="Length of packs: fixed, exact, multiple=512 or buckets=2048,4096. Repeat it to compare "
                     "shapes. Default: broker.yaml's, fixed, and the others."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", metavar="NAME", show_default=False, rich_help_panel=ADVANCED,
                     help="FP8 recipe, which needs packs of a multiple of more tokens: "
                     f"{', '.join(get_args(Precision))}. Default: broker.yaml's, or none."),
    ] = None,
    packs: Annotated[
        int | None,
        typer.Option("--packs", metavar="N", min=1, show_default=False,
                     help="Packs per optimizer step, over all ranks. Default: broker.yaml's, or 64."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="SAMPLES", min=1, max=2**24, show_default=False, rich_help_panel=ADVANCED,
                     help="Samples per step, in place of --packs: step: {samples: N}. Default: broker.yaml's. For "
                     "batches that end_of_batch closes: about their number of samples."),
    ] = None,
    overlong: Annotated[
        str | None,
        typer.Option("--overlong", metavar="POLICY", show_default=False, rich_help_panel=ADVANCED,
                     help=f"Policy for samples over the budget: {', '.join(get_args(Overlong))}. Default: "
                     "broker.yaml's; for error, the loss of truncate is shown."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", min=1, show_default=False,
                     help="Samples to read from each stream, or lengths to pack. Default: 20000 to tokenize, 50000 "
                     "lengths."),
    ] = None,
    total: Annotated[
        int | None,
        typer.Option("--total", metavar="N", min=1, show_default=False, rich_help_panel=ADVANCED,
                     help="Samples in one pass over the data. Needed if LENGTHS are only some of them, or if a source "
                     "does not know its size."),
    ] = None,
    feed: Feed = None,
    png: Png = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:  # fmt: skip
    """Recommend a budget, window, packer and mesh for your data.

    Use it before a run, or to tune one. It forms steps from the lengths of your
    samples as a broker does, for a grid of settings around yours. It prints
    utilization, padding by cause, load imbalance and steps per pass. Then it prints
    the recommended settings, the reasons, and the lines for broker.yaml.

    Lengths come from a file, from a run, or from producer.yaml; then some samples
    of each stream are tokenized.

    \b
    Example:
        streampack plan lengths.npy --budget 8192 --mesh dp=16,cp=2
        streampack plan -c producer.yaml -c broker.yaml --png plan.png
        streampack plan http://node0:7400
    """
    from streampack_services.plan import advice, advisor, plan_inputs, plan_options, plan_report

    given = plan_options.PlanInputs(
        what, config or [], budget, window, packer, mesh or [], shape or [], precision, packs, batch, overlong, samples,
        total, feed, timeout,
    )  # fmt: skip
    workload, options = plan_inputs.read(given)
    with plan_inputs.progress_line() as say:
        found = advisor.advise(workload, options, say)
    found["why"] = advice.why(found, options.overlong)
    found["broker_yaml"] = advice.broker_yaml(found, options.overlong)
    print_result(found, as_json, plan_report.show_plan)
    if png is not None:
        from streampack_services.plan import charts

        charts.draw_plan(found, workload.lengths, png)
        print(f"wrote {png}", file=sys.stderr)


def report(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="STATE_DIR|ENDPOINT", show_default=False,
            help="A run's state_dir, for all steps in its log; or a broker's http://host:port, or file:// and its "
            "rendezvous file, for the steps since the broker started. Default: STREAMPACK_HTTP, else "
            "http://127.0.0.1:7400.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, show_default=False,
                     help="GPUs that share the work. Default: the ranks attached to the broker."),
    ] = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option("--tokens-per-second", metavar="N", min=1e-9, show_default=False,
                     help="Tokens that one GPU computes per second, padding included. Default: the broker's current "
                     "rate, divided by the GPUs."),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option("--micro-batch", metavar="SAMPLES", min=1, show_default=False, rich_help_panel=ADVANCED,
                     help="Samples per micro-batch of the padded batches in the comparison. Default: the mean "
                     "number of samples per pack."),
    ] = None,
    feed: Feed = None,
    png: Png = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:  # fmt: skip
    """Show the padding and GPU hours that packing saved in a run.

    Use it after a run, or while its broker runs. It compares the run with three
    other ways to batch the same samples in the same order:

    \b
    - padding to the longest sample of a micro-batch
    - greedy concatenation
    - first-fit decreasing over blocks of the window

    \b
    Example:
        streampack report state/sft-8b --gpus 64 --tokens-per-second 9000
        streampack report http://node0:7400
    """
    from streampack_services.plan import plan_inputs, savings, savings_report

    run = plan_inputs.run_of(what, feed, timeout)
    found = savings.savings(run, micro_batch, savings.rate_of(run, gpus, tokens_per_second))
    print_result(found, as_json, savings_report.show_savings)
    if png is not None:
        from streampack_services.plan import charts

        charts.draw_savings(found, savings_report.NAMES, run.lengths, png)
        print(f"wrote {png}", file=sys.stderr)
