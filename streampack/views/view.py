"""``View``: a pack in one format, with a framework's keys, and the pack's other values as attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from streampack.core.model.rules import Rules
from streampack.errors import UserError
from streampack.packs.pack import Pack, shapes_of, summary
from streampack.views.isolation import ids_of_packs

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["View", "canonical"]

_ON_HOST = frozenset({"sample_ids", "slices"})
"""Values that stay on the host: the host reads them, and must not wait for a device."""
_HF = "cu_seq_lens_q"
"""A key of the formats ``hf`` and ``hf_shifted``."""


class View(dict[str, Any]):
    """A pack in one format: a dict with the keys that a framework takes, as torch tensors.

    All other values of the pack are attributes, such as ``batch.num_loss_tokens`` and ``batch.sample_ids``; keys are
    attributes, too. See ``Pack`` for their meaning. A mapping made from a view, such as ``dict(view)``, has the keys
    alone.

    Args:
        values: The keys and their values.
        canonical: The pack, in numpy.
        rest: The pack's values that are not keys.
        rules: The run's rules.
        copied: Event that ends the copy to a device.

    Example:
        >>> batch = next(streampack.connect("tcp://node0:7402", format="hf"))  # doctest: +SKIP
        >>> loss = model(**batch, num_items_in_batch=batch.step_num_loss_tokens).loss  # doctest: +SKIP
        >>> ahead = batch.pin_memory().to("cuda", non_blocking=True)  # doctest: +SKIP
        >>> batch.flops(model.config)  # doctest: +SKIP
        1206413623296
        >>> half = {key: tensor.half() for key, tensor in batch.tensors().items()}  # doctest: +SKIP
        >>> batch = batch.with_tensors(half)  # doctest: +SKIP
    """

    __slots__ = ("canonical", "copied", "rest", "rules")
    __eq__ = object.__eq__  # a dict's would compare tensors
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]

    if TYPE_CHECKING:  # what every format has, by ``__getattr__``; a middle stage of a pipeline has no tokens
        input_ids: torch.Tensor
        labels: torch.Tensor
        position_ids: torch.Tensor
        padding_mask: torch.Tensor
        cu_seqlens: torch.Tensor
        cu_seqlens_padded: torch.Tensor
        sample_ids: torch.Tensor
        slices: torch.Tensor
        max_seqlen: int
        num_samples: int
        num_segments: int
        num_loss_tokens: int
        step: int
        step_num_loss_tokens: int
        micro_batch: int
        num_micro_batches: int
        dp_rank: int
        pack: int
        layout: str
        cp: int
        cp_rank: int
        block_mask: BlockMask  # of a loader with ``masks="flex"``

    canonical: Pack | None
    """The pack, in numpy; None in a mapping made from a view."""
    rest: dict[str, Any]
    """The pack's values that are not keys, by name, with tensors for arrays."""
    rules: Rules | None
    """The run's rules."""
    copied: Any
    """Device event that ends the copy to the device; None if there was no copy."""

    def __init__(
        self,
        values: Mapping[str, Any] | None = None,
        canonical: Pack | None = None,
        rest: Mapping[str, Any] | None = None,
        rules: Rules | None = None,
        copied: Any = None,
    ) -> None:
        super().__init__(values or {})
        self._note_ids()
        self.canonical, self.rest, self.rules, self.copied = canonical, dict(rest or {}), rules, copied

    def __getattr__(self, name: str) -> Any:
        if name in View.__slots__:  # not set yet, in a copy
            raise AttributeError(name)
        if name == "block_mask" and "block_tables" in self.rest:
            from streampack.views.block_mask import BLOCK_SIZE, mask_of_tables

            return mask_of_tables(self.rest["block_tables"], canonical(self), BLOCK_SIZE)
        for values in (self, self.rest):
            if name in values:
                return values[name]
        raise AttributeError(f"got attribute {name!r}, expected one of: {', '.join([*self, *self.rest])}")

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        for name, value in state[1].items():
            setattr(self, name, value)
        if _HF in self:  # perhaps from another process
            self._note_ids()
            from streampack.views.isolation.hf_isolation import guard

            guard()

    def _note_ids(self) -> None:
        """Remember the token ids of a pack, so that a model can tell them from those of one text."""
        if _HF in self and "input_ids" in self:
            ids_of_packs.note(self["input_ids"])

    def __repr__(self) -> str:
        return f"View({f'{summary(self.canonical)}, ' if self.canonical is not None else ''}{shapes_of(self)})"

    def to(self, device: Any, *, non_blocking: bool = False) -> View:
        """Return the view with its tensors on ``device``; ``sample_ids`` and ``slices`` stay on the host.

        Args:
            device: A torch device.
            non_blocking: True to copy from pinned memory without waiting.

        Returns:
            A new view.
        """
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def flops(self, model: Any) -> int:
        """Return the useful FLOPs of training on this pack's real tokens, as ``Pack.flops`` does; reads no device.

        Args:
            model: ``model.config`` of transformers, a dict with the keys of ``config.json``, or a ``ModelFlops``.
        """
        return canonical(self).flops(model)

    def pin_memory(self) -> View:
        """Return the view with its tensors in pinned memory, for asynchronous copies to a device."""
        return self._each(lambda tensor: tensor.pin_memory())

    def tensors(self) -> dict[int, torch.Tensor]:
        """Return the tensors that ``to`` moves, by ``id``; a tensor under several names is in the dict once."""
        import torch

        everything = [*self.rest.items(), *self.items()]
        return {id(v): v for key, v in everything if key not in _ON_HOST and isinstance(v, torch.Tensor)}

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> View:
        """Return a new view with ``change`` applied once to each tensor that moves."""
        return self.with_tensors({key: change(tensor) for key, tensor in self.tensors().items()})

    def with_tensors(self, changed: Mapping[int, torch.Tensor]) -> View:
        """Return a new view with other tensors.

        Args:
            changed: ``id`` of each tensor in ``tensors()`` -> the tensor that replaces it.

        Returns:
            A new view with the same pack.
        """
        values, rest = ({k: changed.get(id(v), v) for k, v in kind.items()} for kind in (self, self.rest))
        return View(values, self.canonical, rest, self.rules, self.copied)


def canonical(batch: Pack | View) -> Pack:
    """Return the pack of a view, in numpy.

    Args:
        batch: A pack or a view, as the loader returned it.

    Raises:
        UserError: ``batch`` is a mapping made from a view, which holds no pack.

    Example:
        >>> positions = canonical(batch).positions()  # doctest: +SKIP
    """
    pack = batch.canonical if isinstance(batch, View) else batch
    if not isinstance(pack, Pack):
        raise UserError(
            f"got a batch of type {type(batch).__name__} without its pack, expected a batch as the loader returned "
            f"it. A copy of the batch's keys does not keep the pack"
        )
    return pack


def real_tokens(batch: Pack | View) -> int:
    """Return the number of real tokens of the whole pack, or 0 for a mapping made from a view; reads no device."""
    pack = batch.canonical if isinstance(batch, View) else batch
    return int(pack.cu_seqlens[-1]) if pack is not None else 0
