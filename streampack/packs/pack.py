"""``Pack``: one micro-batch of one rank, in numpy. A ``View`` shows a pack in a framework's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.flops.model_flops import ModelFlops
from streampack.core.layout.labels import positions_of
from streampack.core.model.samples import I32, I64


@dataclass(slots=True, eq=False)  # not frozen: that makes one six times costlier
class Pack(Mapping[str, Any]):
    """One micro-batch of one rank: samples that share one token budget, as numpy arrays.

    Values are attributes and mapping keys: ``pack.input_ids`` is ``pack["input_ids"]``, and ``**pack`` works. Declared
    fields are keys, too.

    Shapes: T is the number of tokens of the pack, padding included. This rank holds T' of them: T / cp, or T in the
    layout ``whole``. Boundaries are those of the whole pack. A segment is a sample with its padding, or the padding at
    the end of the pack (tail padding).

    A middle stage of a pipeline gets no tokens: there ``input_ids`` and ``labels`` are None and are not keys. A padded
    micro-batch holds its rows one after another, each of ``max_seqlen`` tokens; see ``streampack.rows``.

    In a run with ``share: prefix``, samples may share their first tokens, which a pack has once. Boundaries count a
    sample's other tokens there. ``labels`` and fields aligned with labels have a value for each token of each sample,
    [P]. P is ``cu_paths[-1]``, and one more if that is T.

    Example:
        >>> loader = streampack.connect("tcp://node0:7402", format="numpy")  # doctest: +SKIP
        >>> pack = next(loader)  # doctest: +SKIP
        >>> pack  # doctest: +SKIP
        Pack(step=0, micro_batch=0/4, pack=0, samples=7, tokens=4090, input_ids=[4096])
        >>> pack.labels.shape  # doctest: +SKIP
        (4096,)
        >>> pack.positions()[:3]  # doctest: +SKIP
        array([0, 1, 2])
    """

    input_ids: I64
    """int64 [T'] token ids, 0 at padding."""
    labels: I64
    """int64 [T'] the next token of the same sample, or the label that came with the sample.

    -100 at the last real token of a sample, at padding, and where the loss mask is 0."""
    position_ids: NDArray[Any]
    """int64 [T'] positions, from 0 in each segment; or as sent with the samples, [T'] or [3, T']."""
    padding_mask: NDArray[np.bool_]
    """bool [T'] True at padding."""
    cu_seqlens: I32
    """int32 [num_segments + 1] cumulative real tokens of the segments, from 0."""
    cu_seqlens_padded: I32
    """int32 [num_segments + 1] cumulative tokens of the segments with padding, from 0 to T.

    Attention kernels that take one boundary array need this one."""
    max_seqlen: int
    """Tokens of the longest segment, padding included."""
    num_samples: int
    """Number of samples in the pack."""
    num_segments: int
    """Number of segments: ``num_samples``, plus 1 if there is tail padding."""
    sample_ids: I64
    """int64 [num_samples, 3] each sample's stream number, index in the stream, and part (0 unless split)."""
    num_loss_tokens: int
    """Number of labels that are not -100, in the whole pack."""
    step: int
    """Index of the step."""
    step_num_loss_tokens: int
    """``Step.num_loss_tokens``: the denominator of the pack's summed loss, over all ranks and micro-batches."""
    micro_batch: int
    """Number of this micro-batch in the step on this rank, from 0."""
    num_micro_batches: int
    """Number of micro-batches of the step on this rank; the optimizer steps after the last."""
    dp_rank: int
    """Data-parallel rank of this pack."""
    pack: int
    """Number of the pack in the step, equal on every mesh; if padded, micro_batch * dp + dp_rank."""
    slices: I64
    """int64 [k, 2] parts [start, stop) of the whole pack that this rank holds, in the order of its tokens."""
    layout: str
    """Layout of context parallelism: ``zigzag``, ``zigzag_pack``, ``contiguous`` or ``whole``."""
    cp: int
    """Number of context-parallel ranks."""
    cp_rank: int
    """Context-parallel rank of this shard."""
    fields: Mapping[str, NDArray[Any]]
    """Declared fields by name, bfloat16 as float32.

    A field of axis ``token`` is [T', ...], or [T, ...] if replicated; fields aligned with labels are shifted like them.
    A field of axis ``sample`` is [num_samples, ...]."""
    shared: I32 | None = None
    """int32 [num_samples] tokens that each sample shares with the sample before it; None without ``share``."""
    cu_paths: I32 | None = None
    """int32 [num_samples + 1] cumulative tokens of the samples with shared ones, from 0; None without ``share``."""
    cp_size: int | None = None
    """Number of ranks that share this pack, with dynamic context parallelism (``cp`` is the same); else None."""
    cp_ranks: tuple[int, int] | None = None
    """First rank and number of the ranks that share this pack, of the dp x cp ranks in one line; None without
    dynamic context parallelism."""
    path_index: I64 | None = None
    """int64 [P] place in the pack of each token of each sample, one sample after another; None without ``share``."""

    __eq__ = object.__eq__  # a Mapping's would compare arrays
    __hash__ = object.__hash__

    def positions(self) -> I64:
        """Return the position in the whole pack of each token that this rank holds.

        Returns:
            int64 [T'], values from 0 to T - 1.
        """
        return positions_of(self.slices[:, 0], self.slices[:, 1])

    def flops(self, model: Any) -> int:
        """Return the useful FLOPs of training on this pack's real tokens, forward and backward.

        With context parallelism, they are those of the whole pack.

        Args:
            model: ``model.config`` of transformers, a dict with the keys of ``config.json``, or a ``ModelFlops``.

        Raises:
            UserError: The model has layers that cannot be counted.

        Example:
            >>> tflops = pack.flops(model.config) / seconds / 1e12  # doctest: +SKIP
        """
        own = np.diff(self.cu_seqlens)[: self.num_samples]
        return ModelFlops.of(model).samples(own, 0 if self.shared is None else self.shared)

    def __getitem__(self, key: str) -> Any:
        if key in self.fields:
            return self.fields[key]
        value = getattr(self, key) if key in _KEYS else None
        if value is None:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[str]:
        yield from (key for key in _KEYS if getattr(self, key) is not None)
        yield from self.fields

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Pack({summary(self)}, {shapes_of(self)})"


def summary(pack: Pack) -> str:
    """Return a text for a pack's repr: step, micro-batch, pack number, samples and real tokens."""
    return (
        f"step={pack.step}, micro_batch={pack.micro_batch}/{pack.num_micro_batches}, pack={pack.pack}, "
        f"samples={pack.num_samples}, tokens={int(pack.cu_seqlens[-1])}"
    )


def shapes_of(batch: Mapping[str, Any]) -> str:
    """Return a text for a batch's repr: the shape of its tokens, or of its positions, as ``input_ids=[4096]``."""
    key = next(
        (key for key in ("input_ids", "tokens", "input", "position_ids") if hasattr(batch.get(key), "shape")), None
    )
    return f"keys={len(batch)}" if key is None else f"{key}={list(batch[key].shape)}"


_KEYS = tuple(field.name for field in dataclass_fields(Pack) if field.name != "fields")
