"""AutoModel's recipe ``train_ft`` in jobs of ``tests.integration.forks``: ``automodel_process.py CONFIG``.

It replaces what AutoModel has for CUDA alone: the device, and flash attention, which computes one sample after another.
torchao is absent: the recipe imports it for weights in FP8. The losses are those that AutoModel logs. ``samples`` is
AutoModel's own kind of dataset, over the file of rows that the environment names.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import Dataset

from tests.integration import forks
from tests.integration.frameworks.framework_runs import ROWS


class Absent(ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class WithoutTorchao(MetaPathFinder, Loader):
    """Finds all of torchao, as absent."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "torchao" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class OnProcessor(ModuleType):
    """``torch`` for a module that builds devices of CUDA."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: Any) -> torch.device:
        return torch.device("cpu")


def attention(q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = True, **_: Any) -> Any:
    """Causal attention of each row, [B, T, heads, D]."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    found = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return found.transpose(1, 2)


def attention_by_sample(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = True,
) -> Any:  # fmt: skip
    """Causal attention of each sample by itself, [T, heads, D]."""
    cuts = itertools.pairwise(cu_seqlens_q.tolist())
    parts = [attention(q[None, a:b], k[None, a:b], v[None, a:b], softmax_scale, causal)[0] for a, b in cuts]
    return torch.cat(parts)


class Samples(Dataset[Any]):
    """The rows of a file, in its order, as AutoModel's datasets return them: labels are shifted."""

    def __init__(self) -> None:
        lines = Path(os.environ[ROWS]).read_text().splitlines()
        self.rows = [json.loads(line)["tokens"] for line in lines]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        ids = self.rows[number]
        return {"input_ids": ids, "labels": [*ids[1:], -100], "attention_mask": [1] * len(ids)}


def replace() -> None:
    torch.set_num_threads(1)
    torch.cuda.reset_peak_memory_stats = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    sys.meta_path.append(WithoutTorchao())
    from nemo_automodel._transformers import auto_model, kernel_patches
    from transformers import PreTrainedModel
    from transformers import modeling_flash_attention_utils as flash

    PreTrainedModel._flash_attn_can_dispatch = lambda *_, **__: True
    auto_model.torch = OnProcessor("torch")
    kernel_patches.HAS_FA, kernel_patches.DEFAULT_ATTN_IMPLEMENTATION = True, "flash_attention_2"
    flash._lazy_imports = lambda *_, **__: (attention, attention_by_sample, None, flash._pad_input, flash._unpad_input)


def main() -> None:
    """``automodel CONFIG``, as under torchrun."""
    from nemo_automodel.cli import app
    from nemo_automodel.recipes.llm import train_ft

    log = train_ft.TrainFinetuneRecipeForNextTokenPrediction.log_train_metrics

    def with_line(recipe: Any, data: Any) -> None:
        log(recipe, data)
        if os.environ["RANK"] == "0":
            print()  # ends the line of the progress bar
            print(json.dumps({"step": data.step, "loss": data.metrics["loss"]}), flush=True)

    train_ft.TrainFinetuneRecipeForNextTokenPrediction.log_train_metrics = with_line
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # torchrun sets it
    sys.argv = ["automodel", sys.argv[1]]
    app.main()


def serve() -> None:
    """Run the jobs of this process's argument, each in a fork that has the imports."""
    replace()
    import nemo_automodel.recipes.llm.train_ft  # noqa: F401

    gc.freeze()
    forks.main()


if __name__ == "__main__":
    main() if sys.argv[1].endswith(".yaml") else serve()
