"""What a trainer gets in its framework's words: views of the canonical pack as torch tensors.

A view adds nothing to a pack. ``thd`` is the pack with tensors for arrays, ``numpy`` the pack itself; what frameworks
take is in ``streampack.views``: ``hf`` (transformers), ``megatron``, ``bshd`` (NeMo AutoModel), ``torchtitan``.
torch is imported when a view is asked for, never before.

A feed whose rules are ``padded`` has rows for packs: there ``padded`` is the canonical one, its arrays [B, S], ``thd``
the same, and ``hf`` what a model of transformers takes of padded batches.

A tensor lies in the memory of the pack's array and keeps it alive; only read-only arrays and
bfloat16 are copied. With a device, a step is copied there on a stream of its own, from pinned
memory, while the trainer works on the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from streampack.batch_checks.step_check import check_step, follows
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import IGNORE_INDEX
from streampack.errors import UserError
from streampack.packs.columns import Columns
from streampack.packs.lazy import Packs
from streampack.packs.pack import Pack, Step, shapes_of, summary
from streampack.packs.slabs import Slabs
from streampack.views.format_validation import check_feed, check_mesh

if TYPE_CHECKING:
    import torch

TorchFormat = Literal["thd", "hf", "hf_shifted", "megatron", "bshd", "torchtitan", "padded"]
"""Formats whose batches are ``View``; those of ``numpy`` are ``Pack``."""
FORMATS = (*get_args(TorchFormat), "numpy")
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


def rows(pack: Pack, rules: Rules) -> dict[str, NDArray[Any]]:
    """The arrays of a padded micro-batch by row, in its memory: one a sample, and one of padding where ranks are short.

    B rows of S tokens, of which this rank holds S' (S / cp, or S in the layout ``whole``). ``input_ids``, ``labels``,
    ``padding_mask`` and, int64, 1 at real tokens, ``attention_mask`` [B, S']; ``position_ids`` [B, S'], or as supplied
    [3, B, S']; declared fields of axis ``token`` [B, S', ...] ([B, S, ...] where replicated). Raises UserError for a
    pack.
    """
    if not rules.padded:
        raise UserError(
            "got a pack, expected a micro-batch of a feed with rules.padded: samples of a pack have no rows"
        )
    num_rows = int(pack.cu_seqlens_padded[-1]) // pack.max_seqlen
    names = [name for name in ("input_ids", "labels", "padding_mask") if name in pack]
    names += [field.name for field in rules.fields if field.axis == "token" and field.name in pack.fields]
    found = {name: pack[name].reshape(num_rows, -1, *pack[name].shape[1:]) for name in names}
    places = pack.position_ids
    found["position_ids"] = places.reshape(*places.shape[:-1], num_rows, -1)
    return found | {"attention_mask": (~found["padding_mask"]).astype(np.int64)}


def view(pack: Pack, format: str, rules: Rules) -> View:
    """``pack`` in ``format``, one of the torch ones; ``rules`` say which fields are bfloat16."""
    return views(Columns.of(dict(pack), pack.fields), (pack,), format, rules, Slabs())[0]


def views(columns: Columns, packs: Sequence[Pack], format: str, rules: Rules, slabs: Slabs) -> list[View]:
    """Some packs of a message in ``format``, as ``view`` gives each; what packs do not have in memory of ``slabs``."""
    import torch

    from streampack.views import tensors
    from streampack.views.framework_views import form

    halves = frozenset(field.name for field in rules.fields if field.dtype == "bfloat16")
    with torch.inference_mode(False):  # who asks for a pack may be in one, and train on the pack later
        if rules.padded:
            return [_padded(pack, format, rules, halves) for pack in packs]
        keys, rest = form(format, columns, tensors.thd(columns, halves), slabs, rules)
        found = zip(_by_pack(keys, packs), packs, _by_pack(rest, packs), strict=True)
        return [View(row, pack, others, rules) for row, pack, others in found]


def _by_pack(values: Mapping[str, list[Any]], packs: Sequence[Pack]) -> list[dict[str, Any]]:
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)] or [{} for _ in packs]


def _padded(pack: Pack, format: str, rules: Rules, halves: frozenset[str]) -> View:
    from streampack.views.tensors import tensor

    arrays = {**pack, **rows(pack, rules)}
    values = {k: tensor(v, k in halves) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    keys = _of_rows(values, format)
    return View(keys, pack, {name: value for name, value in values.items() if name not in keys}, rules)


def _of_rows(pack: dict[str, Any], format: str) -> dict[str, Any]:
    """What of a padded micro-batch is keys, in ``thd`` those of ``padded``; what a model shifts back is in ``hf``
    beside it as ``shift_labels``."""
    import torch

    names = ["input_ids", "labels", "attention_mask", "position_ids"]
    if format.startswith("hf") and "labels" in pack:
        pack["shift_labels"] = pack["labels"]
        pack["labels"] = torch.nn.functional.pad(pack["labels"][:, :-1], (1, 0), value=IGNORE_INDEX)
        names += ["shift_labels"] if format == "hf_shifted" else []
    return {name: pack[name] for name in names if name in pack}


def shown(pack: Pack, rules: Rules, *, format: str, device: Any) -> Any:
    """``pack`` in ``format``, on ``device`` if there is one."""
    if format == "numpy":
        return pack
    found = view(pack, format, rules)
    return found if device is None else found.to(device)


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


class Views:
    """Steps in a format and on a device: made by the client's thread or the trainer's, taken by the trainer's.

    Raises UserError for a format, a device or a mesh that cannot be.
    """

    def __init__(self, format: str | None, mesh: Mesh, device: Any = None, verify: bool = False) -> None:
        has_torch = find_spec("torch") is not None
        self.format = format or ("thd" if has_torch else "numpy")
        if self.format not in FORMATS:
            raise UserError(f"got format {format!r}, expected one of: {', '.join(FORMATS)}")
        if self.format != "numpy" and not has_torch:
            raise UserError(f"got format {format!r} without torch, expected it: pip install 'streampack[torch]'")
        if self.format != "numpy":
            import_module("torch")  # seconds that the client's thread must not spend
        check_mesh(self.format, mesh)
        if self.format == "numpy" and device is not None:
            raise UserError(f"got device={device!r} with format numpy, expected none: take format='thd'")
        self._mesh, self._verify, self._given = mesh, verify, format
        self._last: Step | None = None
        self._slabs = Slabs()
        self._stream = None if self.format == "numpy" else _side_stream(device)

    def fit(self, rules: Rules, layout: str = "zigzag") -> None:
        """Be views of a feed with these rules and context-parallel layout. Raises UserError for a format that it has
        not."""
        if rules.padded and self._given is None and self.format == "thd":
            self.format = "padded"
        check_feed(self.format, self._mesh, rules, layout)

    def make(self, step: Step, rules: Rules) -> Step:
        """``step`` with views for packs, verified where asked, and on the device. Raises InvariantError."""
        packs, regrouping = step.packs, step.regrouping
        if self.format != "numpy":
            assert isinstance(packs, Packs), "as build_step has made them"
            packs = packs.shown(partial(views, format=self.format, rules=rules, slabs=self._slabs))
        if regrouping is not None:
            device = None if self._stream is None else self._stream.device
            regrouping = replace(regrouping, show=partial(shown, format=self.format, device=device))
        step = replace(step, packs=packs, regrouping=regrouping)
        if self._verify:
            check_step(step, self._mesh, rules)
            follows(self._last, step)
            self._last = step
        return self._stream.copy(step) if self._stream else step

    def arrive(self, step: Step) -> Step:
        """``step`` for the thread that uses it: its current stream waits for the copy, its host does not."""
        if self._stream:
            self._stream.arrive(step)
        return step


def _side_stream(device: Any) -> SideStream | None:
    if device is None:
        return None
    import torch

    try:
        found = torch.empty(0, device=device).device  # with its number: the client's thread has another current one
        return None if found.type == "cpu" else SideStream(found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(f"got device={device!r}, which torch cannot use ({error}): expected 'cuda' or None") from None


class SideStream:
    """Copies to ``device`` ahead of use. ``prefetch`` steps and the one in use lie there, about 33 bytes a token.

    Runs on any device that torch has streams for. Tested on the CPU, whose streams do nothing; the copy's overlap
    on a GPU was not run.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device) if device.type != "cpu" else self._module.Stream()

    def copy(self, step: Step) -> Step:
        """``step`` on the device once ``arrive`` has been called for it."""
        event = self._module.Event()
        views = []
        with self._module.stream(self._stream):
            for batch in step:
                pinned = batch if self.device.type == "cpu" else batch.pin_memory()
                moved = pinned.to(self.device, non_blocking=True)
                moved.copied = event
                views.append(moved)
            event.record(self._stream)
        return replace(step, packs=tuple(views))

    def arrive(self, step: Step) -> None:
        current = self._module.current_stream(self.device)
        for event in {id(batch.copied): batch.copied for batch in step}.values():
            current.wait_event(event)
        if self.device.type != "cpu":  # whose memory no stream owns
            for batch in step:
                for tensor in batch.tensors().values():
                    tensor.record_stream(current)  # else its memory is given out again while it is still read
