"""``examples/torchtitan_trainer.py`` in float64, so that losses of one rank and of two can be compared to 1e-6.

Its last line has the error with which torchtitan refuses context parallelism for this attention, before any step.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torchtitan_without_gpu  # type: ignore[import-not-found] # noqa: F401

# isort: split
import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.context_parallel.api import apply_cp_to_forward
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.trainer import Trainer

from streampack.integrations.torchtitan import StreampackDataLoader

__all__ = ["StreampackDataLoader", "Trainer"]  # imported before the ranks are forked

TORCH_DTYPE_MAP.update(dict.fromkeys(TORCH_DTYPE_MAP, torch.float64))
runpy.run_path(str(Path(__file__).parents[3] / "examples" / "torchtitan_trainer.py"))
try:
    apply_cp_to_forward([VarlenAttention(VarlenAttention.Config())], None)
except NotImplementedError as error:
    if os.environ.get("RANK") == "0":
        print(json.dumps({"step": int(sys.argv[2]), "error": str(error)}), flush=True)
