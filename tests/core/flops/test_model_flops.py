"""Useful FLOPs of models and samples, against counts by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streampack.core.flops.model_flops import ModelFlops, pairs
from streampack.core.flops.model_layers import layers_of
from streampack.core.model.keys.planning_keys import Balance
from streampack.errors import UserError
from streampack.planning import plan_step

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 128256}
LLAMA |= {"num_key_value_heads": 8, "intermediate_size": 14336, "num_hidden_layers": 32}
"""Llama-3.1-8B."""
DENSE = {**LLAMA, "num_key_value_heads": None, "vocab_size": 32000, "intermediate_size": 11008}
"""Llama-2-7B: as many key heads as query heads."""
_FIVE_AND_ONE = ["sliding_attention"] * 5 + ["full_attention"]
GEMMA = {"model_type": "gemma3_text", "hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4}
GEMMA |= {"head_dim": 256, "intermediate_size": 10240, "num_hidden_layers": 34, "vocab_size": 262208}
GEMMA |= {"sliding_window": 1024, "layer_types": (_FIVE_AND_ONE * 6)[:34]}
"""Gemma-3-4B."""
MOE = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}
MOE |= {"head_dim": 128, "num_hidden_layers": 48, "vocab_size": 151936, "num_experts": 128, "intermediate_size": 6144}
MOE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Qwen3-30B-A3B."""
HYBRID = {"model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2}
HYBRID |= {
    "head_dim": 256,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
HYBRID |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 5120}
HYBRID |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12, "linear_conv_kernel_dim": 4}
HYBRID |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
HYBRID |= {"linear_num_value_heads": 32}
"""Qwen3-Next-80B-A3B: three of four layers have linear attention."""

# Samples of 8,192 and 100 tokens: 8,292 tokens. 8,192 * 8,193 / 2 + 100 * 101 / 2 = 33,563,578 pairs in full layers.
# In windows: 1,024 * 1,025 / 2 + 7,168 * 1,024 + 5,050 = 7,869,882 pairs. By token in the forward pass:
BY_HAND = {
    # 32 layers of 4 matrices 4096 x 4096 and 3 of 4096 x 11008; a head of 4096 x 32000. A pair: 4 * 4096, 32 layers.
    "dense": (DENSE, 2 * (32 * (67_108_864 + 135_266_304) + 131_072_000) * 8_292 + 524_288 * 33_563_578),
    # As above, but with two matrices of 4096 x 1024, three of 4096 x 14336, and a head of 4096 x 128256.
    "GQA": (LLAMA, 2 * (32 * (41_943_040 + 176_160_768) + 525_336_576) * 8_292 + 524_288 * 33_563_578),
    # 34 layers of 2 matrices 2560 x 2048, 2 of 2560 x 1024 and 3 of 2560 x 10240; a head of 2560 x 262208. A pair:
    # 4 * 2048, in 5 full layers and 29 with a window.
    "sliding window": (
        GEMMA,
        2 * (34 * (15_728_640 + 78_643_200) + 671_252_480) * 8_292 + 8_192 * (5 * 33_563_578 + 29 * 7_869_882),
    ),
    # 48 layers of 2 matrices 2048 x 4096, 2 of 2048 x 512, a router of 2048 x 128, and 8 experts with 3 of 2048 x 768.
    "MoE": (
        MOE,
        2 * (48 * (18_874_368 + 262_144 + 37_748_736) + 311_164_928) * 8_292 + 48 * 16_384 * 33_563_578,
    ),
    # 12 full layers: the query and its gate 2048 x 8192, keys and values 2048 x 1024, the output 4096 x 2048. 36 linear
    # layers: 2048 x (2 * 2048 + 2 * 4096 + 64) and 4096 x 2048, a convolution of 4 x 8192, and 7 FLOPs for each of the
    # 32 * 128 * 128 numbers of the state. All 48: a router of 2048 x 512, 11 experts of 3 * 2048 x 512, a gate of 2048.
    "linear attention": (
        HYBRID,
        (
            2 * (12 * 27_262_976 + 36 * (25_296_896 + 8_388_608 + 32_768) + 48 * (1_048_576 + 34_603_008 + 2_048))
            + 2 * 311_164_928 + 36 * 7 * 524_288
        ) * 8_292 + 12 * 16_384 * 33_563_578,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_flops_are_those_of_a_count_by_hand(name: str) -> None:
    config, forward = BY_HAND[name]
    assert ModelFlops.of(config).samples(np.array([8192, 100])) == pytest.approx(3 * forward, rel=1e-9)


@given(st.lists(st.integers(0, 90), max_size=9), st.integers(0, 100))
def test_pairs_are_the_tokens_that_each_token_sees(lengths: list[int], window: int) -> None:
    seen = [sum(min(at, window) if window else at for at in range(1, length + 1)) for length in lengths]
    assert pairs(np.array(lengths, np.int64), window).tolist() == seen


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 50))
def test_a_sample_costs_as_much_as_its_begin_and_the_tokens_that_share_it(begin: int, own: int, window: int) -> None:
    model = ModelFlops(token=7, pair=5, window_pair=3, window=window)
    parts = model.samples(np.array([begin])) + model.samples(np.array([own]), np.array([begin]))
    assert parts == model.samples(np.array([begin + own]))


@given(st.integers(1, 10**12), st.integers(0, 10**8), st.integers(0, 10**8), st.integers(1, 4096))
def test_the_factors_of_balance_are_within_the_bounds_of_the_keys(t: int, pair: int, sliding: int, window: int) -> None:
    keys = ModelFlops(token=t, pair=pair, window_pair=sliding, window=window).balance()
    assert keys["b"] < 4096
    assert keys.get("sliding", [0, 0])[1] < 4096


@pytest.mark.parametrize("name", BY_HAND)
@given(own=st.integers(1, 2**17), depth=st.integers(0, 2**17))
def test_the_cost_of_balance_is_proportional_to_the_flops(name: str, own: int, depth: int) -> None:
    model = ModelFlops.of(BY_HAND[name][0])
    balance = Balance(**model.balance())
    unit = model.samples(np.array([4096])) / int(balance.costs(np.array([4096]))[0])
    cost = int(balance.costs(np.array([own]), np.array([depth]))[0])
    assert cost * unit == pytest.approx(model.samples(np.array([own]), np.array([depth])), rel=2e-3)


def critical_path(model: ModelFlops, lengths: NDArray[np.int64], **factors: Any) -> float:
    """The FLOPs of the dearest pack of each micro-batch, over their mean, of a step that is planned by a cost."""
    step = plan_step(lengths, 65536, 8, packer="exact_fill", balance="deal", **factors)
    work = np.array([[model.samples(lengths[pack]) for pack in rank] for rank in step.packs], np.float64)
    return float(work.max(axis=0).sum() * 8 / work.sum())


def test_the_factors_of_a_hybrid_model_shorten_the_critical_path_of_an_rl_step() -> None:
    """Qwen3-Next on 512 responses, dp 8: 14.7% above the mean by the default cost, 9.7% by its own."""
    lengths = np.random.default_rng(7).lognormal(np.log(3000), 1.1, 512).clip(64, 65536).astype(np.int64)
    model = ModelFlops.of(HYBRID)
    assert model.balance() == {"a": 73846, "b": 1}
    assert critical_path(model, lengths) == pytest.approx(1.147, abs=2e-3)
    assert critical_path(model, lengths, **model.balance()) == pytest.approx(1.097, abs=2e-3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "deepseek_v3"}, "got `model_type: deepseek_v3`, expected one of cohere2, "),
        ({"vocab_size": None}, "got no key `vocab_size`, expected a whole number"),
        ({"hidden_size": "4096"}, "got '4096' for the key `hidden_size`"),
        ({"layer_types": ["mamba"] * 32}, "got `layer_types` with the types mamba"),
        ({"num_attention_heads": 0}, "got 0 for the key `num_attention_heads`, expected a whole number above 0"),
        ({"layer_types": 32}, "got 32 for the key `layer_types`, expected a list"),
        ({"num_experts": 4, "mlp_only_layers": 1}, "got 1 for the key `mlp_only_layers`, expected a list"),
        ({"model_type": ["llama"]}, "got `model_type: ['llama']`, expected one of"),
        ({"model_type": "mistral", "sliding_window": 0}, "got 0 for the key `sliding_window`"),
        ({"layer_types": ["full_attention"]}, "got `layer_types` with 1 types for 32 layers"),
        ({"layer_types": ["linear_attention"] * 32}, "got no key `linear_num_key_heads`"),
        ({"model_type": "gemma2", "sliding_window": 4096}, "got 32 layers without `layer_types`"),
    ],
)
def test_a_model_that_cannot_be_counted_is_refused_with_the_key(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        ModelFlops.of(LLAMA | changed)
    assert message in str(refused.value)


def test_a_configuration_of_another_type_is_refused() -> None:
    with pytest.raises(UserError, match="got a str, expected a dict"):
        ModelFlops.of("config.json")


def test_a_model_of_images_and_text_counts_its_text_model() -> None:
    assert layers_of({"model_type": "any", "text_config": LLAMA}) == layers_of(LLAMA)


def test_a_sliding_window_without_types_is_that_of_all_layers() -> None:
    assert layers_of(LLAMA | {"model_type": "mistral", "sliding_window": 4096})[3:6] == (0, 32, 4096)
    assert layers_of(LLAMA | {"use_sliding_window": False, "sliding_window": 4096})[3:6] == (32, 0, 0)
    asked = LLAMA | {"model_type": "qwen3", "sliding_window": 4096}
    assert layers_of(asked)[3:6] == layers_of(asked | {"use_sliding_window": None})[3:6] == (32, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token": 6e9, "pair": 7}, "got token=6000000000.0, expected a whole number of at least 1"),
        ({"token": 0, "pair": 7}, "got token=0, expected a whole number of at least 1"),
        ({"token": 1, "pair": -1}, "got pair=-1, expected a whole number of at least 0"),
        ({"token": 1, "pair": 1, "window_pair": 3}, "got window=0, expected a whole number of at least 1"),
    ],
)
def test_own_counts_that_mean_nothing_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelFlops(**wrong)


def test_own_counts_of_numpy_do_not_overflow() -> None:
    assert ModelFlops(token=np.int64(1 << 60), pair=0).samples(np.array([100])) == 100 << 60  # type: ignore[arg-type]


def test_a_model_whose_pairs_cost_next_to_nothing_has_factors_within_bounds() -> None:
    assert Balance(**ModelFlops(token=3 * 10**12, pair=1).balance()).a < 1 << 32
