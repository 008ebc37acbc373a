"""Settings of planning: the key ``rules`` of broker.yaml, and the mesh that a run is planned for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from streampack.config.alignment import AlignSettings
from streampack.core.model.keys.key_groups import Keys
from streampack.core.model.keys.planning_keys import PACKER_KEYS, BatchKeys, PlanningKeys, Positive
from streampack.core.model.keys.stream_keys import SamplePolicies
from streampack.core.model.rules import LATE_TIMEOUT_S, Batch


class WindowSettings(Keys, frozen=True, kw_only=True):
    """Size of the window that the packer chooses from."""

    samples: Annotated[
        Positive,
        Meta(
            description="Number of samples in the window, from which the packer chooses. A larger window gives "
            "fuller packs and changes the order more"
        ),
    ] = 1024


STEP_KINDS = ("packs", "samples", "end_of_batch")
"""Units of a step; a feed that sets one overrides the run's."""


class StepSettings(BatchKeys, frozen=True, kw_only=True, listed="packs samples end_of_batch"):
    """Size of a step: a number of ``packs`` over all data-parallel ranks (default 64), or a batch packed by itself.

    A batch is a number of whole ``samples``, or the samples up to the producers' ``end_of_batch``. The other keys are
    for batches; ``core.model.rules.Batch`` explains each.
    """

    packs: Annotated[
        Positive | None,
        Meta(
            description="Number of packs in one optimizer step, over all data-parallel ranks. Default: 64, unless "
            "`samples` or `end_of_batch` is set"
        ),
    ] = None
    end_of_batch: Annotated[
        bool,
        Meta(
            description="Let the programs that push samples end each step by a call of `end_of_batch`. Set this "
            "instead of `packs`"
        ),
    ] = False

    @property
    def batch(self) -> Batch | None:
        """Settings of a batch for the rules; None if steps are counted in packs. Raises ValueError for two units."""
        units = [key for key in STEP_KINDS if getattr(self, key)]
        if len(units) > 1:
            raise ValueError(
                f"step: got {' and '.join(units)}, expected only one of {', '.join(STEP_KINDS)}. Remove the others"
            )
        of_batches = {key: getattr(self, key) for key in Batch.__struct_fields__ if key != "samples"}
        if units in ([], ["packs"]):
            for key, value in of_batches.items():
                if value != getattr(StepSettings(), key):
                    raise ValueError(
                        f"step: got {key} without samples or end_of_batch, expected one of these two keys. Set one of "
                        f"them, or remove {key}"
                    )
            return None
        return Batch(samples=self.samples, **of_batches)


class PlannedMesh(Keys, frozen=True, kw_only=True):
    """The mesh that the run is planned for. Keys of ``align`` that are not set follow from it."""

    dp: Annotated[
        Positive,
        Meta(
            description="Planned number of data-parallel ranks, which must divide the number of packs in a step. "
            "Trainers may later connect with another divisor"
        ),
    ] = 1
    cp: Annotated[
        Positive,
        Meta(
            description="Planned number of context-parallel ranks. This number determines the default alignment of "
            "samples"
        ),
    ] = 1
    tp: Annotated[
        Positive,
        Meta(
            description="Planned number of tensor-parallel ranks. This number determines the default alignment of packs"
        ),
    ] = 1


class StalenessSettings(Keys, frozen=True, kw_only=True):
    """Settings of the age of pushed samples, in versions of the policy that made them."""

    max_policy_lag: Annotated[
        Annotated[int, Meta(ge=0, lt=2**62)] | None,
        Meta(
            description="Maximum number of versions by which the policy of a pushed sample may be older than the "
            "newest policy. Default: no maximum"
        ),
    ] = None
    on_exceed: Annotated[
        Literal["drop", "wait"],
        Meta(
            description="With `drop`, older samples are dropped and counted. With `wait`, none gets older: programs "
            "ask with `Producer.wait_to_start` before they generate samples, and the oldest samples are packed first. "
            "This needs `step: {samples: N}`"
        ),
    ] = "drop"


class RulesSettings(
    PlanningKeys, SamplePolicies, frozen=True, kw_only=True,
    listed="packer budget window in_turn max_samples_per_pack leftovers micro_batch_size padded align shape step "
    "warmup balance overlong poison no_loss_tokens tail weight_unit between_passes staleness late_timeout_s",
):  # fmt: skip
    """Settings of planning: packing, steps and balance. ``core.model.rules`` explains what follows from each."""

    window: Annotated[
        WindowSettings | Literal["auto"],
        Meta(
            description="The samples that the packer chooses from: `{samples: N}`, or `auto`. With `auto`, it is as "
            "many as 4 steps have, from 128 to 1,024. Then samples leave near their turn, and packs are nearly as full "
            "as with 1,024"
        ),
    ] = "auto"
    in_turn: Annotated[
        bool,
        Meta(
            description="Let samples as long as the budget leave in their turn, and the end of a feed leave in order "
            "of age. Applies to `packer: exact_fill`. Set `false` only to go on from a checkpoint of a version before "
            "0.2"
        ),
    ] = True
    align: AlignSettings | None = None
    step: StepSettings = StepSettings()
    staleness: StalenessSettings = StalenessSettings()
    late_timeout_s: Annotated[
        int,
        Meta(
            ge=1,
            lt=2**31,
            description="Seconds that a pushed sample waits for its late fields. Then `default` of the field is used; "
            "a sample that lacks a field without `default` is dropped and counted",
        ),
    ] = LATE_TIMEOUT_S

    @property
    def packing(self) -> dict[str, Any]:
        """Packing keys for the rules: ``packer`` and its options, ``shape`` and ``padded``.

        With ``padded``, keys left at their defaults become ``packer: none``, ``micro_batch_size: 1``, ``shape: exact``.
        """
        packing = {key: getattr(self, key) for key in ("packer", *PACKER_KEYS, "shape", "padded")}
        alone = {"packer": "none", "micro_batch_size": 1, "shape": "exact"} if self.padded else {}
        return packing | {key: value for key, value in alone.items() if packing[key] == getattr(RulesSettings(), key)}
