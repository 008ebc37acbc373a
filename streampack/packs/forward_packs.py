"""``ForwardPacks``: packs for passes without gradients, and the way back of results to the micro-batches.

``Step.regroup`` makes forward packs. They hold the rank's samples in the same order as the micro-batches do. The way
back therefore removes tail padding, joins the values, and cuts them where the micro-batches begin. In padded rows, each
real token moves back to its place. All of this works on numpy arrays and on torch tensors of any device; torch is
imported only if a value is a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64
from streampack.errors import UserError
from streampack.packs.batch_type import BatchT
from streampack.packs.pack import Pack


class ForwardPacks(Sequence[BatchT]):
    """One rank's packs for a pass without gradients, in the format of their step; returned by ``Step.regroup``.

    ``tokens_back`` and ``samples_back`` map results, as numpy arrays or torch tensors, to the step's micro-batches.

    Args:
        shown: The forward packs in the step's format.
        packs: The same packs, canonical.
        micro_batches: The canonical packs of the step.
        moved: For padded rows, the index of each real token in the micro-batches, and in the forward packs.

    Example:
        >>> forward = step.regroup(budget=32768)  # doctest: +SKIP
        >>> rewards = forward.samples_back([reward(pack) for pack in forward])  # doctest: +SKIP
        >>> old = forward.tokens_back({pack: logprobs(pack) for pack in forward})  # doctest: +SKIP
    """

    def __init__(
        self, shown: tuple[BatchT, ...], packs: tuple[Pack, ...], micro_batches: tuple[Pack, ...],
        moved: tuple[I64, I64] | None = None,
    ) -> None:  # fmt: skip
        self._shown, self._packs, self._micro_batches, self._moved = shown, packs, micro_batches, moved

    def tokens_back(self, values: Mapping[Any, Any] | Sequence[Any]) -> tuple[Any, ...]:
        """Map values of tokens from the forward packs to the step's micro-batches.

        Args:
            values: For each forward pack, an array or tensor [T', ...] with one value for each token that this rank
                holds. In the formats ``hf`` also [1, T', ...], for padded rows also [B, S, ...]. If samples may share
                tokens, also [P, ...], such as log-probs of labels. Either a sequence in the packs' order, or a mapping
                with the packs as keys.

        Returns:
            For each micro-batch, an array or tensor [T', ...], [1, T', ...], [B, S, ...] or [P, ...]; 0 at padding.

        Raises:
            UserError: Values are missing for a forward pack, or do not have one row for each token.
        """
        of_packs = self._of_all(values)
        if self._moved is not None:
            return self._rows_back(of_packs, *self._moved)
        paths = [pack.path_index for pack in self._packs if pack.path_index is not None]
        if paths and all(value.shape[:1] == (len(path),) for value, path in zip(of_packs, paths, strict=True)):
            return self._paths_back(of_packs)
        sizes = [len(pack.padding_mask) for pack in self._packs]
        rowed = max(sizes) > 1 and all(v.shape[:2] == (1, size) for v, size in zip(of_packs, sizes, strict=True))
        of_packs = [value[0] for value in of_packs] if rowed else of_packs
        _check_sizes(of_packs, sizes, "token")
        joined = _joined([value[: num_held_tokens(pack)] for value, pack in zip(of_packs, self._packs, strict=True)])
        back, begin = [], 0
        for pack in self._micro_batches:
            row, end = _zeros(joined, len(pack.padding_mask)), begin + num_held_tokens(pack)
            row[: end - begin] = joined[begin:end]
            row[_index(pack.padding_mask, row)] = 0
            back.append(row[None] if rowed else row)
            begin = end
        return tuple(back)

    def _rows_back(self, values: Sequence[Any], places: I64, moved: I64) -> tuple[Any, ...]:
        """Map values [B, S, ...] or [T, ...] of each padded forward pack to the step's micro-batches."""
        sizes = [_rows_of(pack) for pack in self._packs]
        rowed = all(value.shape[:2] == size for value, size in zip(values, sizes, strict=True))
        if rowed:
            values = [value.reshape(-1, *value.shape[2:]) for value in values]
        _check_sizes(values, [rows * width for rows, width in sizes], "token")
        joined, bounds = _joined(values), np.cumsum([0, *(len(pack.padding_mask) for pack in self._micro_batches)])
        back = _zeros(joined, int(bounds[-1]))
        back[_index(places, joined)] = joined[_index(moved, joined)]
        spans = zip(pairwise(bounds.tolist()), self._micro_batches, strict=True)
        of_batches = [(back[begin:end], _rows_of(pack)) for (begin, end), pack in spans]
        return tuple(row.reshape(*size, *row.shape[1:]) if rowed else row for row, size in of_batches)

    def _paths_back(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Map values [P, ...] of each forward pack to the step's micro-batches."""
        joined = _joined([value[: _num_rows(pack)] for value, pack in zip(values, self._packs, strict=True)])
        back, begin = [], 0
        for pack in self._micro_batches:
            assert pack.path_index is not None
            row, end = _zeros(joined, len(pack.path_index)), begin + _num_rows(pack)
            row[: end - begin] = joined[begin:end]
            back.append(row)
            begin = end
        return tuple(back)

    def samples_back(self, values: Mapping[Any, Any] | Sequence[Any]) -> tuple[Any, ...]:
        """Map values of samples from the forward packs to the step's micro-batches.

        Args:
            values: For each forward pack, an array or tensor [num_samples, ...]. Either a sequence in the packs' order,
                or a mapping with the packs as keys.

        Returns:
            For each micro-batch, an array or tensor [num_samples, ...].

        Raises:
            UserError: Values are missing for a forward pack, or do not have one row for each sample.
        """
        of_packs = self._of_all(values)
        _check_sizes(of_packs, [pack.num_samples for pack in self._packs], "sample")
        joined, bounds = _joined(of_packs), np.cumsum([0, *(pack.num_samples for pack in self._micro_batches)])
        return tuple(joined[begin:end] for begin, end in pairwise(bounds.tolist()))

    def _of_all(self, values: Mapping[Any, Any] | Sequence[Any]) -> list[Any]:
        """Return the values of all forward packs, in the packs' order. Raises UserError if some are missing."""
        of_packs = (
            [values[pack] for pack in self._shown if pack in values] if isinstance(values, Mapping) else [*values]
        )
        if len(of_packs) != len(self._shown):
            raise UserError(
                f"got values for {len(of_packs)} packs, expected values for all {len(self._shown)} forward packs"
            )
        return [_values(value) for value in of_packs]

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


def num_held_tokens(pack: Pack) -> int:
    """Return the number of a pack's tokens that this rank holds, without tail padding, which comes last."""
    return int(pack.cu_seqlens_padded[pack.num_samples]) // (1 if pack.layout == "whole" else pack.cp)


def _num_rows(pack: Pack) -> int:
    """Return the tokens of a pack's samples, where each sample has all of its tokens."""
    assert pack.cu_paths is not None
    return int(pack.cu_paths[-1])


def _values(value: Any) -> Any:
    """Return a tensor unchanged, and anything else as a numpy array."""
    return value if hasattr(value, "detach") else np.asarray(value)


def _check_sizes(values: Sequence[Any], sizes: Sequence[int], noun: str) -> None:
    """Raise UserError unless the first dimension of each value is its pack's size; ``noun`` is the unit of sizes."""
    for number, (value, size) in enumerate(zip(values, sizes, strict=True)):
        if value.shape[:1] != (size,):
            raise UserError(
                f"got values of shape {list(value.shape)} for forward pack {number}, expected [{size}, ...], with one "
                f"value for each {noun}"
            )


def _joined(values: Sequence[Any]) -> Any:
    """Concatenate arrays or tensors along the first axis."""
    if not hasattr(values[0], "detach"):
        return np.concatenate(values)
    import torch

    return torch.cat(list(values))


def _zeros(like: Any, size: int) -> Any:
    """Return zeros [size, ...] with the other dimensions, dtype and device of ``like``."""
    shape = (size, *like.shape[1:])
    return like.new_zeros(shape) if hasattr(like, "new_zeros") else np.zeros(shape, like.dtype)


def _rows_of(pack: Pack) -> tuple[int, int]:
    """Return the number of rows of a padded micro-batch, and their length."""
    return len(pack.padding_mask) // pack.max_seqlen, pack.max_seqlen


def _index(index: NDArray[Any], like: Any) -> Any:
    """Return a mask or numbers as a tensor on the device of ``like`` if ``like`` is a tensor, else unchanged."""
    if not hasattr(like, "detach"):
        return index
    import torch

    return torch.from_numpy(index).to(like.device)
