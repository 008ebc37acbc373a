"""Fields: the values that a sample carries beside its token ids, declared once for a run.

Every sample has ``input_ids``. A run may declare more: one value per token (a loss mask, advantages, router choices) or
one per sample (a reward). Samples with media have values for each item (an image's size) or for each patch of an item
(its pixels); ``core.media`` says how these travel. A declaration fixes dtype, trailing shape, the value at padding, and
what context parallelism does to the values. The declaration also tells if a value belongs to its own token or, like a
label, to the prediction of that token. Producers send all fields unshifted. The broker shifts fields with ``align:
target`` inside each sample, before any split. The core knows the fields' sizes, never values.
"""

from __future__ import annotations

import re
from math import prod
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from streampack.core.model.keys.field_keys import Axis, DType, FieldAlign, FieldKeys

MAX_FIELDS = 32
MAX_VALUE_BYTES = 4096
"""The most bytes of one token's value in one field."""
MAX_PATCH_BYTES = 1 << 16
"""The most bytes of one item's or one patch's value in one field."""
MAX_SAMPLE_BYTES = 1024
"""The most bytes of one sample's values in all fields of axis ``sample``, which are held outside the arena."""
LOSS_MASK, LABELS, POSITION_IDS = "loss_mask", "labels", "position_ids"
"""Field names with a meaning: labels are masked where ``loss_mask`` is 0. A producer that declares ``labels`` or
``position_ids`` sends them, and they are not derived; a label of -100 does not count."""
GROUP, POLICY_VERSION = "group", "policy_version"
"""Fields that a pushing producer fills in for each sample of a group.

``group`` is the sequence number of the group's first sample, ``policy_version`` the version given with the group.
"""
DERIVED = (
    "input_ids", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "padding_mask", "num_samples", "num_segments",
    "sample_ids", "num_loss_tokens", "step", "step_num_loss_tokens", "micro_batch", "num_micro_batches", "dp_rank",
    "pack", "slices", "edges", "fields", "layout", "cp", "cp_rank",
)  # fmt: skip
"""Names of a pack's own attributes, which no field may have."""
OF_ROWS = ("attention_mask", "shift_labels")
"""Names that padded micro-batches have of their own, beside ``DERIVED``."""
OF_TREES = ("shared", "cu_paths", "path_index")
"""Names that packs have of their own if samples may share tokens, beside ``DERIVED``."""
MEDIA, PATCHES = "media", "patches"
"""The payload frame that holds the media of samples, and the key of a sample's patches of each item."""
CU_ITEMS, CU_PATCHES = "cu_items", "cu_patches"
OF_MEDIA = (MEDIA, PATCHES, CU_ITEMS, CU_PATCHES)
"""Names that no field may have if the run declares fields of axis ``item`` or ``patch``, beside ``DERIVED``."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Field(
    FieldKeys, frozen=True, kw_only=True, omit_defaults=True,
    listed="name dtype axis shape align pad default cp late placeholder",
):  # fmt: skip
    """One declared field, with the defaults that its name implies. Raises ValueError for an invalid declaration.

    The dtype ``reference`` says where an item's bytes are; trainers fetch and decode them. The value ``pad`` also
    stands where a field with ``align: target`` has no next token.
    """

    name: str
    dtype: DType
    axis: Axis = "token"
    shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=4)] = ()
    align: FieldAlign = "token"
    pad: int | float = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in DERIVED:
            why = "packs have their own attribute with this name" if self.name in DERIVED else "it is not an identifier"
            raise ValueError(f"got the name {self.name!r}, expected another name, because {why}")
        self._check_axis()
        self._check_meaning()
        for value in (self.pad, self.default):
            if value is not None:
                self.fill(value)

    def _check_axis(self) -> None:
        """Raise ValueError for keys or sizes that values of this axis cannot have."""
        if self.axis != "token" and (self.align != "token" or self.cp != "slice"):
            raise ValueError(
                f"got `align` or `cp` with `axis: {self.axis}`, expected neither, because both keys are for `axis: "
                f"token`"
            )
        if self.is_reference and (self.axis != "item" or self.shape):
            raise ValueError(
                f"got dtype reference with `axis: {self.axis}` and shape {list(self.shape)}, expected `axis: item` and "
                f"no shape, because a reference stands for one item"
            )
        if self.of_media and (self.default is not None or self.pad != 0 or self.late):
            raise ValueError(
                f"got `default`, `pad` or `late` with `axis: {self.axis}`, expected none of them. A sample without the "
                f"field has no media, and media are neither padded nor sent later"
            )
        if self.placeholder is not None and not self.of_media:
            raise ValueError(f"got `placeholder` with `axis: {self.axis}`, expected `axis: item` or `axis: patch`")
        most = MAX_PATCH_BYTES if self.of_media else MAX_VALUE_BYTES
        if self.value_bytes > most:
            raise ValueError(f"got {self.value_bytes} bytes per {self.axis}, expected at most {most}")

    def _check_meaning(self) -> None:
        """Raise ValueError unless a field whose name has a meaning is declared as this meaning requires."""
        if self.name in (LOSS_MASK, LABELS) and (self.axis, self.align, self.shape) != ("token", "target", ()):
            raise ValueError(
                f"got {self.name} with `axis: {self.axis}`, `align: {self.align}` and shape {list(self.shape)}, "
                f"expected `axis: token`, `align: target` and no shape"
            )
        if self.name in (LOSS_MASK, LABELS, POSITION_IDS) and self.cp != "slice":
            raise ValueError(f"got `cp: {self.cp}` for {self.name}, expected `cp: slice`")
        if self.name == LABELS and self.dtype not in ("int32", "int64"):
            raise ValueError(f"got dtype {self.dtype} for labels, expected int32")
        if self.name == LABELS and self.pad != -100:
            raise ValueError(f"got pad {self.pad} for labels, expected -100, the label that the loss ignores")
        if self.name == LOSS_MASK and (self.pad != 0 or self.storage.kind not in "bui"):
            raise ValueError(
                f"got loss_mask with dtype {self.dtype} and pad {self.pad}, expected bool or an integer dtype, and "
                f"pad 0"
            )
        if self.name == POSITION_IDS and (
            (self.axis, self.align) != ("token", "token")
            or self.shape not in ((), (3,))
            or self.storage.kind not in "ui"
        ):
            raise ValueError(
                f"got position_ids with dtype {self.dtype}, `axis: {self.axis}`, `align: {self.align}` and shape "
                f"{list(self.shape)}, expected an integer dtype, `axis: token`, `align: token`, and no shape or shape "
                f"[3]"
            )
        if self.late and self.name in (LOSS_MASK, LABELS, POSITION_IDS, GROUP, POLICY_VERSION):
            raise ValueError(
                f"got `late: true` for {self.name}, expected no `late`, because the broker needs this field when the "
                f"sample comes"
            )

    @property
    def of_media(self) -> bool:
        """True if samples have values of the field for their media: axis ``item`` or ``patch``."""
        return self.axis in ("item", "patch")

    @property
    def is_reference(self) -> bool:
        """True if the values say where the bytes of items are."""
        return self.dtype == "reference"

    @property
    def storage(self) -> np.dtype[Any]:
        """The numpy dtype of the values' bytes; bfloat16 is sent as uint16, a reference as any number of bytes."""
        if self.is_reference:
            return np.dtype(np.uint8)
        return np.dtype("<u2" if self.dtype == "bfloat16" else self.dtype).newbyteorder("<")

    @property
    def value_bytes(self) -> int:
        """Bytes of one token's or one sample's value."""
        return self.storage.itemsize * prod(self.shape)

    def fill(self, value: float) -> NDArray[Any]:
        """Return ``value`` as an array of dtype ``storage`` and shape []. Raises ValueError if it does not fit."""
        if self.dtype == "bfloat16":
            return to_bfloat16(np.array(value, np.float32))
        if self.storage.kind in "bui":
            low, high = (0, 1) if self.storage.kind == "b" else (np.iinfo(self.storage).min, np.iinfo(self.storage).max)
            if not float(value).is_integer() or not low <= value <= high:
                raise ValueError(f"got the value {value}, expected a value of dtype {self.dtype}")
        return np.array(value).astype(self.storage)

    def stored(self, value: NDArray[Any]) -> NDArray[Any] | None:
        """Return ``value`` in the dtype ``storage``; None if it is not numeric or out of range."""
        if value.dtype == self.storage and self.dtype != "bfloat16":
            return value
        if value.dtype.kind not in "buif":
            return None
        if self.dtype == "bfloat16":
            return to_bfloat16(value.astype(np.float32))
        if self.storage.kind == "f":
            return value.astype(self.storage)
        with np.errstate(invalid="ignore"):
            stored: NDArray[Any] = value.astype(self.storage)
        return stored if np.array_equal(stored, value) else None


def check_fields(fields: tuple[Field, ...]) -> None:
    """Raise ValueError for too many fields, or too many bytes in the fields of axis ``sample``."""
    if len(fields) > MAX_FIELDS:
        raise ValueError(f"got {len(fields)} fields, expected at most {MAX_FIELDS}")
    sample_bytes = sum(field.value_bytes for field in fields if field.axis == "sample")
    if sample_bytes > MAX_SAMPLE_BYTES:
        raise ValueError(
            f"got {sample_bytes} bytes per sample in fields with `axis: sample`, expected at most {MAX_SAMPLE_BYTES}"
        )


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the bfloat16 bits of float32 ``values`` of any shape, rounded to nearest, ties to even; NaN stays NaN.

    >>> hex(int(to_bfloat16(np.array(1.0, np.float32))))
    '0x3f80'
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(np.shape(values))


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 values of bfloat16 ``bits`` of any shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
