"""Print the results of ``streampack why``, ``ledger`` and ``replay`` for a person."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streampack_services.amounts import media_text
from streampack_services.audit.named_media import reference_text
from streampack_services.terminal import add_numbers, new_console

Tree = dict[str, Any]
SHOWN = 8
"""Characters of a digest to print in tables."""


def show_step(found: Tree) -> None:
    """Print the result of ``why.why_step``."""
    console = new_console()
    lineage = f"  lineage {found['lineage']}" if found["lineage"] else ""
    console.print(Text.assemble((f"step {found['step']}", "bold"), f"  feed {found['feed']}{lineage}  {found['run']}"))
    empty = f", {found['num_empty_packs']} of them empty" if found["num_empty_packs"] else ""
    facts = Table.grid(padding=(0, 2))
    packs = "one per row" if found["padded"] else f"in {found['num_packs']} packs{empty}"
    room = "" if found["padded"] else f" of {found['num_packs'] * found['budget']:,}"
    facts.add_row("samples", f"{found['num_samples']:,} {packs}")
    facts.add_row("tokens", f"{found['num_tokens']:,}{room}")
    facts.add_row("loss tokens", f"{found['num_loss_tokens']:,}, the step's denominator")
    if found["num_items"]:
        facts.add_row("media", media_text(found["num_items"], found["num_patches"]))
    facts.add_row("digest", found["digest"])
    facts.add_row("chain", found["chain"])
    means = [f"{name} {_value_text(each['mean'])}" for name, each in found["reported"].items()]
    if means:
        facts.add_row("reported", f"{', '.join(means)} (means of the samples)")
    if found["partly_reported"]:
        facts.add_row("reported", f"{', '.join(found['partly_reported'])}: not by all ranks yet")
    for row in _events_of(found):
        facts.add_row(*row)
    console.print(facts)
    console.print()
    console.print(_packs_table(found["packs"]))


def _events_of(found: Tree) -> list[tuple[str, str]]:
    """Return (name, text) of each event at a step: changes of settings, lineages, skips, checkpoints, the end."""
    rows = [("change", "; ".join(filter(None, [each["note"], *each["differences"]]))) for each in found["changes"]]
    rows += [
        ("lineage", f"{each['lineage']} begins here: {each['why'] or 'no reason given'}") for each in found["began"]
    ]
    rows += [
        (
            "history",
            f"in lineage {each['lineage']}, which no longer counts, this step had digest {each['digest'][:SHOWN]}",
        )
        for each in found["other_lineages"]
    ]
    if found["skipped"]:
        rows.append(("skipped", "no rank trains on it"))
    if found["committed"]:
        rows.append(("checkpoint", "committed after this step"))
    if found["last"]:
        rows.append(("end", "the feed's last step"))
    return rows


def _packs_table(packs: list[Tree]) -> Table:
    """Return a table of a step's packs with their samples, and their rank and length if they were dealt."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    dealt = bool(packs) and "dp_rank" in packs[0]
    media = ("num_items", "num_patches") if any(pack["num_items"] for pack in packs) else ()
    numbers = ("num_tokens", "num_loss_tokens", *media)
    heads = ("tokens", "loss", "items", "patches")[: len(numbers)]
    add_numbers(table, (*(("micro", "dp") if dealt else ()), "pack", *(("length",) if dealt else ()), *heads))
    table.add_column("samples", overflow="fold")
    for pack in packs:
        rank = (str(pack["micro_batch"]), str(pack["dp_rank"])) if dealt else ()
        split = dealt and pack["samples"] and pack.get("of", pack["pack"]) != pack["pack"]
        number = f"{pack['pack']} of {pack['of']}" if split else str(pack["pack"])
        long = (_length_text(pack),) if dealt else ()
        samples = _samples_text(pack["samples"]) or "empty"
        table.add_row(*rank, number, *long, *(f"{pack[key]:,}" for key in numbers), samples)
    return table


def _length_text(pack: Tree) -> str:
    """Return a pack's length in tokens as text: ``8,192``, or ``4 x 2,048`` for 4 padded rows."""
    return f"{pack['rows']} x {pack['row_tokens']:,}" if "rows" in pack else f"{pack['length']:,}"


def _samples_text(samples: list[Tree]) -> str:
    """Return a pack's samples as ``web 12 15 18, code 3.1``: indices by stream, with parts of split samples."""
    said = []
    for stream, each in groupby(samples, key=lambda sample: str(sample["stream"])):
        names = (f"{sample['index']}" + (f".{sample['part']}" if sample["part"] else "") for sample in each)
        said.append(f"{stream} {' '.join(names)}")
    return ", ".join(said)


def show_sample(found: Tree) -> None:
    """Print the result of ``why.why_sample``."""
    console, sent = new_console(), found["sent"]
    place = f"{found['partition']}:{sent['seq']}" if found["index"] is None else str(found["index"])
    where = "" if found["index"] is None else f"  sample {found['seq']} of partition {found['partition']}"
    console.print(Text.assemble((f"{found['stream']}:{place}", "bold"), f"  feed {found['feed']}{where}"))
    if sent is not None and found["index"] is not None:
        console.print(
            f"was sent as sample {sent['seq']} of partition {found['partition']}, and waited for {sent['waited_for']}"
        )
    if found["origin"]:
        console.print(f"read from {found['origin']}")
    said = {
        "step": "is in a step",
        "rejected": f"was rejected: {found['why']}",
        "dropped": f"was dropped: {found['why']}",
        "unrecorded": found["why"],
        "waiting": f"waiting: {found['why']}",
        "none": f"does not exist: {found['why']}",
    }
    if found["is"] != "step":
        console.print(said[found["is"]])
    for name, references in (found.get("references") or {}).items():
        for number, reference in enumerate(references):
            console.print(Text(f"{name}[{number}]: {reference_text(reference)}"))
    if not found["places"]:
        return
    last = found["places"][-1]
    if last["items"]:
        console.print(f"has {media_text(last['items'], last['patches'])}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    trees = ("shared",) if any(place["shared"] for place in found["places"]) else ()
    numbers = ("step", "lineage", "pack", "part", "offset", "length", *trees, "loss_tokens")
    add_numbers(table, (*numbers[:-1], "loss", "crc32c", "digest"))
    table.add_column("", overflow="fold")
    for place in found["places"]:
        counts = "" if place["counts"] else "no longer counts"
        table.add_row(
            *(f"{place[key]:,}" for key in numbers),
            f"{place['crc']:08x}", place["digest"][:SHOWN], "skipped" if place["skipped"] else counts,
        )  # fmt: skip
    console.print(table)
    _show_values(console, found["places"])


def _show_values(console: Console, places: list[Tree]) -> None:
    """Print the values that trainers reported for a sample, by step."""
    table = Table(box=None, padding=(0, 2, 0, 0))
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


def show_row(found: Tree) -> None:
    """Print the result of ``why.why_row`` for a row of a file: one sample per pass."""
    for sample in found["samples"]:
        show_sample(sample)


def show_verified(found: Tree) -> None:
    """Print the result of ``verify.verify``."""
    console = new_console()
    first, stop = found["records"]
    console.print(Text.assemble((found["run"], "bold"), f"  {stop - first:,} records of the log"))
    for name, feed in found["feeds"].items():
        console.print()
        upto = f"steps {feed['first_step']:,} to {feed['next_step'] - 1:,}" if feed["steps"] else "no step yet"
        ended = "ended" if feed["ended"] else "not ended"
        console.print(Text.assemble((f"feed {name}", "bold"), f"  {upto}, {ended}"))
        facts = Table.grid(padding=(0, 2))
        facts.add_row("packs", f"{feed['packs']:,}")
        facts.add_row("chain", feed["chain"] or "-")
        if not feed["all_known"]:
            facts.add_row(
                "before", "earlier steps are in another log, so lost samples are found only after the next snapshot"
            )
        for begin, end in feed["not_recorded"]:
            facts.add_row(
                "not recorded here", f"steps {begin:,} to {end:,}, because trainers resumed at step {end + 1:,}"
            )
        for lineage in feed["lineages"][1:]:
            facts.add_row(f"lineage {lineage['lineage']}", f"from step {lineage['step']:,}: {lineage['why'] or '-'}")
        for begin, end in feed["skipped"]:
            facts.add_row("skipped", f"steps {begin:,} to {end:,}")
        console.print(facts)
        console.print(_streams_table(feed["streams"]))
    console.print()
    _show_findings(console, found)


def _streams_table(streams: Tree) -> Table:
    """Return a table with the counts of each stream; lost and duplicated samples are red."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("stream")
    columns = ("samples", "tokens", "rejected", "dropped", "waiting", "lost", "duplicated")
    add_numbers(table, columns)
    for name, row in streams.items():
        cells = [
            Text(f"{row[key]:,}", "bold red" if key in ("lost", "duplicated") and row[key] else "") for key in columns
        ]
        table.add_row(name, *cells)
    return table


def _show_findings(console: Console, found: Tree) -> None:
    """Print the verdict of a verification, and the first findings of each kind."""
    if found["good"]:
        whole = not any(feed["not_recorded"] for feed in found["feeds"].values())
        said = "no sample is lost or repeated" if whole else "no recorded sample is lost or repeated"
        console.print(Text.assemble(("good", "bold green"), f": {said}, all digests and chains match"))
        return
    counts = ", ".join(f"{kind} {count:,}" for kind, count in found["findings"].items())
    console.print(Text.assemble(("wrong", "bold red"), f": {counts}"))
    for line in found["named"]:
        console.print(f"  {line}")
    if sum(found["findings"].values()) > len(found["named"]):
        console.print("  and more of these kinds")


def show_rebuilt(found: Tree) -> None:
    """Print the result of ``state_dir.rebuild``."""
    console = new_console()
    first, stop = found["records"]
    console.print(Text.assemble((found["file"], "bold"), f"  was rebuilt from {stop - first:,} records of the log"))
    facts = Table.grid(padding=(0, 2))
    facts.add_row("rows", f"{found['rows']:,}: {found['kept']:,} unchanged, {found['new']:,} new")
    for key, said in (("repaired", "differed from the log"), ("gone", "had no record in the log")):
        names = found[key]
        if names:
            shown = ", ".join(names[:5]) + (" and more" if len(names) > 5 else "")
            facts.add_row(key, f"{len(names):,} row{'s' * (len(names) != 1)} {said}: {shown}")
    console.print(facts)
    for line in found["damage"][:5]:
        console.print(f"  was damaged: {line}")


def show_replayed(found: Tree) -> None:
    """Print the result of ``replay.replay``."""
    console = new_console()
    lineage = f"  lineage {found['lineage']}" if found["lineage"] or not found["counts"] else ""
    console.print(Text.assemble((f"step {found['step']}", "bold"), f"  feed {found['feed']}{lineage}  {found['run']}"))
    verdict = ("yes", "bold green") if found["equal"] else ("no", "bold red")
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "digest equal", Text.assemble(verdict, ": the digest and the chain match the log" if found["equal"] else "")
    )
    facts.add_row("digest", found["digest"])
    facts.add_row("chain", found["chain"])
    if not found["equal"]:
        facts.add_row("recorded", f"{found['recorded']['digest']}, chain {found['recorded']['chain']}")
    facts.add_row("samples", f"{found['num_samples']:,} in {len(found['packs'])} packs")
    facts.add_row("tokens", f"{found['num_tokens']:,}")
    facts.add_row("loss tokens", f"{found['num_loss_tokens']:,}, the step's denominator")
    sizes = (f"{name} {size}" for name, size in found["mesh"].items() if size > 1 or name != "pp")
    facts.add_row("mesh", ", ".join(sizes))
    if found["skipped"]:
        facts.add_row("skipped", "no rank trains on it")
    if not found["counts"]:
        facts.add_row("lineage", "no longer counts")
    if found["out"]:
        facts.add_row("written", found["out"])
    facts.add_row("took", f"{found['seconds']:.1f} s")
    console.print(facts)
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    add_numbers(table, ("pack", "dp", "micro", "samples", "tokens", "loss"))
    for pack in found["packs"]:
        keys = ("pack", "dp_rank", "micro_batch", "num_samples", "num_tokens", "num_loss_tokens")
        table.add_row(*(f"{pack[key]:,}" for key in keys))
    console.print(table)
