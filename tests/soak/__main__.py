"""``make soak``: seeds of the simulation, then runs of real processes under fire, each against its offline golden run.

The simulation (``simulated``) has a quarter of the time, then runs follow, one after another. A run is a broker, two
producers and the trainers of one mesh. Everything is killed and frozen at random moments, over TCP also behind slow
links (``fire``, ``links``), started again (``run``), and in the end compared (``accounts``): every step that any rank
was ever given, and every sample once. The last line on stdout is one JSON object; the exit code is 1 if anything was
wrong, and the command that repeats it is printed. Files of a run that went wrong are kept.

    python -m tests.soak --minutes 10 --seed 1    # a soak
    python -m tests.soak --seed 7 --runs 1        # one run of processes
    python -m tests.soak --provocations           # faults of many kinds, and what people are told: 40 minutes

The provocations are in ``provocations``. The alerts have their real times there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak import provocations
from tests.soak.accounts import Account, settle
from tests.soak.arrived import broken_promises, pack_as_it_came
from tests.soak.broken_values import broken_values
from tests.soak.changer import changes_of, commands_of
from tests.soak.fire import Fire
from tests.soak.flood import floods_of
from tests.soak.golden import pack_offline
from tests.soak.job import make_job
from tests.soak.partition import long_partition
from tests.soak.run import Run, Unfinished
from tests.soak.simulated import Simulated, simulate

SIMULATED = 0.25
"""Of the time, what the simulation has."""
PROVOCATIONS_S = 2400.0
"""Time after which every alert of a provocation must have fired."""
FIRE_S = 50.0
EVERY_S = 1.1
COUNTS = ("steps", "compared", "repeated", "lost", "duplicated", "diverged", "states")


@dataclass
class Soak:
    """Sums over runs."""

    seed: int
    simulated: Simulated
    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    slowed: Counter[str] = field(default_factory=Counter)
    longest_stop_s: float = 0.0
    collateral: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    recovered_s: list[float] = field(default_factory=list)
    floods: Counter[str] = field(default_factory=Counter)
    flood_messages: int = 0
    wrong: list[str] = field(default_factory=list)

    def run(self, seed: int, fire_s: float) -> None:
        """One run, added up; its line on stderr."""
        folder = Path(tempfile.mkdtemp(prefix="sp-soak-", dir="/tmp"))
        job = make_job(
            seed, folder, number=seed, in_place=seed % 3 == 2, pushers=2 if seed % 4 == 3 else 0,
            relays=seed % 5 in (1, 3), late=seed % 8 == 7, media=seed % 8 == 2 or seed % 16 == 11,
            flooded=seed % 4 == 0, staged=seed % 4 == 1,
        )  # fmt: skip
        run = Run(job, Fire(seed, EVERY_S), fire_s)
        unfinished = ""
        try:
            run.go()
        except Unfinished as error:
            unfinished = str(error)
            tails = "".join(f"\n--- {member.name}: {member.codes}\n{member.said()}" for member in run.members)
            print(f"run {seed}: {error}{tails}", file=sys.stderr, flush=True)
        changes = changes_of(job) if job.staged else None
        account = settle(job, pack_as_it_came(job) if job.pushers else pack_offline(job, changes), run.fire.hits)
        account.wrong += broken_promises(job) + broken_values(job)
        account.wrong = [unfinished, *account.wrong] if unfinished else account.wrong
        self.add(run, account)
        how = ("in place" if job.in_place else "together") + (", pushed" if job.pushers else "")
        how += ", relays" if job.relays else ""
        how += (", late values" if job.late else "") + (", media" if job.media else "")
        how += f", {len(floods_of(job))} floods" if job.flooded else ""
        if changes is not None:
            asked = Counter(line["code"] for line in commands_of(job))
            how += f", {len(changes)} changes of the rules, {asked[0]} of {asked.total()} commands accepted"
        print(
            f"run {seed}: dp={job.dp} cp={job.cp} tp={job.tp} {how}: {account.steps} steps, "
            f"{account.compared} compared, {run.fire.kills.total()} kills, {run.fire.stops.total()} stops, "
            f"{run.fire.slowed.total()} slow links, "
            f"{run.attempts} attempts, {run.seconds:.0f} s; " + ("; ".join(account.wrong[:3]) or "as the golden run"),
            file=sys.stderr, flush=True,
        )  # fmt: skip
        if account.wrong:
            print(f"kept: {folder}; repeat: python -m tests.soak --seed {seed} --runs 1", file=sys.stderr, flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, run: Run, account: Account) -> None:
        self.runs += 1
        self.kills += run.fire.kills
        self.stops += run.fire.stops
        self.slowed += run.fire.slowed
        self.longest_stop_s = max(self.longest_stop_s, run.fire.longest_stop_s)
        self.collateral += run.collateral
        for name in COUNTS:
            self.counts[name] += getattr(account, name)
        self.errors += account.errors
        self.recovered_s += account.recovered_s
        floods = floods_of(run.job)
        self.floods += Counter(line["kind"] for line in floods)
        self.flood_messages += sum(line["sent"] for line in floods)
        self.wrong += [f"seed {run.job.seed}: {text}" for text in account.wrong]

    def report(self, seconds: float) -> dict[str, Any]:
        """The one object."""
        return {
            "ok": not self.wrong, "seed": self.seed, "seconds": round(seconds), "simulated": self.simulated.seeds,
            "simulated_wrong": len(self.simulated.wrong), "runs": self.runs,
            "kills": self.kills.total(), "killed": dict(self.kills), "stops": self.stops.total(),
            "stopped": dict(self.stops), "longest_stop_s": round(self.longest_stop_s, 1),
            "slow_links": dict(self.slowed),
            "floods": dict(self.floods), "flood_messages": self.flood_messages, "ended_by_launcher": self.collateral,
            **{name: self.counts[name] for name in COUNTS},
            "broker_recovery_s": _spread(self.recovered_s), "trainer_errors": dict(self.errors),
            "wrong": self.wrong[:20],
        }  # fmt: skip


def _spread(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"count": 0}
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"count": len(ordered), "median": round(statistics.median(ordered), 2), "p99": p99, "max": ordered[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first simulation and the first run; the others follow it"
    )
    parser.add_argument("--runs", type=int, default=None, help="so many instead of as many as fit, and no simulation")
    parser.add_argument(
        "--provocations", action="store_true", help="cause faults of many kinds, and compare what people are told"
    )
    asked = parser.parse_args()
    if asked.provocations:
        told = provocations.main(PROVOCATIONS_S, hurry=1.0)
        print(json.dumps({"ok": not told, "wrong": told}))
        sys.exit(bool(told))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    seed = asked.seed if asked.seed is not None else time.time_ns() % 1_000_000
    print(f"seed {seed}", file=sys.stderr, flush=True)
    began, simulated = time.monotonic(), Simulated()
    if asked.runs is None:
        simulated = simulate(seed, SIMULATED * asked.minutes * 60)
        print(f"simulated {simulated.seeds} seeds from {seed} on", file=sys.stderr, flush=True)
    soak, beside = Soak(seed, simulated, wrong=list(simulated.wrong)), ThreadPoolExecutor(1)
    partition = beside.submit(long_partition, seed) if asked.minutes >= 3 and asked.runs is None else None
    while (left := asked.minutes * 60 - (time.monotonic() - began)) > 15 and soak.runs != asked.runs:
        soak.run(seed + soak.runs, min(FIRE_S, left))
    partitioned = partition.result() if partition is not None else None
    soak.wrong += partitioned or []
    found = soak.report(time.monotonic() - began)
    found["link_down_60_s"] = "not tried" if partitioned is None else "wrong" if partitioned else "as the golden run"
    print(json.dumps(found))
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
