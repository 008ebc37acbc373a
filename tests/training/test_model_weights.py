"""``ModelFlops`` counts the matrices that the models of transformers have."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from streampack.core.flops.model_flops import ModelFlops
from streampack.core.flops.model_layers import MODEL_TYPES, layers_of


@pytest.mark.parametrize("kind", sorted(MODEL_TYPES))
def test_a_token_costs_6_flops_for_each_weight_that_it_passes(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    config.num_hidden_layers = 6
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:6]
    layers = layers_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = layers.hidden * layers.vocabulary
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not any(part in name for part in ("embed_", "lm_head")):
            active = config.num_experts_per_tok / layers.experts if ".experts." in name else 1.0
            weights += round(weight.numel() * active)
    heads = layers.linear_heads
    state = 0 if heads is None else 7 * layers.linear * heads.value * heads.key_dim * heads.value_dim
    assert ModelFlops.of(config).token == pytest.approx(6 * weights + 3 * state, rel=1e-3)
