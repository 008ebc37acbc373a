"""The bytes of simulated runs: of every message on the wire, and of every record in the log.

The same run must have the same bytes, or an older client, relay, log or checkpoint may not fit any more. Where they
change on purpose, write them anew, and say in the commit what changed and why old ones are still read:

    python -m tests.simulation.recorded_bytes
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from streampack.core.protocol.message import Envelope
from streampack.wire.frames import encode
from tests.simulation.data import MEDIA_CASES
from tests.simulation.network import Network
from tests.simulation.rl.cases import RL_CASES, RL_MEDIA
from tests.simulation.rl.world import LoopWorld
from tests.simulation.world import World
from tests.world.disk import Disk

RECORDED = Path(__file__).parents[1] / "fixtures" / "bytes.json"
RUNS: dict[str, Callable[[], World]] = {
    **{f"steps {seed}": partial(World, seed) for seed in range(24)},
    **{f"media {number}": partial(World, number, number) for number in MEDIA_CASES},
    **{f"relays {seed}": partial(World, seed, relays=True) for seed in range(6)},
    **{f"standby {seed}": partial(World, seed, standby=True) for seed in range(4)},
    **{f"loops {number}": partial(LoopWorld, number, number) for number in (*RL_CASES, *RL_MEDIA)},
}


def digest(name: str) -> str:
    """Return the digest of all bytes of a run."""
    found = hashlib.blake2b(digest_size=16)
    with _heard(found.update):
        RUNS[name]().run()
    return found.hexdigest()


@contextmanager
def _heard(hear: Callable[[bytes], None]) -> Iterator[None]:
    """Hear every message before the network takes it, and every record as it is on disk."""
    carry, append = Network.carry, Disk.append

    def carry_and_tell(self: Network, link: bytes, envelope: Envelope, arrive: Callable[[Envelope], None]) -> Any:
        hear(b"".join(bytes(memoryview(frame)) for frame in encode(envelope)))
        return carry(self, link, envelope, arrive)

    def append_and_tell(self: Disk, *arguments: Any) -> None:
        append(self, *arguments)
        kind, body = self.records[-1]
        hear(b"%d" % kind + body)

    Network.carry, Disk.append = carry_and_tell, append_and_tell  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Network.carry, Disk.append = carry, append  # type: ignore[method-assign]


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({name: digest(name) for name in RUNS}, indent=1) + "\n")
