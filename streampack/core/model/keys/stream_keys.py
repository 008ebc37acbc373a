"""Keys of a stream, and the policies for its samples."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from streampack.core.model.keys.key_groups import Keys

Overlong = Literal["error", "drop", "truncate", "split"]
Poison = Literal["error", "drop"]
NoLossTokens = Literal["train", "drop", "error"]
OnExhaust = Literal["renormalise", "stop"]


class SamplePolicies(Keys, frozen=True, kw_only=True):
    """Policies for samples: keys of ``rules`` that are recorded with each stream, which may have its own."""

    overlong: Annotated[
        Overlong,
        Meta(
            description="Treatment of samples longer than the budget. `error` stops with an error, `drop` drops and "
            "counts the sample, `truncate` removes its end, and `split` divides it into several samples"
        ),
    ] = "error"
    poison: Annotated[
        Poison,
        Meta(
            description="Treatment of samples that cannot be used, such as invalid JSON: stop with an error "
            "(`error`), or drop and count the sample (`drop`)"
        ),
    ] = "error"
    no_loss_tokens: Annotated[
        NoLossTokens,
        Meta(
            description="Treatment of samples of which no token counts in the loss, also after a cut by `overlong`. "
            "`train` delivers and counts them, `drop` drops and counts them, and `error` stops with an error"
        ),
    ] = "train"


class StreamKeys(Keys, frozen=True, kw_only=True):
    """Keys of a stream that are recorded as they are."""

    on_exhaust: Annotated[
        OnExhaust,
        Meta(
            description="Action when the stream's last pass ends: let the other streams share its weight "
            "(`renormalise`), or end the feed (`stop`)"
        ),
    ] = "renormalise"
    pushed: Annotated[
        bool,
        Meta(
            description="Receive the stream's samples from a program that uses `streampack.Producer`, for example in "
            "reinforcement learning. The log keeps these samples, because they cannot be read again"
        ),
    ] = False
