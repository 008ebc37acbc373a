"""Turn the packs of a step into views in the format that a trainer requests.

- ``numpy`` is the pack itself, and ``thd`` the pack with tensors for arrays.
- ``hf`` (transformers), ``megatron``, ``bshd`` (NeMo AutoModel) and ``torchtitan`` have the keys of their frameworks.
- ``padded`` has arrays [B, S] and is the default for a feed with padded rules. There ``thd`` is the same, and ``hf``
  has the inputs of a transformers model for padded batches.

A view adds no data to a pack. A tensor shares the memory of the pack's array and keeps that memory alive. Only
read-only arrays and bfloat16 are copied. With a device, a step is copied on a separate stream from pinned memory,
while the trainer works on the step before. The module torch is imported only when a trainer requests views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

from streampack.batch_checks.step_check import check_step, follows
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.errors import UserError
from streampack.packs.columns import Columns
from streampack.packs.lazy import LazyPacks
from streampack.packs.pack import Pack
from streampack.packs.pack_media import MediaFetcher
from streampack.packs.slabs import Slabs
from streampack.packs.step import Step
from streampack.views.device import side_stream
from streampack.views.format_validation import check_feed, check_mesh
from streampack.views.padded import padded_view
from streampack.views.static_shapes import check_static_shapes, with_static_shapes
from streampack.views.view import View, canonical

if TYPE_CHECKING:
    from streampack.views.tensors import ValuesByName

TorchFormat = Literal["thd", "hf", "hf_shifted", "megatron", "bshd", "torchtitan", "padded"]
"""Formats whose packs are ``View`` objects; the packs of ``numpy`` are ``Pack`` objects."""
FORMATS = (*get_args(TorchFormat), "numpy")
MASKS = ("flex",)
"""Attention masks that views can have, by the name of the attention that takes them."""


def view(pack: Pack, format: str, rules: Rules, masks: str | None = None) -> View:
    """Return ``pack`` as a view in a torch ``format``; ``rules`` name the fields in bfloat16."""
    return views(Columns.of(dict(pack), pack.fields), (pack,), format, rules, Slabs(), masks)[0]


def views(
    columns: Columns, packs: Sequence[Pack], format: str, rules: Rules, slabs: Slabs, masks: str | None = None,
    static_shapes: bool = False, cp_groups: Mapping[int, Any] | None = None,
) -> list[View]:  # fmt: skip
    """Return several packs of a message as views in ``format``; new arrays lie in memory of ``slabs``.

    With ``masks="flex"`` they have the tables of their ``BlockMask``. With ``cp_groups``, process groups by size, they
    have the ``cp_group`` of the ranks that share them.
    """
    import torch

    from streampack.views import block_mask, tensors

    halves = frozenset(field.name for field in rules.all_fields if field.dtype == "bfloat16")
    with torch.inference_mode(False):  # a caller in inference mode may train on the pack later
        if rules.padded:
            return [padded_view(pack, format, rules, halves) for pack in packs]
        sized = with_static_shapes(columns, rules) if static_shapes else columns
        keys, rest = _of_framework(format, columns, tensors.thd(sized, halves), slabs, rules)
        if static_shapes:
            rest["static_shapes"] = [True] * len(packs)
        if cp_groups is not None:
            rest["cp_group"] = [cp_groups.get(pack.cp) for pack in packs]
        if masks:
            rest["block_tables"] = [block_mask.table_tensor(pack, block_mask.BLOCK_SIZE, slabs) for pack in packs]
        parts = zip(_by_pack(keys, packs), packs, _by_pack(rest, packs), strict=True)
        return [View(row, pack, others, rules) for row, pack, others in parts]


def _of_framework(
    format: str, columns: Columns, of_packs: ValuesByName, slabs: Slabs, rules: Rules
) -> tuple[ValuesByName, ValuesByName]:
    """Return the keys of packs in ``format``, and the packs' other values: lists by name with a value per pack.

    In ``thd``, all values of the packs are keys. For the others, ``build_batches`` of the framework's module makes both
    from columns and their tensors (``of_packs``). Two tensors never share memory, which would be copied to a device
    twice.
    """
    from streampack.views import bshd, hf, megatron, torchtitan

    builders: dict[str, Callable[..., tuple[ValuesByName, ValuesByName]]] = {
        "hf": hf.build_batches, "hf_shifted": partial(hf.build_batches, shifted=True),
        "megatron": megatron.build_batches, "bshd": bshd.build_batches, "torchtitan": torchtitan.build_batches,
    }  # fmt: skip
    return builders[format](columns, of_packs, slabs, rules) if format in builders else (of_packs, {})


def _by_pack(values: Mapping[str, list[Any]], packs: Sequence[Pack]) -> list[dict[str, Any]]:
    """Turn lists by name into one dict for each pack."""
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)] or [{} for _ in packs]


def shown(pack: Pack, rules: Rules, *, format: str, device: Any, masks: str | None = None) -> Any:
    """Return ``pack`` in any ``format``, on ``device`` unless that is None."""
    if format == "numpy":
        return pack
    batch = view(pack, format, rules, masks)
    return batch if device is None else batch.to(device)


def load_format(format: str | None) -> None:
    """Import what a format needs, which takes seconds that neither a thread nor a run that has begun must spend."""
    if format == "numpy" or find_spec("torch") is None:
        return
    import_module("torch")
    if format is not None and format.startswith("hf"):
        import_module("streampack.views.isolation.hf_isolation").guard()


class Views:
    """Converter of steps to one format and one device.

    The client's thread calls ``make``, and the trainer's thread calls ``arrive``. Raises UserError for an invalid
    format, mask, device or mesh.
    """

    def __init__(
        self, format: str | None, mesh: Mesh, device: Any = None, verify: bool = False, masks: str | None = None,
        static_shapes: bool = False, media: MediaFetcher | None = None, cp_groups: Mapping[int, Any] | None = None,
    ) -> None:  # fmt: skip
        has_torch = find_spec("torch") is not None
        self.format = format or ("thd" if has_torch else "numpy")
        if self.format not in FORMATS:
            raise UserError(f"got format {format!r}, expected one of: {', '.join(FORMATS)}")
        if self.format != "numpy" and not has_torch:
            raise UserError(
                f"got format {format!r} without torch, expected an installed torch. Run pip install 'streampack[torch]'"
            )
        load_format(self.format)
        check_mesh(self.format, mesh)
        if self.format == "numpy" and device is not None:
            raise UserError(
                f"got device={device!r} with format 'numpy', expected no device. To use a device, pass format='thd'"
            )
        if masks is not None and masks not in MASKS:
            raise UserError(f"got masks={masks!r}, expected one of: {', '.join(MASKS)}, or None")
        if masks is not None and self.format == "numpy":
            raise UserError(f"got masks={masks!r} with format 'numpy', expected a format with tensors, such as 'thd'")
        self._mesh, self._verify, self._given, self._masks = mesh, verify, format, masks
        self._static_shapes, self.media, self._cp_groups = static_shapes, media, cp_groups
        if cp_groups is not None and self.format == "numpy":
            raise UserError("got cp_groups with format 'numpy', expected a format with tensors, such as 'thd'")
        self._last: Step | None = None
        self._slabs = Slabs()
        self._stream = None if self.format == "numpy" else side_stream(device)

    def media_stats(self) -> dict[str, float]:
        """Return what the fetcher of media has counted, by name; empty without one."""
        return self.media.stats() if self.media is not None else {}

    def fit(self, rules: Rules, layout: str = "zigzag") -> None:
        """Choose the default format for a feed's rules, and check the format. Raises UserError if it is unsuitable."""
        if rules.padded and self._given is None and self.format == "thd":
            self.format = "padded"
        check_feed(self.format, self._mesh, rules, layout, self._masks)
        referred = [field.name for field in rules.all_fields if field.is_reference]
        if referred and self.media is None and self.format != "numpy":
            raise UserError(
                f"got format {self.format!r} for a feed with references to media ({referred[0]}), expected "
                f"media=streampack.Media('package.module:function'), whose function decodes them"
            )
        if self._static_shapes:
            check_static_shapes(self.format, rules)
        if rules.padded and self._masks:
            raise UserError(
                f"got masks={self._masks!r} for a feed with rules.padded, expected no masks. Each row of a padded "
                f"micro-batch is one sample, which causal attention does not mix with others"
            )

    def make(self, step: Step, rules: Rules) -> Step:
        """Return ``step`` with views in place of packs, verified if requested, and on the device.

        Raises InvariantError if the verification fails.
        """
        packs, regrouping = step.packs, step.regrouping
        if self.format != "numpy":
            assert isinstance(packs, LazyPacks), "as build_step has made them"
            packs = packs.shown(
                partial(
                    views, format=self.format, rules=rules, slabs=self._slabs, masks=self._masks,
                    static_shapes=self._static_shapes, cp_groups=self._cp_groups,
                )
            )  # fmt: skip
        if regrouping is not None:
            device = None if self._stream is None else self._stream.device
            show = partial(shown, format=self.format, device=device, masks=self._masks)
            regrouping = replace(regrouping, show=show, read=canonical)
        step = replace(step, packs=packs, regrouping=regrouping)
        if self._verify:
            check_step(step, self._mesh, rules)
            follows(self._last, step)
            self._last = step
        return self._stream.copy(step) if self._stream else step

    def arrive(self, step: Step) -> Step:
        """Return ``step`` ready for the calling thread, whose current stream waits for the copy to the device."""
        if self._stream:
            self._stream.arrive(step)
        return step
