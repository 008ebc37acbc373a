"""The reckoning of late values and of results after a run: each sample has its number, and each step its losses."""

from __future__ import annotations

from tests.soak.job import Job
from tests.soak.members import lines_of
from tests.soak.values import STREAM, diary_of, loss_of


def broken_values(job: Job) -> list[str]:
    """What is wrong with late values and with results, beside the arrays of packs."""
    if not job.late:
        return []
    found, number_of = list[str](), dict[tuple[int, ...], int]()
    steps: dict[int, set[tuple[int, ...]]] = {}
    for rank in range(len(job.meshes)):
        for line in lines_of(job, rank):
            for pack in line.get("packs", ()):
                rows = [tuple(row) for row in pack["ids"]]
                number_of |= dict(zip(rows, pack["numbers"], strict=True))
                steps.setdefault(line["index"], set()).update(rows)
    stream = list(job.settings["streams"]).index(STREAM)
    sent = sorted((row[1] % job.pushers, number) for row, number in number_of.items() if row[0] == stream)
    if sent != [(partition, number) for partition in range(job.pushers) for number in range(job.pushed)]:
        found.append(f"{len(sent)} pushed samples, or not each once, expected {job.pushers * job.pushed}")
    lines = diary_of(job.folder / "subscriber.jsonl")
    if [line["step"] for line in lines] != list(dict.fromkeys(line["step"] for line in lines)):
        found.append("a step came to a subscriber twice")
    if {line["step"] for line in lines} != steps.keys():
        found.append(f"results of {len(lines)} steps, expected {len(steps)}")
    for line in lines:
        rows = [tuple(row[:3]) for row in line["loss"]]
        if set(rows) != steps.get(line["step"]) or any(row[3] != loss_of(*row[:3]) for row in line["loss"]):
            found.append(f"results of step {line['step']} are of other samples, or others")
        for row, (name, partition, seq) in zip(rows, line["sent"], strict=True):
            if name == STREAM and (partition, seq) != (row[1] % job.pushers, number_of[row]):
                found.append(f"results of step {line['step']}: sample {row} has number {seq}")
    return found
