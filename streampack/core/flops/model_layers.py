"""The layers of a model, read from its configuration in the words of Hugging Face's ``config.json``.

A configuration that this module cannot count exactly is refused: a wrong number looks like a right one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from streampack.errors import UserError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LAYER_TYPES = (FULL, SLIDING, LINEAR)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ALIKE = "mistral olmo2 qwen2 qwen3 qwen2_moe qwen3_moe mixtral glm4_moe granite granitemoe llama phi3 smollm3"
_TWO_MATRICES = frozenset(["gpt_neox", "starcoder2"])
"""Models whose feed-forward layers have two matrices; all others have three, as Llama has."""
_GATED_QUERIES = frozenset(["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
_MIXED = _GATED_QUERIES | frozenset(["cohere2", "gemma2", "gemma3_text", "gpt_oss", "olmo3"])
"""Models with layers of several types, which ``layer_types`` must name."""
MODEL_TYPES = frozenset(_ALIKE.split()) | _TWO_MATRICES | _MIXED
"""Values of ``model_type`` that this module counts. A test compares each with the model's own weights."""
_ASKS = frozenset(["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"])
"""Models that use ``sliding_window`` only with ``use_sliding_window: true``."""


class Heads(NamedTuple):
    """The attention heads of a model.

    Attributes:
        query: Query heads.
        key: Key and value heads; fewer than ``query`` with grouped queries (GQA).
        dim: Size of each head.
        gated: The output is gated, so that the query's matrix is twice as large.
    """

    query: int
    key: int
    dim: int
    gated: bool


class LinearHeads(NamedTuple):
    """The heads of a linear-attention layer, a gated delta net: their numbers and sizes, and its convolution."""

    key: int
    value: int
    key_dim: int
    value_dim: int
    kernel: int


class Layers(NamedTuple):
    """The layers of a causal language model.

    Attributes:
        hidden: Hidden size.
        vocabulary: Tokens of the output layer.
        heads: Attention heads.
        full: Layers with full attention.
        sliding: Layers with a sliding window of ``window`` tokens, the token itself included.
        window: Tokens that a token sees in a layer of ``sliding``.
        linear: Layers with linear attention.
        linear_heads: Their heads; None without such layers.
        dense: Layers with one feed-forward network of size ``ffn``.
        ffn: Size of that network.
        sparse: Layers with experts.
        experts: Experts of each of these layers, from which a router chooses.
        active_ffn: Size of the experts that a token passes, shared ones included.
        shared_gate: The shared expert has a gate.
        matrices: Matrices of a feed-forward network: 3 if it is gated, else 2.
    """

    hidden: int
    vocabulary: int
    heads: Heads
    full: int
    sliding: int
    window: int
    linear: int
    linear_heads: LinearHeads | None
    dense: int
    ffn: int
    sparse: int
    experts: int
    active_ffn: int
    shared_gate: bool
    matrices: int


def layers_of(config: Any) -> Layers:
    """Return the layers of a model.

    Args:
        config: A dict with the keys of ``config.json``, or a configuration of transformers. If it has a
            part ``text_config``, that part counts. Without ``model_type``, the layers are as in Llama.

    Raises:
        UserError: A key is missing or wrong, or the model has layers that cannot be counted; the message names it.
    """
    keys = _keys(config)
    kind = keys.get("model_type")
    if kind is not None and (not isinstance(kind, str) or kind not in MODEL_TYPES):
        raise UserError(
            f"model: got `model_type: {kind}`, expected one of {', '.join(sorted(MODEL_TYPES))}. Pass "
            f"streampack.ModelFlops(token=..., pair=...) with your own count. If the layers are as in Llama, pass the "
            f"keys without `model_type`"
        )
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    hidden, count, query = (_number(keys, key, least=1) for key in sizes)
    heads = Heads(
        query, _number(keys, "num_key_value_heads", query, 1), _number(keys, "head_dim", hidden // query, 1),
        kind in _GATED_QUERIES,
    )  # fmt: skip
    types = _types(keys, count)
    linear = types.count(LINEAR)
    sparse = _sparse(keys, count)
    experts = next((_number(keys, key) for key in _EXPERTS if keys.get(key)), 0)
    expert_ffn = _number(keys, "moe_intermediate_size", keys.get("intermediate_size")) if sparse else 0
    shared_ffn = _number(keys, "shared_expert_intermediate_size", 0) if sparse else 0
    shared_gate = shared_ffn > 0
    if sparse and not shared_ffn:
        shared_ffn = expert_ffn * _number(keys, "n_shared_experts", 0)
    return Layers(
        hidden=hidden, vocabulary=_number(keys, "vocab_size"), heads=heads, full=types.count(FULL),
        sliding=types.count(SLIDING), window=_number(keys, "sliding_window", least=1) if SLIDING in types else 0,
        linear=linear, linear_heads=_linear_heads(keys) if linear else None, dense=count - sparse,
        ffn=_number(keys, "intermediate_size", 0 if sparse == count else None), sparse=sparse, experts=experts,
        active_ffn=expert_ffn * _number(keys, "num_experts_per_tok") + shared_ffn if sparse else 0,
        shared_gate=shared_gate, matrices=2 if kind in _TWO_MATRICES else 3,
    )  # fmt: skip


def _keys(config: Any) -> Mapping[str, Any]:
    """Return the keys of a configuration, those of its text model if it has one. Raises UserError for other types."""
    if isinstance(config, Mapping):
        keys: Mapping[str, Any] = config
    elif hasattr(config, "to_dict"):
        keys = config.to_dict()
        renamed = getattr(config, "attribute_map", {})
        keys = {**keys, **{key: getattr(config, key) for key in renamed if hasattr(config, key)}}
    else:
        raise UserError(
            f"model: got a {type(config).__name__}, expected a dict with the keys of config.json, or model.config of "
            f"transformers"
        )
    text = keys.get("text_config")
    return _keys(text) if text is not None else keys


def _number(keys: Mapping[str, Any], key: str, default: Any = None, least: int = 0) -> int:
    """Return a key's number, or ``default`` if it is missing or null. Raises UserError if it is none from ``least``."""
    value = default if keys.get(key) is None else keys[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**40:
        got = "no key" if value is None else f"{value!r} for the key"
        raise UserError(
            f"model: got {got} `{key}`, expected a whole number{' above 0' * (least > 0)}. Pass the whole config.json "
            f"of the model"
        )
    return value


def _list(keys: Mapping[str, Any], key: str) -> list[Any] | None:
    """Return a key's list, or None if it is missing or null. Raises UserError for anything but a list."""
    value = keys.get(key)
    if value is not None and not isinstance(value, list | tuple):
        raise UserError(f"model: got {value!r} for the key `{key}`, expected a list. Pass the config.json of the model")
    return None if value is None else list(value)


def _types(keys: Mapping[str, Any], count: int) -> list[str]:
    """Return the type of each layer. Raises UserError for types that cannot be counted."""
    types = _list(keys, "layer_types")
    if types is not None:
        wrong = sorted({str(kind) for kind in types} - {*LAYER_TYPES})
        if wrong or len(types) != count:
            got = f"the types {', '.join(wrong)}" if wrong else f"{len(types)} types for {count} layers"
            raise UserError(
                f"model: got `layer_types` with {got}, expected for each layer one of {', '.join(LAYER_TYPES)}"
            )
        return types
    kind, uses = keys.get("model_type"), keys.get("use_sliding_window")
    if kind in _MIXED or uses:
        raise UserError(
            f"model: got {count} layers without `layer_types`, expected the type of each layer, because they differ. "
            f"Pass model.config of transformers, which has the types, or write `layer_types`"
        )
    slides = keys.get("sliding_window") is not None and uses is None and kind not in _ASKS
    return [SLIDING if slides else FULL] * count


def _sparse(keys: Mapping[str, Any], count: int) -> int:
    """Return the number of layers with experts."""
    if not any(keys.get(key) for key in _EXPERTS):
        return 0
    first, every = _number(keys, "first_k_dense_replace", 0), max(_number(keys, "decoder_sparse_step", 1), 1)
    dense = _list(keys, "mlp_only_layers") or ()
    return sum(at not in dense and at >= first and (at + 1) % every == 0 for at in range(count))


def _linear_heads(keys: Mapping[str, Any]) -> LinearHeads:
    """Return the heads of linear-attention layers. Raises UserError if they are no gated delta net."""
    return LinearHeads(
        *(
            _number(keys, f"linear_{name}")
            for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        )
    )
