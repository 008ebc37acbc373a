"""One rank under fire: it attaches, uses steps, writes down what it got, and checkpoints; then it may be killed.

``python -m tests.soak.trainer SETTINGS``, SETTINGS being a JSON file: ``endpoint``, ``mesh``, ``folder``, ``rank``,
``ranks``, ``relay`` (an address, or ``off``), ``reports``, ``media``, ``every`` (steps between two checkpoints),
``step_s``, ``resume`` (a checkpoint's step, -1 for none, -2 for this rank's own last place). What it got goes to
``trainer-<rank>.jsonl``, one line a step and each written at once, so that a line is there whole or not at all. A step
takes ``step_s`` while the file ``fire`` is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import streampack
from streampack.errors import StreampackError
from tests.soak import sample_media
from tests.soak.checksum import crc_of
from tests.soak.values import loss_of

PATHS = ("shared", "cu_paths", "path_index")
ARRAYS = ("input_ids", "labels", "position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded", "sample_ids")
VALUES = ("number", "reward")
NAMES = (*ARRAYS, *PATHS, *VALUES, *sample_media.ARRAYS)
OWN_PLACE = -2


class Rank:
    """The files of one rank."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.rank: int = settings["rank"]
        self.folder = Path(settings["folder"])
        self._out = os.open(self.folder / f"trainer-{self.rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, **line: Any) -> None:
        os.write(self._out, (json.dumps({"pid": os.getpid(), "at": time.monotonic(), **line}) + "\n").encode())

    def checkpoint(self, step: int, rank: int | None = None) -> Path:
        return self.folder / f"checkpoint-{step}-{self.rank if rank is None else rank}.json"

    @property
    def own_place(self) -> Path:
        return self.folder / f"place-{self.rank}.json"

    def saved(self) -> dict[str, Any] | None:
        """The state that it goes on from."""
        resume = self.settings["resume"]
        path = self.own_place if resume == OWN_PLACE else self.checkpoint(resume)
        return json.loads(path.read_text()) if path.exists() else None

    def save(self, path: Path, state: dict[str, Any]) -> None:
        part = path.with_suffix(".part")
        with part.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def all_saved(self, step: int) -> bool:
        return all(self.checkpoint(step, rank).exists() for rank in range(self.settings["ranks"]))


def train(rank: Rank) -> None:
    settings = rank.settings
    os.environ["STREAMPACK_RELAY"] = settings["relay"]
    state = rank.saved()
    with streampack.connect(
        settings["endpoint"],
        mesh=settings["mesh"],
        format="numpy",
        prefetch=settings["prefetch"],
        verify=True,
        timeout_s=300.0,
        media=streampack.Media(sample_media.decode, threads=2) if settings["media"] else None,
    ) as loader:
        begun = 0
        if state is not None and state["loader"] is not None:
            loader.load_state_dict(state["loader"])
        if state is not None:
            begun = state["next_step"]
        rank.write(kind="begin", resume=begun)
        committed = -1
        for step in loader.steps():
            reported = {} if not settings["reports"] else {"loss": [loss_of(*row) for row in step.sample_ids.tolist()]}
            packs = [
                {"pack": pack.pack, "micro_batch": pack.micro_batch, "ids": pack.sample_ids.tolist(),
                 "crcs": {name: crc_of(pack[name]) for name in NAMES if name in pack}
                 | {"positions": crc_of(pack.positions())},
                 "numbers": pack["number"].tolist() if "number" in pack else []}
                for pack in step
            ]  # fmt: skip
            rank.write(
                kind="step", index=step.index, digest=step.digest, chain=step.chain, loss=step.num_loss_tokens,
                samples=step.num_samples, packs=packs,
            )  # fmt: skip
            if step.index < begun:
                continue  # it was trained before the checkpoint
            if (rank.folder / "fire").exists():
                time.sleep(settings["step_s"])
            if reported:
                step.report(reported, reduce="same")
            here = {"next_step": step.index + 1, "loader": _state_of(loader)}
            rank.save(rank.own_place, here)
            if (step.index + 1) % settings["every"] == 0:
                rank.save(rank.checkpoint(step.index), here)
                newest = max(
                    filter(rank.all_saved, range(settings["every"] - 1, step.index + 1, settings["every"])), default=-1
                )
                if newest > committed and hasattr(loader, "commit"):
                    loader.commit(newest)
                    committed = newest
        rank.write(kind="end")


def _state_of(loader: Any) -> Any:
    return loader.state_dict() if hasattr(loader, "state_dict") else None


def main() -> None:
    rank = Rank(json.loads(Path(sys.argv[1]).read_text()))
    try:
        train(rank)
    except StreampackError as error:
        rank.write(kind="error", type=type(error).__name__, text=str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
