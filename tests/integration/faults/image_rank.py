"""A rank that reads chats with images and writes down each step: ENDPOINT PROCESSOR FOLDER SECONDS_OF_A_STEP.

It is a program of ``tests.integration.forked``. A rank that is started again goes on from its last step. Each step is
one line of ``steps.jsonl``: its index, digest, chain and the checksums of its packs' pixels.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from awscrt.checksums import crc32c

import streampack


def prepare(arguments: list[str]) -> None:
    """Import what decodes images, before the fork."""
    _ = import_module("transformers").AutoImageProcessor


def main() -> int:
    """Read all steps that are left."""
    endpoint, processor, where, step_s = sys.argv[1:]
    folder = Path(where)
    state, part = folder / "state.json", folder / "state.part"
    media = streampack.Media(processor=processor, threads=4)
    with (
        (folder / "steps.jsonl").open("a") as lines,
        streampack.connect(endpoint, format="numpy", media=media, verify=True, timeout_s=300.0) as loader,
    ):
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text()))
        for step in loader.steps():
            pixels = [_checksum(pack["pixel_values"]) for pack in step]
            lines.write(json.dumps([step.index, step.digest, step.chain, pixels]) + "\n")
            lines.flush()
            part.write_text(json.dumps(loader.state_dict()))
            part.replace(state)
            time.sleep(float(step_s))
    return 0


def _checksum(pixels: Any) -> list[int]:
    """Return the number of rows of pixels and their checksum; empty for a pack without images."""
    return [] if pixels is None else [len(pixels), crc32c(pixels.tobytes())]
