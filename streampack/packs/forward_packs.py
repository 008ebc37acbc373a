"""Forward packs and the way back: what was computed of them, given to the micro-batches that their samples are of.

``regroup`` makes them. Both hold the rank's samples in one order, so the way back is the same as the way there:
without tails, put together, cut where the micro-batches begin. Works on numpy arrays and on torch tensors, on any
device; torch is imported only by who brings a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from streampack.errors import UserError
from streampack.packs.batch_type import BatchT
from streampack.packs.pack import Pack


class ForwardPacks(Sequence[BatchT]):
    """A rank's forward packs, in the format of its step; made by ``Step.regroup``.

    What was computed of them goes back to the step's micro-batches, numpy arrays or torch tensors: from a mapping with
    the packs for keys, or from a sequence in their order.
    """

    def __init__(self, shown: tuple[BatchT, ...], packs: tuple[Pack, ...], micro_batches: tuple[Pack, ...]) -> None:
        self._shown, self._packs, self._micro_batches = shown, packs, micro_batches

    def tokens_back(self, values: Mapping[Any, Any] | Sequence[Any]) -> tuple[Any, ...]:
        """For each micro-batch [T', ...], from ``values`` [T', ...] of each forward pack: one for each token of it that
        this rank holds. 0 at padding. In the formats ``hf`` both may be [1, T', ...].

        Raises UserError for values that are not of all forward packs, or of another number of tokens.
        """
        found = self._of_all(values)
        sizes = [len(pack.padding_mask) for pack in self._packs]
        rowed = max(sizes) > 1 and all(v.shape[:2] == (1, size) for v, size in zip(found, sizes, strict=True))
        found = [value[0] for value in found] if rowed else found
        _check_sizes(found, sizes, "token")
        joined = _joined([value[: held(pack)] for value, pack in zip(found, self._packs, strict=True)])
        back, begin = [], 0
        for pack in self._micro_batches:
            row, end = _zeros(joined, len(pack.padding_mask)), begin + held(pack)
            row[: end - begin] = joined[begin:end]
            row[_mask(pack.padding_mask, row)] = 0
            back.append(row[None] if rowed else row)
            begin = end
        return tuple(back)

    def samples_back(self, values: Mapping[Any, Any] | Sequence[Any]) -> tuple[Any, ...]:
        """For each micro-batch [num_samples, ...], from ``values`` [num_samples, ...] of each forward pack.

        Raises UserError for values that are not of all forward packs, or of another number of samples.
        """
        found = self._of_all(values)
        _check_sizes(found, [pack.num_samples for pack in self._packs], "sample")
        joined, bounds = _joined(found), np.cumsum([0, *(pack.num_samples for pack in self._micro_batches)])
        return tuple(joined[begin:end] for begin, end in pairwise(bounds.tolist()))

    def _of_all(self, values: Mapping[Any, Any] | Sequence[Any]) -> list[Any]:
        found = [values[pack] for pack in self._shown if pack in values] if isinstance(values, Mapping) else [*values]
        if len(found) != len(self._shown):
            raise UserError(f"got values of {len(found)} packs, expected those of all {len(self._shown)} forward packs")
        return [_values(value) for value in found]

    @overload
    def __getitem__(self, at: int) -> BatchT: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[BatchT, ...]: ...
    def __getitem__(self, at: int | slice) -> BatchT | tuple[BatchT, ...]:
        return self._shown[at]

    def __len__(self) -> int:
        return len(self._shown)

    def __repr__(self) -> str:
        tokens = sum(int(pack.cu_seqlens[-1]) for pack in self._packs)
        return f"ForwardPacks(packs={len(self)}, tokens={tokens}, micro_batches={len(self._micro_batches)})"


def held(pack: Pack) -> int:
    """Tokens of its samples' slots that this rank holds: all but those of its tail, which are the last."""
    return int(pack.cu_seqlens_padded[pack.num_samples]) // (1 if pack.layout == "whole" else pack.cp)


def _values(value: Any) -> Any:
    """An array or a tensor as it is, else an array of it."""
    return value if hasattr(value, "detach") else np.asarray(value)


def _check_sizes(values: Sequence[Any], sizes: Sequence[int], what: str) -> None:
    for number, (value, size) in enumerate(zip(values, sizes, strict=True)):
        if value.shape[:1] != (size,):
            raise UserError(
                f"got values of shape {list(value.shape)} for forward pack {number}, expected [{size}, ...]: one for "
                f"each {what}"
            )


def _joined(values: Sequence[Any]) -> Any:
    """All of them in one, along the first axis."""
    if not hasattr(values[0], "detach"):
        return np.concatenate(values)
    import torch

    return torch.cat(list(values))


def _zeros(like: Any, size: int) -> Any:
    """[size, ...] of the trailing shape, type and device of ``like``."""
    shape = (size, *like.shape[1:])
    return like.new_zeros(shape) if hasattr(like, "new_zeros") else np.zeros(shape, like.dtype)


def _mask(mask: NDArray[np.bool_], like: Any) -> Any:
    if not hasattr(like, "detach"):
        return mask
    import torch

    return torch.from_numpy(mask).to(like.device)
