"""Checks token ids: one nonempty sequence of integers in 0..2**31-1, perhaps with a mask of the learned ids.

All ids from tokenizers and files go through ``as_tokens``. Invalid ids become a reason, a short word that is counted.
No exception is raised, because one bad sample must not end a run.
"""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = NDArray[np.int32]
NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


class Because(str):
    """The reason why a sample is rejected, with ``why``, a detail such as a parser's message."""

    __slots__ = ("why",)

    def __new__(cls, reason: str, why: str) -> "Because":
        """Make a reason: ``reason`` is the word that is counted, ``why`` the detail that messages show."""
        made = super().__new__(cls, reason)
        made.why = why
        return made

    why: str


class Encoded(NamedTuple):
    """The ids of one sample and its loss mask.

    - ``tokens``: [T] int32, T > 0.
    - ``loss_mask``: [T] uint8; ``loss_mask[t]`` is 1 if ``tokens[t]`` is learned (not shifted). None: all are learned.
    - ``warnings``: words of ``core.stats.sample_warnings``.
    - ``given``: the ids are the data's own, so its masks, labels and boundaries are about them.
    - ``values``: values of declared fields by name, such as those of a chat's images.
    """

    tokens: Tokens
    loss_mask: NDArray[np.uint8] | None = None
    warnings: tuple[str, ...] = ()
    given: bool = False
    values: Mapping[str, Any] = MappingProxyType({})


def as_encoded(values: object) -> Encoded | str:
    """Check what a user's tokenizer returned, and convert it to Encoded, or return the reason why it is invalid.

    ``values``: ids; ``(ids, loss_mask)``; or a mapping with ``input_ids`` and perhaps ``loss_mask``. A mask has one 0
    or 1 (or bool) per id. The reasons are those of ``as_tokens``, ``missing`` (no ``input_ids``) and ``mask``.

    >>> as_encoded(([1, 2], [0, 1]))[:2]
    (array([1, 2], dtype=int32), array([0, 1], dtype=uint8))
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
        learned: NDArray[Any] = np.asarray(mask)
    except Exception:  # ragged, or an object that cannot be one
        return "mask"
    if learned.dtype.kind not in "biu" or learned.shape != tokens.shape or ((learned != 0) & (learned != 1)).any():
        return "mask"
    return Encoded(tokens, learned.astype(np.uint8))


def as_tokens(values: object) -> Tokens | str:
    """Convert ``values`` to token ids [T] int32, or return the reason why they are invalid.

    An int32 array is returned without a copy. The reasons:

    - ``empty``: there are no ids.
    - ``dtype``: not integers, but bools, floats, text or objects.
    - ``ragged``: not one sequence, but nested, 2-D or a single number.
    - ``range``: an id is below 0, or 2**31 or above.

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
        # Python ints beyond 64 bits become objects: their reason is the range, not the type.
        huge = ids.dtype == object and ids.ndim == 1 and all(type(value) is int for value in ids.tolist())
        return "range" if huge else "dtype"
    if ids.ndim != 1:
        return "ragged"
    signed, size = ids.dtype.kind == "i", ids.dtype.itemsize
    if (signed and ids.min() < 0) or (size + (not signed) > 4 and ids.max() >= 2**31):  # int32 needs the first only
        return "range"
    return ids.astype(np.int32, order="C", copy=False)


def digest_of_words(*words: str) -> str:
    """Return a tokenizer's digest in hex, a hash of the words that identify it."""
    return hashlib.sha256("\0".join(("streampack-tokenizer-1", *words)).encode()).hexdigest()
