"""``pretrain`` as ``pretrain_gpt.py`` calls it, on packs: import it after ``stand_ins.prepare``."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, utils
from megatron.core.datasets import utils as datasets_utils
from megatron.core.enums import ModelType
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction
from megatron.training import get_args, pretrain, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils.common_utils import is_first_or_last_pipeline_stage

from streampack import integrations
from streampack.views.view import canonical
from tests.integration.frameworks.megatron_lm import stand_ins

try:
    import pretrain_gpt  # type: ignore[import-not-found]
except ModuleNotFoundError:
    pretrain_gpt = None

ARGUMENTS = """
--distributed-backend gloo --num-layers 4 --hidden-size 32 --num-attention-heads 4 --position-embedding-type rope
--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 4 --train-iters 20
--lr 1e-2 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0 --attention-dropout 0 --hidden-dropout 0
--dataloader-type external --calculate-per-token-loss --dataloader-inter-document-masking --eval-iters 0
--eval-interval 1000 --log-interval 1 --save-interval 4 --tokenizer-type NullTokenizer --vocab-size 256
--transformer-impl local --use-cpu-initialization --no-masked-softmax-fusion --no-bias-gelu-fusion --no-rope-fusion
--no-bias-dropout-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
--no-create-attention-mask-in-dataloader
"""


KEYS = (
    "attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels", "local_cp_size", "loss_mask",
    "max_seqlen", "position_ids", "tokens",
)  # fmt: skip
"""The keys of a batch of Megatron's."""


def forward_step(data_iterator: Any, model: Any) -> Any:
    """A forward step on packs, with the functions of ``megatron.core`` that ``pretrain_gpt.py`` calls."""
    args, stage, tp_rank = (
        get_args(),
        utils.get_attr_wrapped_model(model, "vp_stage"),
        mpu.get_tensor_model_parallel_rank(),
    )
    layout = core_transformer_config_from_args(args).pipeline_model_parallel_layout
    predicts = multi_token_prediction.mtp_on_this_rank(
        layout, args.mtp_num_layers, ignore_virtual=False, vp_stage=stage
    )
    batch = {} if tp_rank else next(data_iterator)
    for key in KEYS:
        batch.setdefault(key)
    batch = utils.get_batch_on_this_tp_rank(
        batch, has_cu_seqlens=True, is_hybrid_cp=False, create_attention_mask_in_dataloader=False,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(), cp_size=args.context_parallel_size,
        broadcast_group=mpu.get_tensor_model_parallel_group(), tp_rank=tp_rank, micro_batch_size=1,
        seq_length=args.seq_length, mtp_on_this_rank=predicts, is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )  # fmt: skip
    batch = utils.flatten_batch_for_packed_sequences(batch)
    if is_first_or_last_pipeline_stage(stage) or predicts:
        group = mpu.get_context_parallel_group()
        batch = utils.get_batch_on_this_cp_rank(batch, False, group, use_per_sequence_balancing=not args.sft)
    bounds, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"])
    packed = PackedSeqParams("thd", *[bounds] * 4, max_seqlen_q=longest, max_seqlen_kv=longest)
    taken = {name: batch[name] for name in ("position_ids", "attention_mask", "labels", "loss_mask")}
    losses = model(batch["tokens"], **taken, packed_seq_params=packed)
    return losses, partial(loss_of, batch["loss_mask"])


def loss_of(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """The summed loss, its number of tokens, and both for the log."""
    loss, tokens = (losses.view(-1) * mask.view(-1)).sum(), mask.sum()
    return loss, tokens.int(), {"lm loss": torch.stack([loss.detach(), tokens])}


class Digest:
    """A digest of the packs that the first model chunk has taken since the last call."""

    def __init__(self) -> None:
        self._digest, take = hashlib.sha256(), integrations.megatron.TrainIterator.take

        def noted(iterator: Any, chunk: int) -> Any:
            pack = take(iterator, chunk)
            if chunk == 0:
                for array in (canonical(pack).input_ids, canonical(pack).cu_seqlens):
                    self._digest.update(b"" if array is None else array.tobytes())
            return pack

        integrations.megatron.TrainIterator.take = noted

    def __call__(self) -> str:
        text, self._digest = self._digest.hexdigest()[:16], hashlib.sha256()
        return text


def main() -> None:
    sys.argv = ["pretrain_gpt.py", *ARGUMENTS.split(), *sys.argv[1:]]
    digest = Digest()
    args = parse_and_validate_args()
    args.params_dtype = torch.float64
    torch.set_default_dtype(torch.float64)
    LocalSpecProvider.core_attention = lambda *_: stand_ins.AttentionBySample
    multi_token_prediction.is_inference_column_parallel_linear = lambda *_: False  # of TransformerEngine
    datasets_utils.compile_helpers = lambda: None  # of datasets, which streampack replaces
    init, step = GPTModel.__init__, training.train_step

    def drawn(model: Any, *arguments: Any, **named: Any) -> None:
        init(model, *arguments, **named)
        stand_ins.draw_weights(model)

    def with_line(*arguments: Any, iteration: int, **named: Any) -> Any:
        result = step(*arguments, iteration=iteration, **named)
        if result[0] and mpu.get_tensor_model_parallel_rank() == mpu.get_context_parallel_rank() == 0:
            values = {"loss": float(result[0]["lm loss"]), "norm": float(result[5])}
            line = {"step": iteration, **values, "packs": digest()}
            print()  # ends a line of the log
            print(json.dumps(line), flush=True)
        return result

    GPTModel.__init__, training.train_step = drawn, with_line
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    step_of_theirs = forward_step if pretrain_gpt is None else pretrain_gpt.forward_step
    ranks = {} if pretrain_gpt is None else {"get_embedding_ranks": pretrain_gpt.get_embedding_ranks}
    training.set_startup_timestamps(program_start=time.time(), main_entry=time.time())
    provider = integrations.megatron.datasets_provider(get_args)
    pretrain(config, provider, ModelType.encoder_or_decoder, step_of_theirs, **ranks)
