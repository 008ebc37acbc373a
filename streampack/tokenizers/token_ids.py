"""What token ids are: one sequence, not empty, of integers in 0..2**31-1, and perhaps a mask of what is learned.

Whatever a tokenizer returns, and whatever a file holds as tokens, goes through ``as_tokens``. What does not pass
becomes a reason, a short word that is counted; never an exception, because one bad sample must not end a run.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = NDArray[np.int32]
NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


class Encoded(NamedTuple):
    """One sample: ``tokens`` [T] int32, T > 0, and ``loss_mask`` [T] uint8, 1 where the token is to be learned.

    Unshifted: ``loss_mask[t]`` speaks of ``tokens[t]``. None where all of them are.
    """

    tokens: Tokens
    loss_mask: NDArray[np.uint8] | None = None


def as_encoded(values: object) -> Encoded | str:
    """What a callable may return: ids; ``(ids, loss_mask)``; or a mapping with ``input_ids``, ``loss_mask``.

    A mask is one 0 or 1 (or bool) for each id. Reasons: those of ``as_tokens``, and ``mask``.

    >>> as_encoded(([1, 2], [0, 1]))
    Encoded(tokens=array([1, 2], dtype=int32), loss_mask=array([0, 1], dtype=uint8))
    """
    ids, mask = values, None
    if isinstance(values, Mapping):
        if "input_ids" not in values:
            return "missing"
        ids, mask = values["input_ids"], values.get("loss_mask")
    elif isinstance(values, tuple) and len(values) == 2 and not isinstance(values[0], int | np.integer):
        ids, mask = values
    tokens = as_tokens(ids)
    if isinstance(tokens, str) or mask is None:
        return tokens if isinstance(tokens, str) else Encoded(tokens)
    try:
        given: NDArray[Any] = np.asarray(mask)
    except Exception:  # ragged, or an object that cannot be one
        return "mask"
    if given.dtype.kind not in "biu" or given.shape != tokens.shape or ((given != 0) & (given != 1)).any():
        return "mask"
    return Encoded(tokens, given.astype(np.uint8))


def as_tokens(values: object) -> Tokens | str:
    """``values`` as token ids [T] int32 (a copy, unless it is an int32 array already), or the reason why not.

    Reasons: ``empty``; ``dtype`` (not integers: bool, float, NaN, text, objects); ``ragged`` (not one sequence:
    nested, 2-D, or a single number); ``range`` (an id below 0, or 2**31 and above).

    >>> as_tokens([1, 2, 3])
    array([1, 2, 3], dtype=int32)
    >>> as_tokens([1.0, float("nan")]), as_tokens([[1], [2, 3]]), as_tokens([-1]), as_tokens([])
    ('dtype', 'ragged', 'range', 'empty')
    """
    try:
        ids: NDArray[Any] = np.asarray(values)
    except ValueError:  # sequences of unequal lengths
        return "ragged"
    except Exception:  # an object whose __array__ or __len__ fails
        return "dtype"
    if ids.size == 0:
        return "empty"
    if ids.dtype.kind not in "iu":
        # Python ints that no 64 bits hold are the only objects that are ids, if bad ones.
        huge = ids.dtype == object and ids.ndim == 1 and all(type(value) is int for value in ids.tolist())
        return "range" if huge else "dtype"
    if ids.ndim != 1:
        return "ragged"
    signed, size = ids.dtype.kind == "i", ids.dtype.itemsize
    if (signed and ids.min() < 0) or (size + (not signed) > 4 and ids.max() >= 2**31):  # int32 needs the first only
        return "range"
    return ids.astype(np.int32, order="C", copy=False)


def digest_of_words(*words: str) -> str:
    """Of what a tokenizer is made of, hex."""
    return hashlib.sha256("\0".join(("streampack-tokenizer-1", *words)).encode()).hexdigest()
