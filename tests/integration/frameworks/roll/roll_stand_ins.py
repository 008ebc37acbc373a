"""ROLL's actor worker with its Megatron strategy on a processor without a GPU.

Import this module first. The worker, the strategy, its micro-batches, the schedule, DDP and the optimizer of
Megatron-Core, and the loss are those of ROLL and Megatron. Stand-ins: packages that only other parts of ROLL use, calls
of CUDA, moves of states to and from a GPU, and the model, which is a tiny Llama of Hugging Face in float64 in place of
one of Megatron's. Ray does not start.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.integration.frameworks.roll import roll_samples as samples

ABSENT = ("transfer_queue", "more_itertools", "opentelemetry.exporter", "pybase64", "modelscope", "mooncake")
NOTHING: dict[str, Any] = {
    "device_count": 0, "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
    "mem_get_info": (0, 1), "device_memory_used": 0, "current_device": "cpu", "empty_cache": None,
}  # fmt: skip


class Absent(MetaPathFinder, Loader):
    """Modules that are not installed, in place of which an object stands that takes any call."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if any(name == absent or name.startswith(absent + ".") for absent in ABSENT):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        stands_in: ModuleType = module
        return stands_in

    def exec_module(self, module: ModuleType) -> None:
        pass


class OnProcessor(TorchFunctionMode):
    """Create on the CPU every tensor that the code asks for on a GPU, and keep float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0].clone()  # what follows writes into it
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def prepare(checkout: str) -> None:
    """Make ROLL's modules of a checkout importable, and put the stand-ins in place."""
    sys.path[:0] = [checkout, f"{checkout}/mcore_adapter/src"]
    sys.meta_path.insert(0, Absent())
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    OnProcessor().__enter__()  # type: ignore[no-untyped-call]
    logging.disable(logging.WARNING)
    from megatron.core.optimizer import optimizer
    from roll.distributed.strategy import megatron_strategy
    from roll.platforms import current_platform

    for name, value in NOTHING.items():
        setattr(type(current_platform), name, staticmethod(lambda *_, value=value, **__: value))
    optimizer.clip_grad_by_total_norm_fp32 = lambda *_, **__: None  # the norm is below the limit
    arguments = megatron_strategy.TrainingArguments  # transformers 5 has some of them no more
    names = {field.name for field in dataclasses.fields(arguments)}
    megatron_strategy.TrainingArguments = lambda **given: arguments(
        **{name: value for name, value in given.items() if name in names and value is not None}
    )
    megatron_strategy.default_tokenizer_provider = megatron_strategy.default_processor_provider = lambda **_: None


class Models(list[Any]):
    """The chunks of a model, as ``VirtualModels`` of mcore_adapter holds them."""

    def __init__(self, chunk: Any) -> None:
        super().__init__()
        self.models, self.config = [chunk], chunk.config

    def get_models(self) -> list[Any]:
        return self.models

    def train(self) -> None:
        self.models[0].train()

    def eval(self) -> None:
        self.models[0].eval()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)


def chunk(shapes: list[Any]) -> Any:
    """The tiny model as a chunk of Megatron's, which notes the shape of each micro-batch in ``shapes``."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer import MegatronModule, TransformerConfig

    class Chunk(MegatronModule):
        def __init__(self) -> None:
            sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
            super().__init__(TransformerConfig(use_cpu_initialization=True, params_dtype=torch.float64, **sizes))
            self.llama, self.model_type = samples.model(), ModelType.encoder_or_decoder

        def set_input_tensor(self, tensor: Any) -> None:
            pass

        def get_batch_on_this_cp_rank(self, batch: Any, **_: Any) -> Any:
            return batch

        def forward(
            self, input_ids: Any, attention_mask: Any = None, packed_seq_params: Any = None, **_: Any
        ) -> torch.Tensor:
            shapes.append(list(input_ids.shape))
            positions = None
            if packed_seq_params is not None:
                cuts, places = packed_seq_params.cu_seqlens_q, torch.arange(input_ids.shape[1])
                segment = torch.bucketize(places, cuts, right=True)
                attention_mask = (segment[:, None] == segment) & (places[:, None] >= places)
                attention_mask, positions = attention_mask[None, None], (places - cuts[segment - 1])[None]
            logits: torch.Tensor = self.llama(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
            ).logits
            return logits

    return Chunk()


def actor(shapes: list[Any], padded: bool) -> Any:
    """ROLL's actor worker, whose strategy is initialized; the process group exists."""
    from roll.configs.training_args import TrainingArguments
    from roll.configs.worker_config import SequencePackingConfig, StrategyArguments, WorkerConfig
    from roll.distributed.executor.worker import RankInfo
    from roll.distributed.strategy.megatron_strategy import MegatronTrainStrategy
    from roll.pipeline.base_worker import ActorWorker

    worker = ActorWorker.__new__(ActorWorker)  # its __init__ asks Ray for the address of rank 0
    ranks = dist.get_world_size()
    worker.rank_info = RankInfo(world_size=ranks, rank=dist.get_rank())
    worker.worker_name, worker.cluster_name = "actor", "actor_train"
    worker._logger, worker._logprobs_cache = None, {}
    worker.pipeline_config = SimpleNamespace(
        sequence_length=samples.SEQUENCE, max_grad_norm=1e6, seed=0, ppo_epochs=1, use_pg_clip_range=False,
        pg_clip=0.2, dual_clip_loss=False, loss_agg_mode="seq-mean-token-mean", use_kl_loss=True,
        kl_loss_coef=samples.KL, entropy_loss_coef=0, enable_old_logprobs_recompute=True,
    )  # fmt: skip
    worker.worker_config = WorkerConfig(
        name="actor_train", infer_batch_size=4,
        training_args=TrainingArguments(
            output_dir=os.devnull, per_device_train_batch_size=1, learning_rate=1e-2, max_steps=1000,
            gradient_accumulation_steps=samples.SAMPLES // ranks, lr_scheduler_type="constant",
        ),
        strategy_args=StrategyArguments("megatron_train", {"bf16": False, "use_distributed_optimizer": False}),
        use_dynamic_batching_in_train=padded, max_tokens_per_microbatch_in_train=samples.TRAIN_TOKENS,
        sequence_length_round_in_train=samples.TRAIN_ROUND, use_dynamic_batching_in_infer=padded,
        max_tokens_per_microbatch_in_infer=samples.INFER_TOKENS, sequence_length_round_in_infer=samples.INFER_ROUND,
        use_sequence_packing=not padded,
        sequence_packing_args=SequencePackingConfig(
            algorithm="load_balance", max_packed_sequence_length_train=samples.TRAIN_TOKENS,
            max_packed_sequence_length_forward=samples.INFER_TOKENS,
        ),
    )  # fmt: skip
    strategy = MegatronTrainStrategy(worker)
    strategy.initialize(lambda **_: Models(chunk(shapes)))
    strategy.load_states = strategy.offload_states = lambda *_, **__: None
    worker.strategy = strategy
    return worker
