"""Loss tokens: which labels of a sample count in the loss. The denominators of all steps are sums of them.

A token is the label of the token before it, so the first token of a sample never counts. Each other token counts,
unless ``loss_mask`` is 0 there, or ``labels`` are ``IGNORE_INDEX`` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import LABELS, LOSS_MASK
from streampack.core.model.samples import I64, IGNORE_INDEX


def counting(fields: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_] | None:
    """Return whether each of n tokens may count, bool [n]; None if all may. ``fields`` are values of the n tokens.

    Example:
        >>> counting({"loss_mask": np.array([0, 1, 1]), "labels": np.array([5, 6, -100])}).tolist()
        [False, True, False]
    """
    counts = [fields[LOSS_MASK] != 0] if LOSS_MASK in fields else []
    counts += [fields[LABELS] != IGNORE_INDEX] if LABELS in fields else []
    return np.logical_and.reduce(counts) if counts else None


def loss_tokens(counts: NDArray[np.bool_] | None, lengths: I64, starts: I64 | None = None) -> I64:
    """Return the loss tokens of samples, or of pieces of samples, int64 [n].

    Args:
        counts: Result of ``counting`` for all tokens, bool [m]; None if all may count.
        lengths: int64 [n], tokens of each sample.
        starts: int64 [n], place of each sample's first token in ``counts``. Default: one after another.

    Example:
        >>> loss_tokens(np.array([True, True, False, True]), np.array([3, 1])).tolist()
        [1, 0]
    """
    others = np.maximum(lengths, 1) - 1
    if counts is None:
        return others
    upto = np.append(0, np.cumsum(counts))
    ends = np.cumsum(lengths) if starts is None else starts + lengths
    sums: I64 = upto[ends] - upto[ends - others]
    return sums
