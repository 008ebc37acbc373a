"""A program that floods the broker with valid keys, under fire, and revokes each key in the middle of its flood.

``python -m tests.soak.flood SETTINGS``, a JSON file: ``keys`` (the folder), ``rendezvous``, ``folder``, ``seed``. The
keys are for a rank, a host and a stream that the run does not have. So the broker refuses what they say, and the run
must be as without them. Each flood is a line of ``flood.jsonl``: its kind, and the messages that were sent before and
after the key was revoked.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streampack_services.broker.authorization import new_key, revoke

from benchmarks.attacks.flooder import ROLES, Flooder

if TYPE_CHECKING:
    from tests.soak.job import Job

KINDS = ("reports", "bundles", "publish", "hello")
LIMITS: dict[str, dict[str, Any]] = {
    "trainer": {"ranks": {"dp": 63}}, "relay": {"hosts": ["nowhere"]}, "producer": {"streams": ["nothing"]},
}  # fmt: skip
"""Limits of a key, by role."""
ADMITTED_S = 1.1
"""Seconds after which the broker has read a new key."""


def floods_of(job: Job) -> list[dict[str, Any]]:
    """The floods of a run."""
    path = job.folder / "flood.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def flood(keys: Path, rendezvous: Path, kind: str, name: str, draw: random.Random) -> dict[str, Any]:
    """Flood with a new key, revoke the key, and go on for a while. Return the line of ``flood.jsonl``."""
    role = ROLES[kind]
    new_key(keys, name, role, LIMITS[role])
    time.sleep(ADMITTED_S)
    flooder = Flooder(json.loads(rendezvous.read_text()), keys / f"{name}.key", kind, connections=4)
    flooder.run(draw.uniform(1.0, 4.0))
    before = flooder.sent
    revoke(keys, name)
    flooder.run(2.0)
    flooder.close()
    return {"kind": kind, "sent": flooder.sent, "after_revocation": flooder.sent - before}


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder, draw = Path(settings["folder"]), random.Random(f"{settings['seed']} {os.getpid()}")
    number = 0
    while (folder / "fire").exists():
        if not Path(settings["rendezvous"]).exists():  # the broker starts
            time.sleep(0.1)
            continue
        number += 1
        name = f"flood-{os.getpid()}-{number}"
        line = flood(Path(settings["keys"]), Path(settings["rendezvous"]), draw.choice(KINDS), name, draw)
        with (folder / "flood.jsonl").open("a") as diary:
            diary.write(json.dumps(line) + "\n")
        time.sleep(draw.uniform(0.0, 1.0))


if __name__ == "__main__":
    main()
