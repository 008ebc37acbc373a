"""All targets by name, and the inputs that once crashed one: each is run first, and in the tests."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz import decoders, http, machines, peers

TARGETS = {target.name: target for target in (*decoders.TARGETS, *http.TARGETS, *machines.TARGETS, *peers.TARGETS)}
_FOUND = Path(__file__).parent / "found"


def found_before(name: str) -> dict[str, bytes]:
    """Inputs that crashed a target once, by what was wrong then."""
    return {path.stem: path.read_bytes() for path in sorted((_FOUND / name).glob("*.bin"))}
