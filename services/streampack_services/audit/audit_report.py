"""Print the results of ``streampack why``, ``ledger`` and ``replay`` for a person."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streampack_services.amounts import counted, media_text
from streampack_services.audit.named_media import reference_text
from streampack_services.audit.why import OTHER_COLUMNS
from streampack_services.terminal import add_numbers, new_console, new_table

Tree = dict[str, Any]
SHORT = 8
"""Characters of a digest to print in tables."""
_SKIPPED = "no rank trains on it"
_NO_PLACE = "not known: no source in the producer.yaml files has it"
_CHANGED = "The row has changed since the run: its checksum differs from the recorded one."
_CUT = "The run cut this sample, so its checksum cannot be compared."
_HISTORY = "in lineage {}, which no longer counts, this step had digest {}"
_STATES = {
    "rejected": "was rejected: ",
    "dropped": "was dropped: ",
    "unrecorded": "",
    "waiting": "waiting: ",
    "none": "does not exist: ",
}
"""Text before the reason, by the state of a sample that is in no step."""


def show_steps(report: Tree) -> None:
    """Print the results of ``why.why_step`` for one step, or for the ``steps`` of a range."""
    for number, step in enumerate(report.get("steps", [report])):
        if number:
            new_console().print()
        _show_step(step)


def _show_step(report: Tree) -> None:
    """Print the result of ``why.why_step``."""
    console = new_console()
    _print_head(console, report, bool(report["lineage"]))
    empty = f", {report['num_empty_packs']} of them empty" if report["num_empty_packs"] else ""
    packs = "one per row" if report["padded"] else f"in {counted(report['num_packs'], 'pack')}{empty}"
    room = "" if report["padded"] else f" of {report['num_packs'] * report['budget']:,}"
    means = ", ".join(f"{name} {_value_text(value['mean'])}" for name, value in report["reported"].items())
    _print_facts(console, [
        ("samples", f"{report['num_samples']:,} {packs}"),
        ("tokens", f"{report['num_tokens']:,}{room}"),
        ("loss tokens", f"{report['num_loss_tokens']:,}, the step's denominator"),
        ("media", media_text(report["num_items"], report["num_patches"]) if report["num_items"] else ""),
        ("stage", _stage_text(report["stage"])),
        ("dealt by", _groups_text(report["dealt_by"]) if report["dealt_by"] else ""),
        ("dealt later by", "; ".join(map(_groups_text, report["dealt_later_by"]))),
        ("digest", report["digest"]),
        ("chain", report["chain"]),
        ("reported", means and f"{means} (means of the samples)"),
        ("reported", f"{', '.join(report['partly_reported'])}: not by all ranks yet" * bool(report["partly_reported"])),
        *_events_of(report),
    ])  # fmt: skip
    console.print()
    console.print(_packs_table(report["packs"]))
    samples = [(pack["pack"], sample) for pack in report["packs"] for sample in pack["samples"]]
    if samples and "text" in samples[0][1]:
        for pack, sample in samples:
            _show_text(console, pack, sample)
    elif samples and "origin" in samples[0][1]:
        console.print()
        console.print(_places_table(samples))


def _stage_text(stage: Tree | None) -> str:
    """Return the stage of a step and its rules as text; empty in a run whose rules never change."""
    if stage is None:
        return ""
    weights = ", ".join(f"{name} {share:.3g}" for name, share in stage["weights"].items())
    packs = "" if stage["packs"] is None else f"{counted(stage['packs'], 'pack')} of "
    late = ", the packs of the stage before until no longer sample waits" if stage["late"] else ""
    head = f"{stage['number']} ({stage['name']}), from step {stage['step']:,} on"
    return f"{head}: {packs}{stage['budget']:,} tokens{late}; weights {weights}"


def _groups_text(dynamic: Tree | None) -> str:
    """Return settings of dynamic context parallelism as text."""
    if dynamic is None:
        return "static cp"
    return (
        "groups of up to {max_group} ranks of {rank_tokens:,} tokens, exchange {node:g} and {across:g}, "
        "planner {planner}"
    ).format(**dynamic)


def _places_table(samples: list[tuple[int, Tree]]) -> Table:
    """Return a table of (pack, sample) with the file and row of each sample, and its pass if it is not the first."""
    table, has_passes = new_table(), any((sample["pass"] or 1) > 1 for _, sample in samples)
    add_numbers(table, ("pack", *(("pass",) if has_passes else ()), "tokens"))
    for name in ("sample", "read from"):
        table.add_column(name, overflow="fold")
    for pack, sample in samples:
        times = (str(sample["pass"] or "?"),) if has_passes else ()
        table.add_row(str(pack), *times, f"{sample['length']:,}", _name(sample), sample["origin"] or _NO_PLACE)
    return table


def _show_text(console: Console, pack: int, sample: Tree) -> None:
    """Print the place of a sample, and its text, or its tokens if it was no text."""
    console.print()
    number = f", pass {sample['pass']}" if (sample["pass"] or 1) > 1 else ""
    head = (
        f"{_name(sample)}  pack {pack}  {counted(sample['length'], 'token')}  {sample['origin'] or _NO_PLACE}{number}"
    )
    console.print(Text(head, style="bold"), soft_wrap=True)
    if sample["origin"] is None:
        return
    if not sample["same"]:
        console.print(_CUT if sample["same"] is None else _CHANGED, style="bold red")
    if sample["tokens"] is not None:
        console.print(Text(sample["text"] or " ".join(map(str, sample["tokens"]))), soft_wrap=True)


def _name(sample: Tree) -> str:
    """Return a sample of a step as ``web:12``, or ``web:12.1`` for a further part."""
    return f"{sample['stream']}:{sample['index']}" + (f".{sample['part']}" if sample["part"] else "")


def _print_head(console: Console, report: Tree, with_lineage: bool) -> None:
    """Print the line that names a step, its feed and its run."""
    lineage = f"  lineage {report['lineage']}" if with_lineage else ""
    console.print(
        Text.assemble((f"step {report['step']}", "bold"), f"  feed {report['feed']}{lineage}  {report['run']}")
    )


def _print_facts(console: Console, facts: Iterable[tuple[str, str | Text]]) -> None:
    """Print (name, text) pairs as two columns, without those whose text is empty."""
    table = Table.grid(padding=(0, 2))
    for name, text in facts:
        if text:
            table.add_row(name, text)
    console.print(table)


def _events_of(report: Tree) -> list[tuple[str, str]]:
    """Return (name, text) of each event at a step: changes of settings, lineages, skips, checkpoints, the end."""
    return [
        *(("change", "; ".join(filter(None, [it["note"], *it["differences"]])) or " ") for it in report["changes"]),
        *(("lineage", f"{it['lineage']} begins here: {it['why'] or 'no reason given'}") for it in report["began"]),
        *(("history", _HISTORY.format(it["lineage"], it["digest"][:SHORT])) for it in report["other_lineages"]),
        ("skipped", "; ".join([_SKIPPED, *report["skip_notes"]]) if report["skipped"] else ""),
        ("checkpoint", "committed after this step" if report["committed"] else ""),
        ("end", "the feed's last step" if report["last"] else ""),
    ]  # fmt: skip


def _packs_table(packs: list[Tree]) -> Table:
    """Return a table of a step's packs with their samples, and their rank and length if they were dealt."""
    table = new_table()
    dealt = bool(packs) and "micro_batch" in packs[0]
    ranks = "ranks" if dealt and "first_rank" in packs[0] else "dp"
    media = ("num_items", "num_patches") if any(pack["num_items"] for pack in packs) else ()
    numbers = ("num_tokens", "num_loss_tokens", *media)
    heads = ("tokens", "loss", "items", "patches")[: len(numbers)]
    add_numbers(table, (*(("micro", ranks) if dealt else ()), "pack", *(("length",) if dealt else ()), *heads))
    table.add_column("samples", overflow="fold")
    for pack in packs:
        rank = (str(pack["micro_batch"]), _ranks_text(pack)) if dealt else ()
        split = dealt and pack["samples"] and pack.get("of", pack["pack"]) != pack["pack"]
        number = f"{pack['pack']} of {pack['of']}" if split else str(pack["pack"])
        long = (_length_text(pack),) if dealt else ()
        samples = _samples_text(pack["samples"]) or "empty"
        table.add_row(*rank, number, *long, *(f"{pack[key]:,}" for key in numbers), samples)
    return table


def _ranks_text(pack: Tree) -> str:
    """Return the ranks of a dealt pack as text: ``3``, or ``0-3`` for a group of the dp x cp ranks."""
    first, count = pack.get("first_rank", pack.get("dp_rank")), pack.get("num_ranks", 1)
    return f"{first}-{first + count - 1}" if count > 1 else str(first)


def _length_text(pack: Tree) -> str:
    """Return a pack's length in tokens as text: ``8,192``, or ``4 x 2,048`` for 4 padded rows."""
    return f"{pack['rows']} x {pack['row_tokens']:,}" if "rows" in pack else f"{pack['length']:,}"


def _samples_text(samples: list[Tree]) -> str:
    """Return a pack's samples as ``web 12 15 18, code 3.1``: indices by stream, with parts of split samples."""
    streams = []
    for stream, of_stream in groupby(samples, key=lambda sample: str(sample["stream"])):
        names = (f"{sample['index']}" + (f".{sample['part']}" if sample["part"] else "") for sample in of_stream)
        streams.append(f"{stream} {' '.join(names)}")
    return ", ".join(streams)


def show_sample(report: Tree) -> None:
    """Print the result of ``why_sample.why_sample``."""
    console, sent, partition, places = new_console(), report["sent"], report["partition"], report["places"]
    admitted = report["index"] is not None
    name = str(report["index"]) if admitted else f"{partition}:{sent['seq']}"
    where = f"  sample {report['seq']} of partition {partition}" if admitted else ""
    console.print(Text.assemble((f"{report['stream']}:{name}", "bold"), f"  feed {report['feed']}{where}"))
    if sent is not None and admitted:
        console.print(f"was sent as sample {sent['seq']} of partition {partition}, and waited for {sent['waited_for']}")
    if report["origin"]:
        console.print(f"read from {report['origin']}")
    if report["is"] != "step":
        console.print(_STATES[report["is"]] + report["why"])
    for field, references in (report.get("references") or {}).items():
        for number, reference in enumerate(references):
            console.print(Text(f"{field}[{number}]: {reference_text(reference)}"))
    if not places:
        return
    if places[-1]["items"]:
        console.print(f"has {media_text(places[-1]['items'], places[-1]['patches'])}")
    table = new_table()
    others = [name for name in OTHER_COLUMNS if any(place[name] for place in places)]
    numbers = ("step", "lineage", "pack", "part", "offset", "length", *others, "loss_tokens")
    add_numbers(table, (*numbers[:-1], "loss", "crc32c", "digest"))
    table.add_column("", overflow="fold")
    for place in places:
        counts = "" if place["counts"] else "no longer counts"
        table.add_row(
            *(f"{place[key]:,}" for key in numbers),
            f"{place['crc']:08x}", place["digest"][:SHORT], "skipped" if place["skipped"] else counts,
        )  # fmt: skip
    console.print(table)
    if groups := [place["step"] for place in places if place["dealt_by"]]:
        console.print(
            f"pack: number of FORM's pack. Groups of ranks shared the sample: streampack why --step {groups[-1]} "
            f"--dp-size D --cp-size C shows them."
        )
    _show_values(console, places)


def _show_values(console: Console, places: list[Tree]) -> None:
    """Print the values that trainers reported for a sample, by step."""
    table = new_table()
    keys = ("step", *(key for key in ("lineage", "part") if any(place[key] for place in places)))
    add_numbers(table, keys)
    table.add_column("reported", overflow="fold")
    add_numbers(table, ("value",))
    for place in places:
        rows = [(name, _value_text(value)) for name, value in place["values"].items()]
        rows += [(name, "not by all ranks yet") for name in place["partly_reported"]]
        for row in rows:
            table.add_row(*(f"{place[key]:,}" for key in keys), *row)
    if table.row_count:
        console.print()
        console.print(table)


def _value_text(value: float | str) -> str:
    """Return a reported value as text: ``0.5312``, or ``nan``."""
    return value if isinstance(value, str) else f"{value:.6g}"


def show_row(report: Tree) -> None:
    """Print the result of ``why_sample.why_row``: of one sample, or of a row of a file with a sample per pass."""
    for sample in report.get("samples", [report]):
        show_sample(sample)


def show_verified(report: Tree) -> None:
    """Print the result of ``verify.verify``."""
    console = new_console()
    first, stop = report["records"]
    console.print(Text.assemble((report["run"], "bold"), f"  {counted(stop - first, 'record')} of the log"))
    for name, feed in report["feeds"].items():
        console.print()
        upto = f"steps {feed['first_step']:,} to {feed['next_step'] - 1:,}" if feed["steps"] else "no step yet"
        ended = "ended" if feed["ended"] else "not ended"
        console.print(Text.assemble((f"feed {name}", "bold"), f"  {upto}, {ended}"))
        unknown = "earlier steps are in another log, so lost samples are found only after the next snapshot"
        _print_facts(console, [
            ("packs", f"{feed['packs']:,}"),
            ("chain", feed["chain"] or "-"),
            ("before", "" if feed["all_known"] else unknown),
            *(("not recorded here", f"steps {begin:,} to {end:,}, because trainers resumed at step {end + 1:,}")
              for begin, end in feed["not_recorded"]),
            *((f"lineage {lineage['lineage']}", f"from step {lineage['step']:,}: {lineage['why'] or '-'}")
              for lineage in feed["lineages"][1:]),
            *(("skipped", f"steps {begin:,} to {end:,}") for begin, end in feed["skipped"]),
        ])  # fmt: skip
        console.print(_streams_table(feed["streams"]))
        console.print()
        console.print(_passes_table(feed["streams"]))
    console.print()
    _show_findings(console, report)


def _streams_table(streams: Tree) -> Table:
    """Return a table with the counts of each stream; lost and duplicated samples are red."""
    table = new_table()
    table.add_column("stream")
    columns = ("samples", "tokens", "rejected", "dropped", "waiting", "lost", "duplicated")
    add_numbers(table, columns)
    for name, row in streams.items():
        cells = [
            Text(
                f"{row[key]:,}",
                "bold red" if key in ("lost", "duplicated") and row[key] else "",
            )
            for key in columns
        ]
        table.add_row(name, *cells)
    return table


def _passes_table(streams: Tree) -> Table:
    """Return a table with the passes over each stream, and its samples whose content came before."""
    table = new_table()
    table.add_column("stream")
    add_numbers(table, ("passes", "samples that came before"))
    for name, row in streams.items():
        table.add_row(name, f"{row['passes']:,.2f}", f"{row['again']:,}")
    return table


def _show_findings(console: Console, report: Tree) -> None:
    """Print the verdict of a verification, and the first findings of each kind."""
    if report["good"]:
        recorded = "recorded " if any(feed["not_recorded"] for feed in report["feeds"].values()) else ""
        text = f": no {recorded}sample is lost or repeated, all digests and chains match"
        console.print(Text.assemble(("good", "bold green"), text))
        return
    counts = ", ".join(f"{kind} {count:,}" for kind, count in report["findings"].items())
    console.print(Text.assemble(("wrong", "bold red"), f": {counts}"))
    for line in report["named"]:
        console.print(f"  {line}")
    if sum(report["findings"].values()) > len(report["named"]):
        console.print("  and more of these kinds")


def show_compared(report: Tree) -> None:
    """Print the result of ``compare_runs.compare``."""
    console = new_console()
    one, other = report["runs"]
    console.print(Text.assemble((f"{one} and {other}", "bold"), f"  feed {report['feed']}"))
    steps = [f"{counted(count, 'step')}{', not ended' if end is None else ''}" for count, end in zip(
        report["steps"], report["ends"], strict=True)]  # fmt: skip
    _print_facts(console, [("first run", steps[0]), ("second run", steps[1])])
    console.print()
    both = f"{counted(report['compared'], 'step')} that both runs have, up to step {report['last']:,}"
    if report["equal"]:
        console.print(Text.assemble(("equal", "bold green"), f": {both}"))
        return
    console.print(Text.assemble(("different", "bold red"), f" from step {report['step']:,} on"))
    if report["digests"] is None:
        _print_facts(console, [("samples", f"the same in all {both}")])
    else:
        digests = " and ".join(digest[:SHORT] for digest in report["digests"])
        _print_facts(console, [("digest", f"{digests}, of step {report['last']:,}")])
    for sentence in report["why"]:
        console.print(f"- {sentence}")


def show_rebuilt(report: Tree) -> None:
    """Print the result of ``state_dir.rebuild``."""
    console = new_console()
    first, stop = report["records"]
    console.print(
        Text.assemble((report["file"], "bold"), f"  was rebuilt from {counted(stop - first, 'record')} of the log")
    )
    _print_facts(console, [
        ("rows", f"{report['rows']:,}: {report['kept']:,} unchanged, {report['new']:,} new"),
        ("repaired", _rows_text(report["repaired"], "differed from the log")),
        ("gone", _rows_text(report["gone"], "had no record in the log")),
    ])  # fmt: skip
    for line in report["damage"][:5]:
        console.print(f"  was damaged: {line}")


def _rows_text(names: list[str], fault: str) -> str:
    """Return the number of rows of a ledger with a fault, and the first of their names; empty if there are none."""
    shown = ", ".join(names[:5]) + (" and more" if len(names) > 5 else "")
    return f"{counted(len(names), 'row')} {fault}: {shown}" if names else ""


def show_replayed(report: Tree) -> None:
    """Print the result of ``replay.replay``."""
    console, equal = new_console(), report["equal"]
    _print_head(console, report, bool(report["lineage"]) or not report["counts"])
    verdict = ("yes", "bold green") if equal else ("no", "bold red")
    sizes = (f"{name} {size}" for name, size in report["mesh"].items() if size > 1 or name != "pp")
    recorded = f"{report['recorded']['digest']}, chain {report['recorded']['chain']}"
    _print_facts(console, [
        ("digest equal", Text.assemble(verdict, ": the digest and the chain match the log" if equal else "")),
        ("digest", report["digest"]),
        ("chain", report["chain"]),
        ("recorded", "" if equal else recorded),
        ("samples", f"{report['num_samples']:,} in {counted(len(report['packs']), 'pack')}"),
        ("tokens", f"{report['num_tokens']:,}"),
        ("loss tokens", f"{report['num_loss_tokens']:,}, the step's denominator"),
        ("mesh", ", ".join(sizes)),
        ("skipped", _SKIPPED if report["skipped"] else ""),
        ("lineage", "" if report["counts"] else "no longer counts"),
        ("written", report["out"] or ""),
        ("took", f"{report['seconds']:.1f} s"),
    ])  # fmt: skip
    console.print()
    table = new_table()
    add_numbers(table, ("pack", "ranks" if report["dealt_by"] else "dp", "micro", "samples", "tokens", "loss"))
    for pack in report["packs"]:
        keys = ("micro_batch", "num_samples", "num_tokens", "num_loss_tokens")
        table.add_row(f"{pack['pack']:,}", _ranks_text(pack), *(f"{pack[key]:,}" for key in keys))
    console.print(table)
