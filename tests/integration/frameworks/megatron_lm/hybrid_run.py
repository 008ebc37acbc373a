"""One rank of Megatron's schedule of hybrid context parallelism: import it after ``stand_ins.prepare``.

The schedule is Megatron's, and so are ranks, groups, forward and backward steps. The model is ``Tiny``, with ring
attention over the group that the batch names. The loop is the one of ``docs/how-to/dynamic-cp.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import cross_entropy

import streampack
from streampack.errors import UserError
from streampack.integrations.megatron.hybrid_cp import HybridSchedule
from streampack.views.view import View
from tests.docs.pages import BLOCKS
from tests.training.proofs.ring import ring_attention, zigzag
from tests.training.proofs.tiny import Tiny, found, within

PAGE = "docs/how-to/dynamic-cp.md"


class Model(Tiny):
    """``Tiny`` as Megatron's schedule calls it, with the arguments of ``GPTModel``."""

    model_type = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def set_input_tensor(self, tensor: Any) -> None:
        """Take the output of an earlier pipeline stage, of which there is none."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor,
        attention_mask: None, packed_seq_params: Any,
    ) -> torch.Tensor:  # fmt: skip
        packed = packed_seq_params
        attention, group = within(packed.cu_seqlens_q), packed.cp_group
        assert packed.local_cp_size == (1 if group is None else group.size())
        if group is not None:
            attention = ring_attention(group, zigzag(packed.cu_seqlens_q, group.rank(), group.size()))
        logits = super().forward(input_ids[0], position_ids[0], attention)
        return cross_entropy(logits, labels[0], reduction="none")[None]


def loss_of(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """The summed loss, its number of tokens, and the loss for the log."""
    loss = (losses * mask).sum()
    return loss, mask.sum().int(), loss.detach()


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("Megatron planned, or exchanged samples")


def configured(**changed: Any) -> Any:
    settings = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "calculate_per_token_loss": True,
        "hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 8, "deallocate_pipeline_outputs": False,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
    }  # fmt: skip
    return TransformerConfig(**settings | changed)


def refusals(config: Any) -> list[str]:
    """The first line of each refusal."""

    def message(call: Any) -> str:
        try:
            call()
        except UserError as error:
            return str(error)
        raise AssertionError("it was not refused")

    groups, parallel_state._HYBRID_DP_CP_GROUPS = parallel_state._HYBRID_DP_CP_GROUPS, {}
    messages = [message(lambda: HybridSchedule(config))]
    parallel_state._HYBRID_DP_CP_GROUPS = groups
    for name, value in {
        "hybrid_context_parallel": False, "calculate_per_token_loss": False, "pipeline_model_parallel_size": 2
    }.items():  # fmt: skip
        other = SimpleNamespace(**vars(config) | {name: value})
        messages.append(message(lambda other=other: HybridSchedule(other)))
    size, parallel_state.get_data_parallel_world_size = parallel_state.get_data_parallel_world_size, lambda **_: 12
    messages.append(message(lambda: HybridSchedule(config)))
    parallel_state.get_data_parallel_world_size = size
    ids = torch.zeros(8, dtype=torch.int64)
    rest: dict[str, Any] = {"layout": "zigzag", "pack": 0}
    schedule = HybridSchedule(config)
    steps: list[Any] = [
        [View({"input_ids": ids}, rest=rest | {"cp_ranks": (8, 4)})],
        [View({"input_ids": ids}, rest=rest | {"cp_ranks": None})],
        [View({"input_ids": ids[None]}, rest=rest | {"cp_ranks": (0, 8)})],
    ]
    return messages + [message(lambda step=step: schedule.data_iterator(step)) for step in steps]


def main() -> None:
    feed, tp, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, hybrid_context_parallel=True)
    for owner, name in (
        (HybridCPDataLoaderWrapper, "__next__"), (HybridCPDataLoaderWrapper, "reroute_samples_to_hdp_ranks"),
        (BalancedCPScheduler, "get_groups_and_subsamples"), (dist, "all_to_all_single"),
    ):  # fmt: skip
        setattr(owner, name, refused)
    seen: list[dict[str, Any]] = []
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)

    class Recorded(HybridSchedule):
        def data_iterator(self, step: Any) -> Any:
            seen.append({
                "plan": [(batch.pack, batch.cp_ranks) for batch in step], "calls": [], "expected": step.num_loss_tokens,
                "rows": [row for batch in step for row in (batch.row.tolist() if batch.cp_rank == 0 else ())],
            })  # fmt: skip
            return super().data_iterator(step)

        def get_batch(self, data_iterator: Iterator[dict[str, Any]] | None) -> dict[str, Any]:
            if data_iterator is not None:  # on the first tensor rank
                sample = next(data_iterator)
                seen[-1]["calls"].append((sample["batch"].pack, int(sample["local_cp_size"])))
                data_iterator = iter([sample])
            return super().get_batch(data_iterator)

    def finalize(models: Any, num_tokens: torch.Tensor, **_: Any) -> None:
        """Sum gradients and tokens over the ranks, as ``finalize_model_grads`` does."""
        dist.all_reduce(num_tokens, group=group)
        seen[-1]["tokens"] = int(num_tokens)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= num_tokens

    def recorded(**arguments: Any) -> Any:
        losses = get_forward_backward_func()(**arguments)
        loss = torch.stack(losses).sum()
        dist.all_reduce(loss, group=group)
        seen[-1]["found"] = found(model, loss.item() / seen[-1]["expected"])
        return losses

    config = configured()
    config.finalize_model_grads_func = finalize
    model = Model(config)
    (code,) = (block.code for block in BLOCKS if block.page == PAGE and "HybridSchedule(config)" in block.code)
    names: dict[str, Any] = {
        "HybridSchedule": Recorded, "get_forward_backward_func": lambda: recorded, "config": config, "model": model,
        "streampack": SimpleNamespace(connect=partial(streampack.connect, feed=feed, verify=True)), "partial": partial,
        "loss_of": loss_of, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
    }  # fmt: skip
    exec(compile(code, PAGE, "exec"), names)
    refused_with = refusals(config) if tp == 1 else []
    torch.save((seen, refused_with), folder / f"{feed}-{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()
