"""The commands about how full packs are: ``plan`` before a run, ``report`` after. ``main`` adds them to its own.

Here is what their arguments mean; what is computed of them is in ``advisor`` and ``savings``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from streampack.config.alignment import Precision
from streampack.core.model.rules import Overlong
from streampack.errors import UserError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Feed = Annotated[
    str | None,
    typer.Option("--feed", metavar="NAME", help="Which feed of a run; default: its first.", show_default=False),
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long a broker may take to answer.")]


def _png(file: Path | None) -> Path | None:
    if file is not None and file.suffix.lower() != ".png":
        raise UserError(f"--png: got {file}, expected a file that ends in .png")
    return file


Png = Annotated[
    Path | None,
    typer.Option("--png", metavar="FILE", help="Draw it, too; needs matplotlib.", show_default=False, callback=_png),
]


def plan(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="LENGTHS|ENDPOINT|STATE_DIR", show_default=False,
            help="Lengths of samples (.npy of integers, or a text of whole numbers); a broker's http://host:port, or "
            "file:// and its rendezvous; or a state_dir.",
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", metavar="FILE", show_default=False,
                     help="producer.yaml: the streams to read. broker.yaml: rules, weights and mesh to begin with. May "
                     "be given again."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TOKENS[,...]", show_default=False,
                     help="Tokens of a pack. The first is compared with the others; one alone with a half, twice and "
                     "four times as many. Default: broker.yaml's, or the best around 8192."),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option("--window", metavar="SAMPLES[,...]", show_default=False,
                     help="Samples that the packer looks over. Default: broker.yaml's, 1024, 256 and 4096."),
    ] = None,
    packer: Annotated[
        str | None,
        typer.Option("--packer", metavar="NAME[,...]", show_default=False,
                     help="How samples are chosen. Default: broker.yaml's, exact_fill, and all the others."),
    ] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option("--mesh", metavar="dp=N,cp=N,tp=N,pp=N", show_default=False,
                     help="Parallel ranks: data, context, tensor, and stages of a pipeline. Given again, meshes are "
                     "compared. Default: broker.yaml's planned_mesh, or one rank."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="SHAPE", show_default=False,
                     help="How long packs are: fixed, exact, multiple=512 or buckets=2048,4096. Given again, they are "
                     "compared. Default: broker.yaml's, fixed, and the others."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", metavar="NAME", show_default=False,
                     help="Of FP8 products, which ask for longer multiples: "
                     f"{', '.join(get_args(Precision))}. Default: broker.yaml's, or none."),
    ] = None,
    packs: Annotated[
        int | None,
        typer.Option("--packs", metavar="N", min=1, show_default=False,
                     help="Packs of an optimizer step, over all ranks. Default: broker.yaml's, or 64."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="SAMPLES", min=1, max=2**24, show_default=False,
                     help="Or samples of a step, packed by themselves: step: {samples: N}. Default: broker.yaml's; of "
                     "batches that end_of_batch closes, about as many as they have."),
    ] = None,
    overlong: Annotated[
        str | None,
        typer.Option("--overlong", metavar="POLICY", show_default=False,
                     help=f"Samples over the budget: {', '.join(get_args(Overlong))}. Default: broker.yaml's; where "
                     "that is error, what truncate would lose is shown."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", min=1, show_default=False,
                     help="Read so many samples of each stream, or pack so many lengths. Default: 20000 to tokenize, "
                     "50000 lengths."),
    ] = None,
    total: Annotated[
        int | None,
        typer.Option("--total", metavar="N", min=1, show_default=False,
                     help="Samples of one pass, where LENGTHS are some of them or a source does not know."),
    ] = None,
    feed: Feed = None,
    png: Png = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:  # fmt: skip
    r"""Say what budget, window, packer and mesh to take.

    Forms and deals steps of your lengths as a broker would, for each setting of a grid around the one given: how full
    packs are, what is wasted and why, how evenly ranks are loaded, steps of a pass. Then what to take, the reasons, and
    the lines for broker.yaml. Lengths come from a file, from a run, or from producer.yaml, which tokenizes some
    samples of each stream.

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
    with plan_inputs.saying() as say:
        found = advisor.advise(workload, options, say)
    found["why"] = advice.why(found, options.overlong)
    found["broker_yaml"] = advice.broker_yaml(found, options.overlong)
    _say(found, as_json, plan_report.show_plan)
    if png is not None:
        from streampack_services.plan import charts

        charts.draw_plan(found, workload.lengths, png)
        print(f"drawn: {png}", file=sys.stderr)


def report(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="STATE_DIR|ENDPOINT", show_default=False,
            help="A run's state_dir: what its log says; or a broker's http://host:port, or file:// and its rendezvous: "
            "what it has served since it started. Default: STREAMPACK_HTTP of the environment, else "
            "http://127.0.0.1:7400.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, show_default=False,
                     help="How many share the work. Default: the ranks that are attached to the broker."),
    ] = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option("--tokens-per-second", metavar="N", min=1e-9, show_default=False,
                     help="What one GPU computes, padding too. Default: what the broker packs now, by the GPUs."),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option("--micro-batch", metavar="SAMPLES", min=1, show_default=False,
                     help="Of the padded one that is compared with. Default: as many samples as a pack holds on the "
                     "average."),
    ] = None,
    feed: Feed = None,
    png: Png = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:  # fmt: skip
    r"""Say what a run saved by packing as it does.

    In tokens, percent and GPU hours, against padding to the longest of a micro-batch, greedy concatenation, and first
    fit decreasing over blocks of the window, each on the run's own samples in the order in which they came.

    \b
    Example:
        streampack report state/sft-8b --gpus 64 --tokens-per-second 9000
        streampack report http://node0:7400
    """
    from streampack_services.plan import plan_inputs, savings, savings_report

    run = plan_inputs.run_of(what, feed, timeout)
    found = savings.savings(run, micro_batch, savings.rate_of(run, gpus, tokens_per_second))
    _say(found, as_json, savings_report.show_savings)
    if png is not None:
        from streampack_services.plan import charts

        charts.draw_savings(found, savings_report.NAMES, run.lengths, png)
        print(f"drawn: {png}", file=sys.stderr)


def _say(found: dict[str, Any], as_json: bool, show: Any) -> None:
    if as_json:
        print(json.dumps(found))
    else:
        show(found)
