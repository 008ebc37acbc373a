"""One rank of Megatron, and the arguments of Megatron-LM that its integration reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from streampack import integrations
from tests.integration.running import RunningBroker


@pytest.fixture(scope="module", autouse=True)
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Megatron's parallel_state, of one rank."""
    with warnings.catch_warnings():  # without a GPU's libraries, it says so
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
    meeting = tmp_path_factory.mktemp("gloo") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield parallel_state
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def arguments(folder: Path | None = None, **changed: Any) -> SimpleNamespace:
    """Of Megatron-LM, those that are read."""
    args = {
        "dataloader_type": "external", "micro_batch_size": 1, "global_batch_size": 4, "seq_length": 128, "iteration": 0,
        "calculate_per_token_loss": True, "dataloader_inter_document_masking": True, "sft": False, "save": folder,
        "load": None, "eval_iters": 0, "eval_micro_batch_size": 1, "create_attention_mask_in_dataloader": False,
        "virtual_pipeline_model_parallel_size": None, "hybrid_context_parallel": False, "rampup_batch_size": None,
        "step_batch_size_schedule": None, "context_parallel_size": 1, "mtp_num_layers": None,
        "pipeline_model_parallel_layout": None,
    }  # fmt: skip
    return SimpleNamespace(**(args | changed))


def train_iterator(broker: RunningBroker, args: SimpleNamespace) -> Any:
    return integrations.megatron.datasets_provider(lambda: args, endpoint=broker.trainers)()[0]
