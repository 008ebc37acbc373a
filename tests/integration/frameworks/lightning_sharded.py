"""``examples/lightning_module.py`` with a strategy that shards the model: ``lightning_sharded.py FOLDER STEPS``.

The folder's name is the strategy. Lightning's FSDP takes GPUs alone. A subclass passes its check, and torch is told
that the CPU is the device. ModelParallelStrategy needs no stand-in.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from lightning import pytorch
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard

from streampack.integrations.lightning import PackedDataModule

__all__ = ["PackedDataModule"]  # imported before the ranks are forked


class OnProcessors(FSDPStrategy):
    """Lightning's strategy, under a name that its check of GPUs does not know."""


class Doubles(FSDPPrecision):
    """Leaves parameters in float64; Lightning knows no name for that."""

    def convert_module(self, module: Any) -> Any:
        return module


def shard(self: Any) -> None:
    """Shard the example's model with FSDP2, as ``configure_model`` of a user does."""
    fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


ranks, folder = int(os.environ["WORLD_SIZE"]), sys.argv[1]
if Path(folder).name == "fsdp":
    init = FullyShardedDataParallel.__init__
    FullyShardedDataParallel.__init__ = lambda self, *args, **given: init(  # type: ignore[method-assign]
        self, *args, **{**given, "device_id": torch.device("cpu")}
    )
    doubles = MixedPrecision(torch.float64, torch.float64, torch.float64)
    strategy: Any = OnProcessors(state_dict_type="sharded", mixed_precision=doubles)
    plugins = [Doubles("32-true")]
else:
    plugins = []
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)


class Sharding(pytorch.Trainer):
    def __init__(self, **given: Any) -> None:
        super().__init__(strategy=strategy, plugins=plugins, **given)

    def fit(self, model: Any, **given: Any) -> None:
        if isinstance(strategy, ModelParallelStrategy):
            type(model).configure_model = shard
        super().fit(model, **given)


pytorch.Trainer = Sharding
runpy.run_path(str(Path(__file__).parents[3] / "examples" / "lightning_module.py"))
