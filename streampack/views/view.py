"""A pack in one format: keys for a framework, and beside them all that the pack has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from streampack.core.model.rules import Rules
from streampack.errors import UserError
from streampack.packs.pack import Pack, shapes_of, summary

if TYPE_CHECKING:
    import torch

_ON_HOST = frozenset({"sample_ids", "slices"})
"""Read by the host alone: reading them must not wait for a device."""


class View(dict[str, Any]):
    """A pack in one format: the keys that its framework takes, and as attributes all that the pack has.

    ``batch.labels`` is ``batch["labels"]``; what is no key (``batch.num_loss_tokens``, ``batch.sample_ids``,
    declared fields in ``hf``) is there as in ``thd``. ``canonical`` is the pack itself, in numpy. A mapping made from
    a view, ``View(view)``, as some collators do, has the keys alone.
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

    canonical: Pack | None
    rest: dict[str, Any]
    """The pack's values that are no keys, tensors for arrays."""
    rules: Rules | None
    copied: Any
    """The event that its copy to a device has come to its end, where there is one."""

    def __init__(
        self,
        values: Mapping[str, Any] | None = None,
        canonical: Pack | None = None,
        rest: Mapping[str, Any] | None = None,
        rules: Rules | None = None,
        copied: Any = None,
    ) -> None:
        super().__init__(values or {})
        self.canonical, self.rest, self.rules, self.copied = canonical, dict(rest or {}), rules, copied

    def __getattr__(self, name: str) -> Any:
        if name in View.__slots__:  # not set yet, in a copy
            raise AttributeError(name)
        for values in (self, self.rest):
            if name in values:
                return values[name]
        raise AttributeError(f"got the name {name!r}, expected one of: {', '.join([*self, *self.rest])}")

    def __repr__(self) -> str:
        return f"View({f'{summary(self.canonical)}, ' if self.canonical is not None else ''}{shapes_of(self)})"

    def to(self, device: Any, *, non_blocking: bool = False) -> View:
        """The same with its tensors on ``device``; ``sample_ids`` and ``slices`` stay with the host."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> View:
        """The same in pinned memory, which a device copies from by itself."""
        return self._each(lambda tensor: tensor.pin_memory())

    def tensors(self) -> dict[int, torch.Tensor]:
        """Every tensor that moves with the view, once, by ``id``."""
        import torch

        everything = [*self.rest.items(), *self.items()]
        return {id(v): v for key, v in everything if key not in _ON_HOST and isinstance(v, torch.Tensor)}

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> View:
        changed = {key: change(tensor) for key, tensor in self.tensors().items()}
        values, rest = ({k: changed.get(id(v), v) for k, v in kind.items()} for kind in (self, self.rest))
        return View(values, self.canonical, rest, self.rules, self.copied)


def canonical(batch: Pack | View) -> Pack:
    """The pack, in numpy, that a view is one of. Raises UserError for a mapping made from a view."""
    pack = batch.canonical if isinstance(batch, View) else batch
    if not isinstance(pack, Pack):
        raise UserError(
            f"got a batch that knows no pack ({type(batch).__name__}), expected one as the loader gave it: what is "
            f"made of its keys has the keys alone"
        )
    return pack


def real_tokens(batch: Pack | View) -> int:
    """Of the whole pack. Asks no device."""
    pack = batch.canonical if isinstance(batch, View) else batch
    return int(pack.cu_seqlens[-1]) if pack is not None else 0
