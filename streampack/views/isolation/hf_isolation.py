"""Keep the samples of a pack apart in each call ``model(**batch)`` of a transformers model.

Models of transformers find the samples of a pack by ``position_ids``, unless they keep a cache or get a mask of
padding. Most models keep a cache by default. Samples would then attend to each other, without an error. ``guard``
therefore wraps ``PreTrainedModel.__call__`` in this process. A call with a pack keeps no cache. Arguments that would
let samples attend to each other raise UserError. Other calls are not changed.

The wrapper acts on calls because nothing in a batch can do the same. A mask as a key would replace the masks of sliding
windows, and each attention implementation takes another kind of mask. ``use_cache`` as a key would raise TypeError in
models without this argument, and in ``model(**batch, use_cache=False)``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from streampack.errors import UserError
from streampack.views.isolation.hf_dependence import attention_of, check_once, inside, is_inside
from streampack.views.isolation.hf_images import check_images, with_image_masks, with_videos
from streampack.views.isolation.ids_of_packs import is_of_pack

log = logging.getLogger("streampack.hf")

KEYS = frozenset({"cu_seq_lens_q", "seq_idx"})
"""Keys by which a pack in the format ``hf`` is recognized."""
_CACHES = ("cache", "past_key_values", "cache_params")
BY_POSITIONS = ("sdpa", "eager", "flex_attention")
"""Attention implementations that find samples by position_ids alone; flash attention gets their boundaries."""


@functools.cache
def guard() -> None:
    """Keep samples of packs apart in all models of transformers in this process; do nothing without transformers."""
    if find_spec("transformers") is None:
        return
    from torch._dynamo import OptimizedModule
    from transformers import PreTrainedModel

    classes: tuple[Any, ...] = (PreTrainedModel, OptimizedModule)
    for kind in classes:
        kind.__call__ = _guarded(kind.__call__, PreTrainedModel)


def _guarded(call: Callable[..., Any], guarded: type) -> Callable[..., Any]:
    """Return ``call``, a module's ``__call__``, with packs kept apart; only models of the class ``guarded`` are."""

    @functools.wraps(call)
    def apart(self: Any, *args: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():  # the call that is traced has been checked, and keeps no cache
            return call(self, *args, **keywords)
        model = getattr(self, "_orig_mod", self)
        if not isinstance(model, guarded):
            return call(self, *args, **keywords)
        if not is_inside.get() and not _has_pack(keywords):
            _check_ids(args, keywords)
            return call(self, *args, **keywords)
        if is_inside.get():
            return call(self, *args, **_without_cache(model, args, keywords))
        _check_arguments(model, keywords)
        check_images(model, keywords)
        keywords = with_image_masks(model, with_videos(model, keywords))
        return _call(call, self, args, _without_cache(model, args, keywords))

    return apart


def _has_pack(keywords: Mapping[str, Any]) -> bool:
    """Return True if a call has the keys of a pack, or positions that begin again within the row and no mask."""
    if keywords.keys() >= KEYS:
        return True
    positions = keywords.get("position_ids")
    others = any(keywords.get(name) is not None for name in ("attention_mask", *_CACHES))
    if others or not isinstance(positions, torch.Tensor):
        return False
    rows = positions[0] if positions.ndim == 3 and len(positions) == 4 else positions
    return rows.ndim == 2 and len(rows) == 1 and bool((rows[:, 1:] == 0).any())


def _check_ids(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Raise UserError for the token ids of a pack without what tells the samples apart; an own mask may do so."""
    mask = keywords.get("attention_mask")
    has_mask = mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim < 3)
    if not has_mask and is_of_pack(keywords.get("input_ids", args[0] if args else None)):
        raise UserError(
            "got the input_ids of a pack without its other keys, expected all of them, because without them its "
            "samples attend to each other. Pass all keys: model(**batch)"
        )


def _call(call: Callable[..., Any], module: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call a model, or a compiled one, with a pack. Raises UserError for a model in which samples see each other."""
    model = getattr(module, "_orig_mod", module)
    positions = keywords.get("position_ids")
    with inside():
        untested = check_once(model, 2 if positions is None else positions.ndim)
        outputs = call(module, *args, **keywords)
    if untested is not None:
        log.warning(
            "%s was not tested for packs, because it cannot run a short pack of text (%r). Compare the loss of a pack "
            "with those of its samples alone",
            type(model).__name__, untested,
        )  # fmt: skip
    return outputs


def _without_cache(model: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call with ``use_cache=False``, unless the model would not take it."""
    kind: Any = type(model)
    names = _arguments(kind)
    takes_any = (
        "**" in names and "use_cache" not in names and not is_inside.get()
    )  # a model may pass it on to its parts
    return {**keywords, "use_cache": False} if takes_any or "use_cache" in names[len(args) :] else keywords


@functools.cache
def _arguments(kind: Any) -> tuple[str, ...]:
    """Return the names of a model's arguments, in order; ``**`` stands for any others."""
    parameters = list(signature(kind.forward).parameters.values())[1:]
    return tuple("**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters)


def _check_arguments(model: Any, keywords: Mapping[str, Any]) -> None:
    """Raise UserError for arguments with which a model would not find the samples of a pack."""
    caches = [name for name in _CACHES if keywords.get(name) is not None]
    if keywords.get("use_cache") or caches:
        raise UserError(
            f"got {caches[0] if caches else 'use_cache=True'} with a pack, expected no cache, because with a cache the "
            f"samples of a pack attend to each other. Remove the argument: model(**batch)"
        )
    mask = keywords.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        raise UserError(
            f"got attention_mask of shape {list(mask.shape)} with a pack, expected none, because with a mask of "
            f"padding the samples of a pack attend to each other. Remove the argument: padding is a segment of its own"
        )
    if mask is None and "seq_idx" in keywords and attention_of(model) in BY_POSITIONS:
        _check_positions(keywords.get("position_ids"), keywords["seq_idx"])


def _check_positions(positions: torch.Tensor | None, seq_idx: torch.Tensor) -> None:
    """Raise UserError unless models that go by ``positions`` see the samples of ``seq_idx`` [1, T].

    They take each token whose position is not one more than the token's before as the first of a sample. Each sample
    must begin so. Within a sample, only positions that begin again at 0 may do so, as those of padding.
    """
    if positions is not None:
        rows = positions if positions.ndim == 2 else positions[0]
        begins, expected = rows.diff() != 1, seq_idx.diff() != 0
        if torch.equal(begins & ((rows[:, 1:] != 0) | expected), expected):
            return
    got = "no position_ids" if positions is None else "position_ids that do not begin again at each sample alone"
    raise UserError(
        f"got {got}, expected the position_ids of the batch. sdpa, eager and flex_attention find the samples of a pack "
        f"by them. Pass all keys: model(**batch). If your samples bring position_ids of their own, use flash attention"
    )
