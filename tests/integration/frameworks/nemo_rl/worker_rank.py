"""One rank of NeMo-RL's own policy worker on the CPU: python worker_rank.py CHECKOUT RANK PORT OUT MODE=ENDPOINT ...

With ``dies_at=STEP`` as the first mode, the rank runs the loop of docs/how-to/rl-frameworks.md instead. It goes on from
the worker's last checkpoint, and kills itself after that step; -1: it runs to the end.

Stand-ins take the place of CUDA, NCCL, Ray's placement and flash-attn; modules that only other workers need are empty.
torch.float32 stands for float64, since the worker casts to it. For each mode, the worker trains 20 steps on
streampack's micro-batches, then on those of ``Policy._shard_for_train`` and ``_shard_for_logprob``. Rank 0 also
computes every step in one process, one sample at a time.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import itertools
import json
import os
import signal
import sys
import types
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

import streampack
from tests.docs.pages import BLOCKS
from tests.integration.frameworks.nemo_rl import rollouts
from tests.integration.frameworks.nemo_rl.rollouts import DP

ABSENT = {
    name
    for name in ("fastapi", "uvicorn", "vllm", "pynvml", "hydra", "mlflow", "swanlab", "wandb", "transformer_engine")
    if find_spec(name) is None
}


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules that are not installed and that this worker does not use."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return (
            importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            if fullname.split(".")[0] in ABSENT
            else None
        )

    def create_module(self, spec: Any) -> Any:
        class Empty(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return {"get_class": class_of}.get(name) or MagicMock(name=name)

        return Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


def class_of(path: str) -> Any:
    """Return a class by its path, as ``hydra.utils.get_class`` does."""
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*("cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in args), **kwargs)


def worker_class(checkout: str) -> Any:
    """Import the worker with its stand-ins."""
    sys.path.insert(0, checkout)
    sys.meta_path.append(Absent())
    import ray
    import transformers

    transformers.__version__ = min(transformers.__version__, "5.11.0", key=lambda v: [int(n) for n in v.split(".")[:2]])
    from nemo_rl.models.policy.workers import dtensor_policy_worker as module

    ray.get_gpu_ids = lambda: [0]
    begin, mesh = torch.distributed.init_process_group, torch.distributed.device_mesh.init_device_mesh

    def on_gloo(backend: str) -> None:
        begin("gloo")

    torch.distributed.init_process_group = on_gloo  # type: ignore[assignment]
    torch.distributed.device_mesh.init_device_mesh = lambda _, *args, **kwargs: mesh("cpu", *args, **kwargs)
    torch.cuda.get_device_name = lambda *_: "cpu"
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_: None)
    config = module.AutoConfig.from_pretrained

    def without_flash(*args: Any, attn_implementation: Any = None, **kwargs: Any) -> Any:
        return config(*args, attn_implementation="sdpa", **kwargs)

    module.AutoConfig = SimpleNamespace(from_pretrained=without_flash)
    module.DTensorPolicyWorker = module.DTensorPolicyWorkerImpl  # Ray's actor class
    module.bind_to_gpu_numa = lambda *_: None
    return module.DTensorPolicyWorkerImpl


def alone(steps: list[list[int]], loss_fn: Any, prepare: Any) -> list[float]:
    """Return the losses of one process that computes one sample at a time, by NeMo-RL's loss."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    model, losses = rollouts.model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rollouts.LR)
    for numbers in steps:
        rows = [BatchedDataDict(rollouts.batch_of([number])) for number in numbers]
        total, count = (
            sum(row["token_mask"][:, 1:].sum() for row in rows),
            torch.tensor(float(len(rows)), dtype=torch.float),
        )
        loss = torch.zeros(())
        for row in rows:
            logits = model(input_ids=row["input_ids"]).logits
            row["prev_logprobs"] = torch.zeros_like(row["advantages"])
            log_probs = logits.detach().log_softmax(-1)[:, :-1].gather(-1, row["input_ids"][:, 1:, None])
            row["prev_logprobs"][:, 1:] = log_probs[..., 0]
            arguments, row = prepare(logits, row, loss_fn)
            one, _ = loss_fn(data=row, global_valid_seqs=count, global_valid_toks=total, **arguments)
            one.backward()
            loss += one.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


class AllSteps(Exception):
    """The loop has done all steps."""


def train_as_the_page(worker: Any, loss_fn: Any, out: str, rank: int, dies_at: int, mode: str, endpoint: str) -> None:
    """Run the page's loop; write a line (step, loss) for each step, and a checkpoint after each fourth."""
    [code] = [block.code for block in BLOCKS if "def train_on_stream(" in block.code]
    names: dict[str, Any] = {}
    exec(compile(code, "rl-frameworks.md", "exec"), names)
    worker.cfg |= rollouts.batching(mode)
    worker.enable_seq_packing = worker.cfg["sequence_packing"]["enabled"]
    at, resume = Path(f"{out}.{mode}.state.json"), None
    if at.exists():
        step, resume = json.loads(at.read_text())
        worker.load_checkpoint(f"{out}.{mode}.weights.{step}", f"{out}.{mode}.optimizer.{step}")

    def save(step: int, state: Any, metrics: Any) -> None:
        if rank == 0:
            with open(f"{out}.{mode}.lines", "a") as lines:
                lines.write(json.dumps([step, metrics["global_loss"].item() / DP]) + "\n")
        if step % 4 == 3:
            worker.save_checkpoint(f"{out}.{mode}.weights.{step}", f"{out}.{mode}.optimizer.{step}")
            if rank == 0:
                at.write_text(json.dumps([step, state]))
        torch.distributed.barrier()
        if step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step + 1 == rollouts.STEPS:
            raise AllSteps

    more = rollouts.ROUND[mode]
    with contextlib.suppress(AllSteps):
        names["train_on_stream"](worker, loss_fn, endpoint, rollouts.FORWARD_BUDGET, save, resume, **more)


def main(checkout: str, rank: str, port: str, out: str, *modes: str) -> None:
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": str(DP),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    worker_type = worker_class(checkout)
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn, prepare_loss_input
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.policy.lm_policy import Policy

    from streampack.integrations import nemo_rl as adapter

    torch.float32 = torch.float64
    torch.set_default_dtype(torch.float64)
    path = f"{out}.model{rank}"
    rollouts.model().save_pretrained(path)
    config = rollouts.policy_config(path)
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=rollouts.KL))
    with OnCpu():
        tokenizer = SimpleNamespace(eos_token_id=0, pad_token_id=0)
        worker = worker_type(config, tokenizer, init_reference_model=False)
        if modes[0].startswith("dies_at="):
            dies_at = int(modes[0].removeprefix("dies_at="))
            for each in modes[1:]:
                train_as_the_page(worker, loss_fn, out, int(rank), dies_at, *each.split("=", 1))
            return
        start = {name: value.clone() for name, value in worker.model.state_dict().items()}
        shapes: list[list[int]] = []  # of the model's inputs
        worker.model.register_forward_pre_hook(
            lambda _, args, kwargs: shapes.append([*kwargs["input_ids"].shape]), with_kwargs=True
        )

        def taken(batch: Any) -> list[Any]:
            """Return the micro-batches of a rank, once the worker has computed them."""
            found = rollouts.micro_batches(
                batch["input_lengths"], batch.micro_batch_indices[0], batch.micro_batch_lengths[0], mode
            )
            assert len(found) <= len(shapes), "NeMo-RL repeats micro-batches if other ranks have more"
            if mode == "padded":
                assert found == shapes
            shapes.clear()
            return found

        results: dict[str, Any] = {}
        for mode, endpoint in (each.split("=", 1) for each in modes):
            worker.cfg |= rollouts.batching(mode)
            worker.enable_seq_packing = worker.cfg["sequence_packing"]["enabled"]
            mesh = {"dp": DP, "dp_rank": int(rank)}
            with streampack.connect(endpoint, mesh=mesh, format="numpy", verify=True) as loader:
                steps = list(itertools.islice(loader.steps(), rollouts.STEPS))
            driver = SimpleNamespace(
                data_parallel_size=DP, cfg=worker.cfg, use_dynamic_batches=mode == "padded",
                use_sequence_packing=mode == "packs", dynamic_batching_args=rollouts.DYNAMIC,
                sequence_packing_args=rollouts.PACKING,
            )  # fmt: skip
            of_steps: list[list[int]] = []
            for source in ("ours", "theirs"):
                worker.model.load_state_dict(start)
                found: dict[str, list[Any]] = {"losses": [], "logprobs": [], "train": [], "logprobs_sum": []}
                for step in steps:
                    numbers: list[Any] = [None] * DP
                    mine = [
                        (int(i), int(n)) for p in step for i, n in zip(p.sample_ids[:, 1], p["number"], strict=True)
                    ]
                    torch.distributed.all_gather_object(numbers, mine)
                    of_step = [number for _, number in sorted(itertools.chain(*numbers))]  # in the stream's order
                    whole = BatchedDataDict(rollouts.batch_of(of_step))
                    of_steps += [of_step] if source == "ours" else []
                    shapes.clear()
                    if source == "ours":
                        forward = adapter.shard(
                            step.regroup(rollouts.FORWARD_BUDGET, **rollouts.ROUND[mode]), step.rules
                        )
                        logprobs = worker.get_logprobs(forward)["logprobs"]
                        found["logprobs"].append(taken(forward))
                        batch = adapter.shard(step, step.rules, prev_logprobs=logprobs)
                    else:
                        shards, order = Policy._shard_for_logprob(driver, whole)
                        parts: list[Any] = [None] * DP
                        own = worker.get_logprobs(shards[int(rank)])
                        found["logprobs"].append(taken(shards[int(rank)]))
                        torch.distributed.all_gather_object(parts, own)
                        joined = BatchedDataDict.from_batches(parts)
                        joined.reorder_data(order)
                        logprobs = joined["logprobs"]
                        whole["prev_logprobs"] = logprobs
                        batch = Policy._shard_for_train(driver, whole, whole.size)[int(rank)]
                    result = worker.train(batch, loss_fn, gbs=step.num_samples, mbs=1)
                    found["train"].append(taken(batch))
                    found["losses"].append(result["global_loss"].item() / DP)  # it has multiplied them by DP
                    total = logprobs.sum() if source == "ours" else logprobs.sum() / DP
                    torch.distributed.all_reduce(total)
                    found["logprobs_sum"].append(total.item())
                results[f"{mode} {source}"] = found
            if rank == "0":
                results[f"{mode} numbers"] = of_steps
                results[f"{mode} alone"] = alone(of_steps, loss_fn, prepare_loss_input)
        with open(f"{out}.{rank}.json", "w") as file:
            json.dump(results, file)
    torch.distributed.barrier()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
