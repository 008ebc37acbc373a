"""What one run under fire reads and serves: a function of its seed, so that a seed repeats it.

Samples are few and short and steps are small: what is tested is the order of events, not the amount
of data. Every job mixes streams of several partitions and passes, with samples that are cut or dropped.
"""

from __future__ import annotations

import itertools
import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streampack_services.broker.authorization import new_key

from tests.integration.running import write, write_jsonl
from tests.soak import sample_media

MESHES = ((1, 1), (2, 1), (4, 1), (3, 1), (1, 2), (2, 2))
"""(dp, cp) of the ranks that read."""
PACKERS = ("exact_fill", "sliding_ffd", "first_fit_decreasing", "concatenative")
BUDGET, PACKS = 128, 12
SHARDS = {"web": 7, "code": 3}
PARTITIONS = {"web": 3, "code": 2}
FIELDS: dict[str, Any] = {
    "number": {"dtype": "int64", "axis": "sample", "default": -1},
    "reward": {"dtype": "float64", "axis": "sample", "default": -1.0, "late": True},
}
"""Fields of a run with late values: samples that are read have the defaults."""


@dataclass(frozen=True)
class Job:
    """One run: ``settings`` are broker.yaml's, ``streams`` producer.yaml's."""

    seed: int
    folder: Path
    dp: int
    cp: int
    settings: dict[str, Any]
    streams: dict[str, Any]
    in_place: bool
    """A trainer that was killed comes back alone; else all are started again from their last checkpoint."""
    checkpoint_every: int
    step_s: float
    pushers: int = 0
    """Programs that push samples of their own, a partition each."""
    pushed: int = 0
    """Samples that each of them pushes."""
    tp: int = 1
    relays: int = 0
    """Hosts, each with a relay for its share of the ranks; 0 for no relay."""
    trees: bool = False
    """Samples are pushed in groups that share their first tokens."""
    late: bool = False
    """Another program gives each pushed sample its reward, and one reads the values that trainers report."""
    media: bool = False
    """Samples have media: see ``sample_media``."""
    staged: bool = False
    """The rules change while the run goes on, by stages."""
    flooded: bool = False
    """The broker requires keys, and a program floods it with keys of its own, which it then revokes."""

    @property
    def keys(self) -> Path:
        """The folder of keys of a run that is flooded."""
        return self.folder / "keys"

    @property
    def meshes(self) -> list[dict[str, int]]:
        """Of each rank, in order."""
        sizes = {"dp": self.dp, "cp": self.cp, "tp": self.tp}
        ranks = itertools.product(range(self.dp), range(self.cp), range(self.tp))
        return [sizes | {"dp_rank": d, "cp_rank": c, "tp_rank": t} for d, c, t in ranks]

    def host_of(self, rank: int) -> int:
        """Return the host of a rank. All ranks of a host read through its relay."""
        return rank * self.relays // len(self.meshes)

    def relay_address(self, host: int) -> str:
        """Return the address at which the relay of a host listens."""
        return f"ipc://{self.folder}/relay-{host}"

    @property
    def over_tcp(self) -> bool:
        """Does the broker listen on TCP, not on Unix sockets?"""
        return str(self.settings["listen"]["trainers"]).startswith("tcp://")

    @property
    def broker_config(self) -> Path:
        return self.folder / "broker.yaml"

    @property
    def producer_config(self) -> Path:
        return self.folder / "producer.yaml"


def make_job(
    seed: int, folder: Path, number: int, in_place: bool = False, rows: tuple[int, int] = (500, 900), pushers: int = 0,
    relays: bool = False, late: bool = False, media: bool = False, flooded: bool = False, staged: bool = False,
) -> Job:  # fmt: skip
    """Run ``number`` of a soak: its files, of ``rows`` samples each, are written to ``folder``, which has a short path.

    The number chooses mesh, packer and transport (TCP where it is even), the seed all else. With ``pushers`` streams
    are merged as they arrive. With ``relays``, small meshes get two tensor-parallel ranks for each shard. With
    ``late``, pushed samples get late fields. With ``media``, samples have images, and the packer is ``exact_fill``.
    With ``flooded``, the broker requires keys: one for each role. With ``staged``, budget, packs and mixture change.
    """
    draw = random.Random(seed)
    dp, cp = MESHES[number % len(MESHES)]
    for stream, count in SHARDS.items():
        for shard in range(count):
            samples = [{"tokens": _tokens(draw)} for _ in range(draw.randint(*rows))]
            if media:
                samples = [each | sample_media.given(seed, folder, each["tokens"]) for each in samples]
            write_jsonl(folder / f"{stream}-{shard}.jsonl", samples)
    settings: dict[str, Any] = {
        "run": f"soak-{seed}",
        "listen": fixed_listen(folder, over_tcp=number % 2 == 0),
        "rendezvous": str(folder / "streampack.json"),
        "state_dir": str(folder / "state"),
        "memory": "32MiB",
        "seed": seed,
        "tokens": draw.choice(("int32", "uint16")),
        "limits": {"sample_tokens": 4096, "chunk": "4KiB"},
        "steps_ahead": draw.randint(2, 8),
        "rules": {
            "packer": PACKERS[number % len(PACKERS)], "budget": BUDGET, "window": {"samples": draw.choice((16, 64))},
            "step": {"packs": PACKS}, "align": {"sample": 2 * cp, "pack": 2 * cp},
            "overlong": draw.choice(("split", "truncate", "drop")), "poison": "drop",
            "tail": draw.choice(("pad", "drop")), "between_passes": draw.choice(("continue", "drain")),
        },
        "streams": {
            "web": {"weight": 0.7, "passes": 2, "partitions": PARTITIONS["web"]},
            "code": {"weight": 0.3, "passes": draw.choice((1, 2)), "partitions": PARTITIONS["code"]},
        },
    }  # fmt: skip
    streams = {name: {"source": "jsonl", "shards": str(folder / f"{name}-*.jsonl")} for name in SHARDS}
    if pushers:
        settings["merge"] = "arrival"
        settings["rules"] |= {"tail": "pad", "between_passes": "continue"}  # every sample is in a step
        settings["streams"] |= {"rollouts": {"pushed": True, "partitions": pushers}}
    if late:
        settings["fields"] = FIELDS
        settings["retain"] = {"checkpoints": 1 << 20}  # so that a subscriber that is down misses nothing
    if media:
        sample_media.write_images(seed, folder)
        settings["fields"] = sample_media.FIELDS
        settings["rules"] |= {"packer": "exact_fill", "limits": sample_media.LIMITS, "balance": {"patches": [40, 2]}}
    if staged:
        settings["rules"] |= {"between_passes": "continue"}
        settings["stages"] = _stages(random.Random(f"{seed} stages"))
    trees = bool(pushers) and cp == 1 and not late and not media
    if trees:  # programs push groups that share their first tokens
        settings["rules"] |= {"share": "prefix", "align": {"sample": 1, "pack": 2}}
    tp = 2 if relays and dp * cp <= 2 else 1
    job = Job(
        seed, folder, dp, cp, settings, streams, in_place, checkpoint_every=draw.randint(3, 12),
        step_s=draw.uniform(0.05, 0.15), pushers=pushers, pushed=1500 if pushers else 0, tp=tp,
        relays=2 if relays else 0, trees=trees, late=late, media=media, flooded=flooded, staged=staged,
    )  # fmt: skip
    if flooded:
        settings["listen"] |= {"keys": str(folder / "keys")}
        for role in ("producer", "trainer", "relay"):
            new_key(folder / "keys", role, role, {})
    write(job.broker_config, settings)
    write(job.producer_config, {"broker": f"file://{settings['rendezvous']}", "processes": 2, "streams": streams})
    return job


def _stages(draw: random.Random) -> list[dict[str, Any]]:
    """Stages of a run of some 200 steps: packs that grow, another budget, and a mixture that changes evenly."""
    step, tokens = draw.randint(5, 30), draw.randint(60_000, 120_000)
    growing = {"from": PACKS, "to": 3 * PACKS, "over": draw.randint(3, 12)}
    return [
        {"name": "ramp", "at": {"step": step}, "rules": {"step": {"packs": growing}}},
        {
            "name": "long", "at": {"tokens": tokens}, "weights": {"web": 0.5, "code": 0.5},
            "rules": {"budget": draw.choice((BUDGET // 2, 2 * BUDGET, 4 * BUDGET)), "step": {"packs": PACKS}},
        },
        {
            "name": "last", "at": {"tokens": tokens + draw.randint(5000, 60_000)}, "weights": {"web": 1.0},
            "over": draw.randint(1, 8), "rules": {"packer": draw.choice(PACKERS)},
        },
    ]  # fmt: skip


def _tokens(draw: random.Random) -> list[int]:
    """A sample's ids, never 0; a few are longer than the budget, a few have none."""
    chance = draw.random()
    length = 0 if chance < 0.01 else draw.randint(BUDGET, 3 * BUDGET) if chance < 0.03 else draw.randint(1, BUDGET // 2)
    first = draw.randrange(60_000)
    return [1 + (first + 31 * i) % 60_000 for i in range(length)]


def fixed_listen(folder: Path, over_tcp: bool = True) -> dict[str, str]:
    """Addresses that a broker started again has, too."""
    if not over_tcp:
        return {"producers": f"ipc://{folder}/p", "trainers": f"ipc://{folder}/t", "http": "127.0.0.1:0"}
    with _on_a_port() as one, _on_a_port() as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    return {
        "producers": f"tcp://127.0.0.1:{ports[0]}", "trainers": f"tcp://127.0.0.1:{ports[1]}", "http": "127.0.0.1:0",
    }  # fmt: skip


def _on_a_port() -> socket.socket:
    """A socket on a free port that no connection is given by itself: those come from 32768 on, and one of another test
    might have it while no broker listens there.
    """
    while True:
        found = socket.socket()
        try:
            found.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
        except OSError:
            found.close()
        else:
            return found
