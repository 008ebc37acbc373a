"""Ranks of a gloo group, as real processes: forked by one that has imported torch once, and ended with each other."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integration.running import PATIENCE_S

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.training.proofs.trainers", "torch._dynamo"])  # which DDP imports


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, dies: int | None = None) -> list[Any]:
    """What ``function(rank, *arguments)`` gives on each rank; nothing where rank ``dies`` is killed: the others are,
    too, as a launcher would.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = [
            _SERVER.Process(target=_rank, args=(rank, ranks, folder, function, arguments)) for rank in range(ranks)
        ]
        for process in running:
            process.start()
        left = list(running)
        try:
            while left and not any(process.exitcode for process in running):
                ended = wait([process.sentinel for process in left], PATIENCE_S)
                assert ended, f"nothing ended in {PATIENCE_S} s"
                left = [process for process in left if process.sentinel not in ended]
        finally:
            for process in left:
                process.kill()
            for process in running:
                process.join(PATIENCE_S)
        codes = [process.exitcode for process in running]
        if dies is not None:
            assert codes[dies] == -9, codes
            return []
        assert not any(codes), codes
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    torch.save(function(rank, *arguments), Path(folder, str(rank)))
    dist.barrier()
    dist.destroy_process_group()
