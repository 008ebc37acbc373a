"""Stages: the parts of a run with rules of their own, and the values that grow from one step to the next.

A run begins with its rules. Each stage changes some of them, from a step on, or once the steps have so many tokens. A
stage of broker.yaml is part of the run's rules. A stage that a person asks for while the run goes on has the same form.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from streampack.core.model.keys.planning_keys import Align, Balance, MediaLimits, Positive, Tail, Warmup, Window
from streampack.core.model.keys.stream_keys import Overlong
from streampack.core.packers.registry import PackerName

Steps = Annotated[int, Meta(ge=1, lt=2**40)]


class StageBegin(Struct, frozen=True, omit_defaults=True):
    """The begin of a stage: a ``step``, or the first step after steps with so many ``tokens``, padding left out."""

    step: Annotated[int, Meta(ge=0, lt=2**62)] | None = None
    tokens: Annotated[int, Meta(ge=0, lt=2**62)] | None = None

    def __post_init__(self) -> None:
        if (self.step is None) == (self.tokens is None):
            both = "both of the keys" if self.step is not None else "neither of the keys"
            raise ValueError(f"got a begin of a stage with {both} step and tokens, expected one of them")

    def __str__(self) -> str:
        return f"step {self.step:,}" if self.step is not None else f"{self.tokens:,} tokens"


class StageRules(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rules that a stage changes; UNSET for those that stay.

    Attributes:
        budget, packs, window, packer, max_samples_per_pack, align, balance, limits, tail: As in ``Rules``.
        overlong: The policy of every stream.
        warmup, packs_ramp: Growth of the budget and of the packs of a step; ``begin`` counts from the stage's first
            step.
    """

    budget: Positive | UnsetType = UNSET
    packs: Positive | UnsetType = UNSET
    window: Window | UnsetType = UNSET
    packer: PackerName | UnsetType = UNSET
    max_samples_per_pack: Positive | UnsetType | None = UNSET
    align: Align | UnsetType = UNSET
    balance: Balance | UnsetType = UNSET
    limits: MediaLimits | UnsetType | None = UNSET
    tail: Tail | UnsetType = UNSET
    overlong: Overlong | UnsetType = UNSET
    warmup: Warmup | UnsetType = UNSET
    packs_ramp: Warmup | UnsetType = UNSET

    @property
    def keys(self) -> list[str]:
        """Names of the rules that are set."""
        return [name for name in self.__struct_fields__ if getattr(self, name) is not UNSET]


class Stage(Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A stage: from its begin on, some rules have other values.

    Attributes:
        name: Name of the stage, for people.
        at: Its begin.
        rules: The rules that it changes.
        weights: The whole mixture, by stream; streams without a weight pause. None: the mixture stays.
        over: Steps in which the weights change evenly from those before to ``weights``; 0: at once.
    """

    name: str = ""
    at: StageBegin
    rules: StageRules = StageRules()
    weights: dict[str, float] | None = None
    over: Annotated[int, Meta(ge=0, lt=2**40)] = 0


class WeightsRamp(Struct, frozen=True):
    """An even change of the streams' weights.

    Attributes:
        begin: First step of the change.
        steps: Steps until the weights of the rules hold.
        shares: Share of each stream before it; the sum is 1.
    """

    begin: int
    steps: Steps
    shares: tuple[float, ...]
