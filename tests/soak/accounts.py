"""The reckoning after a run: what each rank wrote down, against the golden run. Nothing but files is read."""

from __future__ import annotations

import base64
import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from streampack.wire.record_frames import decode_snapshot
from tests.soak.fire import Hit
from tests.soak.golden import Golden, Id
from tests.soak.job import Job
from tests.soak.members import PREFETCH, lines_of

FATAL = ("diverged", "StateError", "InternalError", "InvariantError", "WireError", "LogDamaged", "ConfigError")
"""A trainer that ends with one of these was given what it should not: no restart excuses it."""


@dataclass
class Account:
    """Of one run: ``steps`` in the golden run; ``compared`` steps that ranks wrote down, ``repeated`` among them."""

    steps: int
    compared: int = 0
    repeated: int = 0
    lost: int = 0
    duplicated: int = 0
    diverged: int = 0
    states: int = 0
    """Checkpoints' states compared."""
    errors: Counter[str] = field(default_factory=Counter)
    """Of trainers, by type; they were started again."""
    wrong: list[str] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    """From the kill of a broker alone to the first step that only its successor can have served."""


def settle(job: Job, golden: Golden, hits: list[Hit]) -> Account:
    """Compare every line of every rank; count every sample over the steps that ranks had last."""
    account = Account(len(golden.steps))
    lines = [lines_of(job, rank) for rank in range(len(job.meshes))]
    last: list[dict[int, dict[str, Any]]] = []
    for rank, of_rank in enumerate(lines):
        last.append(_compare(account, golden, job.meshes[rank], of_rank))
        if set(last[rank]) != set(range(len(golden.steps))):
            account.wrong.append(f"rank {rank} had {len(last[rank])} steps, expected {len(golden.steps)}")
        if not of_rank or of_rank[-1]["kind"] != "end":
            account.wrong.append(f"rank {rank} did not come to the end")
    _conserve(account, job, golden, last)
    _compare_states(account, job, golden)
    steps = sorted((line["at"], line["index"]) for of_rank in lines for line in of_rank if line["kind"] == "step")
    account.recovered_s = _recoveries(hits, steps)
    return account


def _compare(
    account: Account, golden: Golden, mesh: dict[str, int], lines: list[dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Each step's last line; differences from the golden run are noted."""
    last: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line["kind"] == "error":
            account.errors[line["type"]] += 1
            if any(word in line["type"] or word in line["text"] for word in FATAL):
                account.wrong.append(f"{line['type']}: {line['text']}")
        if line["kind"] != "step":
            continue
        index = line["index"]
        account.compared += 1
        account.repeated += index in last
        last[index] = line
        if difference := _difference(golden, mesh, line):
            account.diverged += 1
            account.wrong.append(f"step {index}, mesh {mesh}: {difference}")
    return last


def _difference(golden: Golden, mesh: dict[str, int], line: dict[str, Any]) -> str:
    """What a rank's step has other than the golden run, or nothing."""
    if line["index"] >= len(golden.steps):
        return "a step after the last"
    step = golden.steps[line["index"]]
    for name, expected in (
        ("digest", step.digest), ("chain", step.chain), ("loss", step.num_loss_tokens), ("samples", step.num_samples),
    ):  # fmt: skip
        if line[name] != expected:
            return f"{name}: got {line[name]}, expected {expected}"
    if [pack["micro_batch"] for pack in line["packs"]] != list(range(len(step.packs) // mesh["dp"])):
        return f"got micro-batches {[pack['micro_batch'] for pack in line['packs']]}"
    for pack in line["packs"]:
        expected_crcs = golden.crcs(line["index"], pack["pack"], mesh["cp"], mesh["cp_rank"])
        for name, crc in expected_crcs.items():
            if pack["crcs"][name] != crc:
                return f"{name} of pack {pack['pack']} differs"
    return ""


def _conserve(account: Account, job: Job, golden: Golden, last: list[dict[int, dict[str, Any]]]) -> None:
    """Each sample exactly once over the steps that every rank had last, for each (cp, tp) rank."""
    for cp_rank, tp_rank in itertools.product(range(job.cp), range(job.tp)):
        seen: Counter[Id] = Counter()
        for mesh, steps in zip(job.meshes, last, strict=True):
            if (mesh["cp_rank"], mesh["tp_rank"]) == (cp_rank, tp_rank):
                seen.update(
                    (row[0], row[1], row[2]) for line in steps.values() for pack in line["packs"] for row in pack["ids"]
                )
        account.lost += len(golden.expected - set(seen))
        account.duplicated += sum(count - 1 for count in seen.values())
        if foreign := set(seen) - golden.expected:
            account.wrong.append(f"{len(foreign)} samples that are in no source, such as {min(foreign)}")
    if account.lost or account.duplicated:
        account.wrong.append(f"{account.lost} samples lost, {account.duplicated} duplicated")


def _compare_states(account: Account, job: Job, golden: Golden) -> None:
    """States of one step are those of the golden run, and equal on all ranks, whichever broker told them."""
    states: dict[int, list[dict[str, Any]]] = {}
    for path in job.folder.glob("checkpoint-*.json"):
        states.setdefault(int(path.stem.split("-")[1]), []).append(json.loads(path.read_text())["loader"])
    for step, found in states.items():
        account.states += len(found)
        if any(not _agree(state, found[0]) for state in found):
            account.wrong.append(f"states after step {step} differ between ranks")
        chain = golden.steps[step].chain if step < len(golden.steps) else ""
        if (found[0]["next_step"], found[0]["chain"]) != (step + 1, chain):
            account.wrong.append(f"the state after step {step} is of another step, or of other steps")


def _agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two states are equal, but for changes of the rules between the times at which they were told."""
    if one == other:
        return True
    if not (one["snapshot"] and other["snapshot"]):  # a state of the first steps has one only after a change
        return one | {"snapshot": ""} == other | {"snapshot": ""}
    rests = [{name: value for name, value in state.items() if name != "snapshot"} for state in (one, other)]
    snapshots = [decode_snapshot(base64.b64decode(state["snapshot"])) for state in (one, other)]
    fewest = min(len(each.changes) for each in snapshots)
    taken = [replace(each, changes=each.changes[:fewest], schedule=UNSET) for each in snapshots]
    return rests[0] == rests[1] and taken[0] == taken[1]


def _recoveries(hits: list[Hit], steps: list[tuple[float, int]]) -> list[float]:
    """Where nothing else happened before it had recovered. Steps that lay ready in the clients are passed over,
    so a figure holds up to ``PREFETCH + 1`` steps' own time beside the recovery.
    """
    found = []
    for hit, after in pairwise([*hits, Hit(float("inf"), "")]):
        if hit.what != "kill broker":
            continue
        furthest = max((index for at, index in steps if at <= hit.at), default=-1)
        served = min((at for at, index in steps if at > hit.at and index > furthest + PREFETCH + 1), default=None)
        if served is not None and served < after.at:
            found.append(round(served - hit.at, 3))
    return found
