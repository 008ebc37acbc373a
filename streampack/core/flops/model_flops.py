"""Useful FLOPs of training a causal language model: those that the real tokens of its samples need.

A sample of s tokens costs ``token * s`` for all that a token passes alone: matrices, experts, the output layer, and the
state of linear attention. Each pair of a token and a token that it sees costs ``pair`` in the layers with full
attention, s * (s + 1) / 2 pairs. Layers with a sliding window have at most ``window`` pairs for each token.

A multiplication and an addition count as two. The backward pass counts twice the forward pass. Norms, activations,
rotary positions and the softmax are left out; they are below 1% of a large model.
"""

from __future__ import annotations

from math import gcd
from numbers import Integral
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr
from numpy.typing import NDArray

from streampack.core.flops.model_layers import Layers, layers_of
from streampack.core.model.samples import I64
from streampack.errors import UserError

TRAINING = 3
"""FLOPs of the forward and the backward pass / FLOPs of the forward pass."""


class ModelFlops(Struct, frozen=True, kw_only=True):
    """Useful FLOPs of training a model, forward and backward, by what causes them.

    Use ``ModelFlops.of`` for a model's configuration. Write the numbers yourself for layers that it does not know.

    Example:
        >>> llama = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 128256}
        >>> flops = ModelFlops.of(llama | {"num_key_value_heads": 8, "intermediate_size": 14336})
        >>> flops.token, flops.pair
        (45027950592, 1572864)
        >>> flops.samples(np.array([8192, 100]))
        426162709856256
    """

    token: int
    """FLOPs of a token in all layers, without pairs of tokens."""
    pair: int
    """FLOPs of a pair of tokens in all layers with full attention."""
    window_pair: int = 0
    """FLOPs of a pair of tokens in all layers with a sliding window."""
    window: int = 0
    """Tokens that a token sees in these layers, itself included."""

    def __post_init__(self) -> None:
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
        least = {"token": 1, "window": int(self.window_pair != 0)}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least.get(name, 0):
                raise UserError(
                    f"ModelFlops: got {name}={value!r}, expected a whole number of at least {least.get(name, 0)}. A "
                    f"model has FLOPs by token, and `window` if it has `window_pair`"
                )
            force_setattr(self, name, int(value))  # those of numpy would overflow

    @classmethod
    def of(cls, config: Any) -> ModelFlops:
        """Return the FLOPs of a model.

        Args:
            config: A dict with the keys of ``config.json``, a configuration of transformers, or a ``ModelFlops``.

        Raises:
            UserError: A key is missing or wrong, or the model has layers that cannot be counted; the message names it.
        """
        return config if isinstance(config, ModelFlops) else _flops(layers_of(config))

    def samples(self, lengths: NDArray[np.integer], shared: NDArray[np.integer] | int = 0) -> int:
        """Return the useful FLOPs of samples.

        Args:
            lengths: Tokens of each sample, without those that it shares, int64 [n].
            shared: Tokens that each sample shares with the sample before it, int64 [n], in a run with ``share``.
        """
        own, depths = np.asarray(lengths, np.int64), np.asarray(shared, np.int64)
        ends = own + depths
        total = self.token * int(own.sum())
        for flops, window in ((self.pair, 0), (self.window_pair, self.window)):
            if flops:
                total += flops * int((pairs(ends, window) - pairs(depths, window)).sum())
        return total

    def balance(self) -> dict[str, Any]:
        """Return the keys of ``rules.balance`` for which the cost of packs is proportional to these FLOPs.

        Example:
            >>> ModelFlops(token=3 << 30, pair=1 << 14).balance()
            {'a': 393217, 'b': 1}
        """
        # A cost has b for each token of a square, and a square has two for each pair.
        least = min(flops for flops in (self.pair, self.window_pair, self.token) if flops)
        attention = [flops for flops in (self.pair, self.window_pair) if flops]
        unit = gcd(*attention) if attention else least
        if max(attention, default=0) >= unit * _MOST_FACTOR:
            unit = -(-max(attention) // (_MOST_FACTOR - 1))
        unit = max(unit, -(-2 * self.token // _MOST_BY_TOKEN))
        keys: dict[str, Any] = {"b": round(self.pair / unit)}
        factor = round(self.window_pair / unit)
        if factor:
            keys["sliding"] = [self.window, factor]
        return {"a": round(2 * self.token / unit) + keys["b"] + factor, **keys}


_MOST_FACTOR = 1 << 12
"""Factors b of ``rules.balance`` are below this."""
_MOST_BY_TOKEN = (1 << 32) - 3 * _MOST_FACTOR
"""The part of factor a that comes from tokens is at most this, so that a is below 2^32."""


def pairs(lengths: I64, window: int = 0) -> I64:
    """Return the pairs of each sample's tokens with the tokens that they see, int64 [n].

    Args:
        lengths: Tokens of each sample, int64 [n].
        window: Most tokens that a token sees, itself included; 0 for all.

    >>> pairs(np.array([1, 4]), 0).tolist(), pairs(np.array([1, 4]), 3).tolist()
    ([1, 10], [1, 9])
    """
    near = np.minimum(lengths, window) if window else lengths
    result: I64 = near * (near + 1) // 2 + (lengths - near) * window
    return result


def _flops(layers: Layers) -> ModelFlops:
    """Return the FLOPs of a model with these layers."""
    heads, hidden = layers.heads, layers.hidden
    queries = heads.query * heads.dim
    attention = 2 * hidden * (queries * (3 if heads.gated else 2) + 2 * heads.key * heads.dim)
    token = (layers.full + layers.sliding) * attention
    if layers.linear_heads is not None:
        token += layers.linear * _linear_flops(layers)
    token += 2 * layers.matrices * hidden * (layers.dense * layers.ffn + layers.sparse * layers.active_ffn)
    token += 2 * hidden * layers.sparse * (layers.experts + layers.shared_gate)
    token += 2 * hidden * layers.vocabulary
    pair = 4 * queries * TRAINING
    return ModelFlops(
        token=TRAINING * token, pair=layers.full * pair, window_pair=layers.sliding * pair, window=layers.window
    )


def _linear_flops(layers: Layers) -> int:
    """Return the FLOPs of a token in a layer with linear attention, a gated delta net, in the forward pass.

    Its matrices make queries, keys, values, a gate, and two numbers for each value head. A convolution passes over
    queries, keys and values. Each value head has a state of key_dim * value_dim: it decays, is read twice, and gets an
    outer product.
    """
    heads = layers.linear_heads
    assert heads is not None  # there are such layers
    keys, values = heads.key * heads.key_dim, heads.value * heads.value_dim
    matrices = 2 * layers.hidden * (2 * keys + 2 * values + 2 * heads.value + values)
    return matrices + 2 * heads.kernel * (2 * keys + values) + 7 * heads.value * heads.key_dim * heads.value_dim
