"""Keep the samples of a pack apart in each call ``model(**batch)`` of a transformers model.

Models of transformers find the samples of a pack by ``position_ids``, unless they keep a cache or get a mask of
padding. Most models keep a cache by default. Samples would then attend to each other, without an error. ``guard``
therefore wraps ``PreTrainedModel.__call__`` in this process. A call with a pack keeps no cache. Arguments that would
let samples attend to each other raise UserError. Other calls are not changed.

The wrapper acts on calls because nothing in a batch can do the same. A mask as a key would replace the masks of sliding
windows, and each attention implementation takes another kind of mask. ``use_cache`` as a key would raise TypeError in
models without this argument, and in ``model(**batch, use_cache=False)``.

The first call of a model with a pack tests the model, since no attribute tells whether it keeps samples apart. Many
models attend over the whole row whatever ``position_ids`` are (OPT, Bloom, MPT, gpt-oss with eager attention). Others
carry a state along the row unless kernels for boundaries are installed (Mamba and its hybrids). The test runs a pack of
two short samples through the model. The gradient of the second sample's outputs with respect to the first sample's
embeddings must be 0, which masked attention gives exactly in any precision.

Tokens of an image see each other in Gemma 3. transformers 5.24 computes the masks of a pack from the positions in each
sample. It looks up the image of a token at that position in the pack, where another token is. So packs with
``token_type_ids`` get their masks here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch

from streampack.errors import UserError
from streampack.views.hf import TYPES

log = logging.getLogger("streampack.hf")

KEYS = frozenset({"cu_seq_lens_q", "seq_idx"})
"""Keys by which a pack in the format ``hf`` is recognized."""
_CACHES = ("cache", "past_key_values", "cache_params")
BY_POSITIONS = ("sdpa", "eager", "flex_attention")
"""Attention implementations that find samples by position_ids alone; flash attention gets their boundaries."""
_TWO_WAY = ("gemma3",)
"""Types of models whose tokens of an image see each other."""
_BY_PATCHES, _BY_IMAGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("internvl", "gemma3")
"""Types of models by the shape of their ``pixel_values``: rows of patches, or whole images and tiles."""
_FIRST, _SECOND = 5, 6
_NOISE = 1e-6
"""Largest gradient that rounding may leave, as a share of the second sample's own gradient."""
_passed: WeakKeyDictionary[Any, tuple[str | None, int]] = WeakKeyDictionary()
"""Models that have passed the test: model -> its attention and the dimensions of its positions then."""
_inside: ContextVar[bool] = ContextVar("streampack_inside_a_call", default=False)


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
        if not isinstance(model, guarded) or not (_inside.get() or _has_pack(keywords)):
            return call(self, *args, **keywords)
        if _inside.get():
            return call(self, *args, **_without_cache(model, args, keywords))
        _check_arguments(model, keywords)
        check_images(model, keywords)
        keywords = _with_image_masks(model, keywords)
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
    takes_any = "**" in names and "use_cache" not in names and not _inside.get()  # a model may pass it on to its parts
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


def check_images(model: Any, keywords: Mapping[str, Any]) -> None:
    """Raise UserError for a pack whose images are those of another model's processor.

    Only shapes are compared. ``keywords``: the arguments of the call.
    """
    config = model.config
    pixels, kind = keywords.get("pixel_values"), getattr(config, "model_type", "")
    if not isinstance(pixels, torch.Tensor) or kind not in (*_BY_PATCHES, *_BY_IMAGES):
        return
    expected = "[images or tiles, channels, height, width]"
    is_right = pixels.ndim == 4
    if kind in _BY_PATCHES:
        vision = config.vision_config
        side = vision.patch_size
        width = vision.in_channels * vision.temporal_patch_size * side * side
        expected = f"[patches, {width}], patches of {side} x {side} pixels"
        is_right = pixels.ndim == 2 and pixels.shape[1] == width
    if not is_right:
        raise UserError(
            f"got pixel_values of shape {list(pixels.shape)} for a model of the type {kind}, expected {expected}. Give "
            "the folder of this model's processor in `tokenizer: {processor: FOLDER}`, and in Media(processor=FOLDER)"
        )


def _with_image_masks(model: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call with masks for tokens of images, if the model needs them for packs."""
    types, seq_idx = keywords.get(TYPES), keywords.get("seq_idx")
    if types is None or seq_idx is None or keywords.get("attention_mask") is not None:
        return keywords
    if getattr(model.config, "model_type", "") not in _TWO_WAY:
        return keywords
    attention = attention_of(model)
    if attention not in ("sdpa", "eager"):
        raise UserError(
            f"got a pack with token_type_ids for {type(model).__name__} and attn_implementation={attention!r}, "
            f"expected 'sdpa' or 'eager', because tokens of an image see each other. Load the model with one of these"
        )
    dtype = model.dtype if attention == "eager" else None
    window = model.config.get_text_config().sliding_window
    return {**keywords, "attention_mask": _image_masks(seq_idx, types, window, dtype)}


def _image_masks(
    seq_idx: torch.Tensor, types: torch.Tensor, window: int, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Return the masks [1, 1, T, T] of a pack's layers by the names that transformers has for their attention.

    Args:
        seq_idx: [1, T], the number of each token's sample.
        types: [1, T], 1 for tokens of images. A run of them is one image.
        window: Tokens that sliding attention sees.
        dtype: Floating dtype of an additive mask; None for a boolean mask.
    """
    is_image = types[0] == 1
    begins = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:-1]
    image = torch.where(is_image, begins.cumsum(0), 0)
    place = torch.arange(len(image), device=image.device)
    back = place[:, None] - place
    own = seq_idx[0][:, None] == seq_idx[0]
    sees = own & ((back >= 0) | ((image[:, None] == image) & is_image))
    masks = {"full_attention": sees, "sliding_attention": sees & (back < window)}
    return {name: _shaped(mask, dtype) for name, mask in masks.items()}


def _shaped(mask: torch.Tensor, dtype: torch.dtype | None) -> Any:
    """Return a mask [T, T] as attention takes it, [1, 1, T, T]."""
    if dtype is None:
        return mask[None, None]
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)[
        None, None
    ]


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


@contextmanager
def inside() -> Iterator[None]:
    """Mark calls of models as parts of a call that is checked already: a model calls the models that it consists of."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def attention_of(model: Any) -> str | None:
    """Return the attention implementation of a model's text, such as ``sdpa``; None if the model names none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    implementation: str | None = getattr(text, "_attn_implementation", None)
    return implementation


def check_once(model: Any, ndim: int) -> Exception | None:
    """Test a model unless it has passed already, with this attention and positions of ``ndim`` dimensions.

    Args:
        model: A model of transformers. One whose parameters are sharded over ranks is not tested.
        ndim: Dimensions of ``position_ids``, as for ``check``.

    Returns:
        The error of a model that cannot run the test, such as one that wants other inputs; else None.

    Raises:
        UserError: Samples of a pack affect each other in the model.
    """
    if _passed.get(model) == (attention_of(model), ndim):
        return None
    failure = None
    try:
        if not _is_sharded(model):
            check(model, ndim)
    except UserError:
        raise
    except Exception as error:  # whatever a model raises
        failure = error
    _passed[model] = (attention_of(model), ndim)
    return failure


def check(model: Any, ndim: int = 2) -> None:
    """Raise UserError if samples of a pack affect each other in the model.

    The check makes one short forward and backward pass and leaves gradients of parameters unchanged. A model without
    ``get_input_embeddings`` or without outputs for each token is not checked; models of transformers have both.

    Args:
        model: A model of transformers.
        ndim: Dimensions of ``position_ids``: 2 for [1, T], 3 for [4, 1, T].
    """
    if not hasattr(model, "get_input_embeddings"):
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()  # draws no random numbers and checkpoints no layers, which some models do not support here
    try:
        with inside():
            first, second = _dependence(model, ndim)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not first <= _NOISE * second:
        three = "If its positions are M-RoPE, declare position_ids with shape [3] in broker.yaml. " * (ndim == 2)
        raise UserError(
            f"got {type(model).__name__} with attn_implementation={attention_of(model)!r}, in which samples of a pack "
            f"affect each other, expected a model that keeps samples apart. {three}Use flash attention or sdpa if the "
            f"model supports them, the kernels of a state space model, or padded rows (rules.padded)"
        )


def _is_sharded(model: Any) -> bool:
    """Return True if parameters are sharded over ranks, by FSDP, tensor parallelism or DeepSpeed."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    sharded = any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters())
    return sharded or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _dependence(model: Any, ndim: int) -> tuple[float, float]:
    """Return the largest gradients of the second sample's outputs: by the first sample's embeddings, and by its own."""
    embeddings: list[torch.Tensor] = []

    def require_gradients(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        """Hook of the embedding: detach the output and keep it in ``embeddings``, so that it gets gradients."""
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(require_gradients)
    try:
        with torch.compiler.set_stance("force_eager"), torch.inference_mode(False), torch.enable_grad():
            outputs = _outputs(model(**_pack(embedding.weight, ndim)))
            if outputs is None:
                return 0.0, 0.0
            (gradient,) = torch.autograd.grad(outputs[0, _FIRST:].float().square().sum(), embeddings[0])
    finally:
        hook.remove()
    sizes = gradient[0].float().abs()
    return float(sizes[:_FIRST].max()), float(sizes[_FIRST:].max())


def _outputs(outputs: Any) -> torch.Tensor | None:
    """Return a model's outputs [1, tokens, ...], by name or as the first of a tuple; None if there are none."""
    output = outputs[0] if isinstance(outputs, tuple) else None
    if isinstance(outputs, Mapping):
        output = next((outputs[name] for name in ("logits", "last_hidden_state") if name in outputs), None)
    return output if isinstance(output, torch.Tensor) and output.shape[:2] == (1, _FIRST + _SECOND) else None


def _pack(weight: torch.Tensor, ndim: int) -> dict[str, Any]:
    """Return a pack of two samples in the format ``hf``, on the device of ``weight`` [vocabulary, hidden]."""
    length, device = _FIRST + _SECOND, weight.device
    boundaries = torch.tensor([0, _FIRST, length], dtype=torch.int32, device=device)
    places = torch.arange(length, device=device)
    positions = torch.where(places < _FIRST, places, places - _FIRST)[None]
    return {
        "input_ids": ((places + 1) % len(weight))[None],
        "position_ids": positions if ndim == 2 else positions.expand(4, 1, length),
        "seq_idx": (places >= _FIRST).to(torch.int32)[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": _SECOND,
        "max_length_k": _SECOND,
    }
