"""``accelerate launch ARGUMENTS``, with ranks that are forks: a program of ``tests.integration.forked``.

The last three arguments are a script of ``examples/``, its folder and its number of steps. With DIES_AT, a rank is
killed behind the line of that step. Beside the start of processes, one thing is replaced, for FSDP alone: accelerate
shards models on accelerators only, and would train with DDP on a processor, without a word.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from tests.integration.forks import die_at, import_what_it_does


def prepare(arguments: list[str]) -> None:
    import_what_it_does(arguments[-3])


def main() -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed import run

    config_from_args = run.config_from_args

    def as_forks(args: Any) -> tuple[Any, Any, list[str]]:
        config, _, words = config_from_args(args)
        config.start_method = "fork"
        return config, as_rank, words

    run.config_from_args = as_forks
    launch_command(launch_command_parser().parse_args(sys.argv[1:]))


def as_rank(*words: str) -> None:
    """Run ``python -u SCRIPT ARGUMENTS`` in this process."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        shard_on_a_processor()
    if "DIES_AT" in os.environ:
        die_at(int(os.environ["DIES_AT"]))
    sys.argv = list(words[words.index("-u") + 1 :])
    runpy.run_path(sys.argv[0], run_name="__main__")


def shard_on_a_processor() -> None:
    """Have accelerate take gloo on the CPU for the backend of a GPU."""
    import torch
    from accelerate.state import DistributedType, PartialState

    def prepare_backend(self: Any, *_: Any) -> tuple[str, Any]:
        torch.distributed.init_process_group("gloo")
        return "gloo", DistributedType.MULTI_GPU

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    PartialState._prepare_backend, PartialState.set_device = prepare_backend, set_device
