"""Keys of a field: values that samples have beside their token ids."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from streampack.core.model.keys.key_groups import Keys

NumberType = Literal[
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip
DType = Literal[NumberType, "reference"]
Axis = Literal["token", "sample", "item", "patch"]
FieldAlign = Literal["token", "target"]


class Placeholder(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The tokens of a sample that stand for its media."""

    tokens: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...],
        Meta(min_length=1, max_length=16, description="Ids of the tokens that stand for media items"),
    ]
    patches: Annotated[int, Meta(ge=1, le=1 << 20, description="Patches of an item for which one token stands")] = 1


class FieldKeys(Keys, frozen=True, kw_only=True):
    """Keys of a field. A key that is None gets the default that the field's name implies."""

    dtype: Annotated[
        DType | None,
        Meta(
            description="Type of the field's values. Required, except for `loss_mask`, `labels`, `position_ids`, "
            "`group` and `policy_version`"
        ),
    ] = None
    axis: Annotated[
        Axis | None,
        Meta(
            description="Unit that each value of the field describes: one `token`, `sample`, `item` or `patch`. "
            "Default: `sample` for the fields `group` and `policy_version`, `token` for all others"
        ),
    ] = None
    shape: Annotated[
        tuple[Annotated[int, Meta(ge=1, lt=2**62)], ...],
        Meta(description="Shape of one value, such as `[4]`. Default: a single number"),
    ] = ()
    align: Annotated[
        FieldAlign | None,
        Meta(
            description="Meaning of value t: it belongs to token t (`token`), or to the prediction of token t and is "
            "shifted together with the labels (`target`). Default: `target` for `loss_mask` and `labels`, else "
            "`token`"
        ),
    ] = None
    pad: Annotated[
        int | float | None, Meta(description="Value of the field at padding. Default: -100 for `labels`, else 0")
    ] = None
    default: Annotated[
        int | float | None,
        Meta(description="Value for samples that lack the field. Without a default value, such samples are rejected"),
    ] = None
    cp: Annotated[
        Literal["slice", "replicate"],
        Meta(
            description="Values that each context-parallel rank gets: the values of its own tokens (`slice`), or the "
            "values of the whole pack (`replicate`)"
        ),
    ] = "slice"
    late: Annotated[
        bool,
        Meta(
            description="The values come after the sample, for example rewards that another process computes. A pushed "
            "sample is packed once `Producer.amend` has given it all its late fields"
        ),
    ] = False
    placeholder: Annotated[
        Placeholder | None,
        Meta(
            description="The tokens that stand for media items. A sample with more or fewer of them than its items "
            "need is rejected by `poison`. Default: tokens are not compared with items"
        ),
    ] = None
