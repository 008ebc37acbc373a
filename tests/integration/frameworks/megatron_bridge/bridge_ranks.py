"""Bridge's ``finetune`` on packs, with a tiny GPT: ``bridge_ranks.py FOLDER``, with STREAMPACK_ENDPOINT set.

One process imports Bridge and forks the runs: ``pretrain`` for one step, which makes the checkpoint that the others
begin with; ``finetune`` for 50 steps; the same, killed behind the line of step 25; and its rest, on this mesh and on
others. The last rank of a run prints a line of JSON for each step: ``step``, ``loss``, and the numbers of its
micro-batches. The last line of output says how each run ended.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from tests.docs.pages import BLOCKS
from tests.integration import forks
from tests.integration.frameworks.megatron_bridge import bridge_samples as samples
from tests.integration.frameworks.megatron_bridge import bridge_stand_ins as stand_ins

(PAGE,) = (
    block.code for block in BLOCKS if block.page == "docs/how-to/megatron-bridge.md" and block.language == "python"
)


def layers(config: Any = None, vp_stage: int | None = None) -> Any:
    """Megatron's own layers, with the stand-in's attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron_without_gpu import AttentionBySample  # type: ignore[import-not-found]

    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.self_attention.submodules.core_attention = AttentionBySample
    return spec


MESHES = {
    "dp2": (2, {}), "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2vp2": (2, {
        "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
        "batch_p2p_comm": False, "overlap_p2p_comm": False,
    }),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
}  # fmt: skip
"""Number of ranks, and the model's settings. Gloo mixes up batched messages of two chunks to the same rank."""


def recipe(save: Path, steps: int, base: Path | None, mesh: dict[str, int]) -> Any:
    """A recipe for a tiny GPT that saves every 10 steps, and goes on from what it has saved."""
    from megatron.bridge.data.builders import GPTSFTDatasetConfig
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as bridge

    off = dict.fromkeys(
        ("gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion",
         "persist_layer_norm", "bias_activation_fusion"), False,
    )  # fmt: skip
    return bridge.ConfigContainer(
        model=GPTModelProvider(
            num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, seq_length=samples.BUDGET,
            vocab_size=64, make_vocab_size_divisible_by=1, transformer_layer_spec=layers,
            hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float32, pipeline_dtype=torch.float32,
            **off, **mesh,
        ),
        train=bridge.TrainingConfig(train_iters=steps, global_batch_size=samples.PACKS, micro_batch_size=1),
        validation=bridge.ValidationConfig(eval_interval=1000, eval_iters=0),
        optimizer=bridge.OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-2, use_distributed_optimizer=False, bf16=False, fp16=False,
            clip_grad=0.0,
        ),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="constant", lr_warmup_iters=0, lr_decay_iters=1000, start_weight_decay=0.01,
            end_weight_decay=0.01, weight_decay_incr_style="constant",
        ),
        ddp=bridge.DistributedDataParallelConfig(
            use_distributed_optimizer=False, average_in_collective=False, overlap_grad_reduce=False,
            overlap_param_gather=False, check_for_nan_in_grad=False,
        ),
        dataset=GPTSFTDatasetConfig(seq_length=samples.BUDGET),
        logger=bridge.LoggerConfig(log_interval=10),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=63),
        checkpoint=bridge.CheckpointConfig(
            save=str(save), load=str(save), save_interval=10, ckpt_format="torch_dist", fully_parallel_save=False,
            pretrained_checkpoint=base and str(base),
        ),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo"),
        rng=bridge.RNGConfig(seed=1234),
    )  # fmt: skip


def train(save: Path, steps: int, base: Path | None, mesh: dict[str, int]) -> None:
    """Train in this process, and print a line for each step."""
    stand_ins.replace_cuda()
    from megatron.bridge.training.callbacks import Callback

    from streampack.integrations.megatron import bridge

    taken, micro_batch = list[int](), bridge.micro_batch

    def noted(pack: Any) -> Any:
        batch = micro_batch(pack)
        if batch["tokens"] is not None:  # a middle stage has none
            taken.append(samples.number_of(batch))
        return batch

    bridge.micro_batch = noted

    class Lines(Callback):
        def on_train_step_end(self, context: Any) -> None:
            if "lm loss" not in context.loss_dict:  # a pipeline stage before the last
                return
            loss = context.loss_dict["lm loss"].item()
            line = {"step": context.state.train_state.step, "loss": loss, "batches": list(taken)}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            taken.clear()

    code = PAGE if base else PAGE.replace("finetune", "pretrain")
    values = {"4096": str(samples.BUDGET), "128": str(samples.PACKS), "[callback]": "[callback, lines]"}
    for written, here in values.items():
        code = code.replace(written, here)
    exec(
        compile(code, "megatron-bridge.md", "exec"),
        {"recipe": lambda: recipe(save, steps, base, mesh), "lines": Lines()},
    )


def run(folder: Path, name: str, save: str, dies_at: int | None = None, ranks: int = 1, **mesh: int) -> int:
    """A run in processes of its own, whose last rank writes into the file of its name; how the last rank ended."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    told = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}

    def as_rank(rank: int) -> None:
        os.environ.update(told | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        output = folder / (f"{name}.txt" if rank == ranks - 1 else f"{name}-{rank}.txt")
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        if dies_at is not None:
            forks.die_at(dies_at)
        steps, base = (1, None) if name == "base" else (samples.STEPS, folder / "base")
        train(folder / save, steps, base, mesh)

    pids = [forks.forked(lambda rank=rank: as_rank(rank)) for rank in range(ranks)]  # type: ignore[misc]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids][-1]


def main(folder: Path) -> None:
    stand_ins.import_bridge()
    gc.freeze()
    ended = [run(folder, "base", "base"), run(folder, "whole", "whole"), run(folder, "killed", "cut", dies_at=25)]
    for name, (ranks, mesh) in MESHES.items():
        shutil.copytree(folder / "cut", folder / f"cut-{name}")
        ended.append(run(folder, name, f"cut-{name}", ranks=ranks, **mesh))
    ended.append(run(folder, "resumed", "cut"))
    print(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
