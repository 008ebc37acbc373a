"""The terms of a stream: the rules that its samples have to meet, as a lease tells them to a producer."""

from __future__ import annotations

from dataclasses import dataclass

from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import MediaLimits
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, Share

NO_LIMITS = MediaLimits()


@dataclass(frozen=True, slots=True)
class StreamTerms:
    """The rules that a stream's samples have to meet, and that its producers learn with a lease.

    Attributes:
        limit: The budget of a pack in tokens; longer samples are overlong.
        passes: Passes over the source; None for no limit.
        overlong: Policy for overlong samples: ``error``, ``drop``, ``truncate`` or ``split``.
        poison: Policy for samples that cannot be read.
        barriers: True if steps do not mix passes.
        pushed: True if a program pushes the samples.
        align: Each sample is padded to a multiple of this number of tokens.
        most: Most samples in a pack; None for no limit.
        batches: True if each step is one batch; False if steps follow each other in a stream.
        padded: True if samples are padded to rows, instead of packed.
        share: Kind of sharing that groups may have; None for none.
        late: True if samples wait for late fields.
        media_fields: Fields of axis item and patch; empty if samples have no media.
        media_factors: Factors of the cost of media: see ``Balance.media_factors``.
        limits: MediaLimits of packs for media.
        no_loss_tokens: Policy for samples from which nothing is learned: ``train``, ``drop`` or ``error``.
    """

    name: str
    partitions: int
    limit: int
    passes: int | None = 1
    overlong: str = "error"
    poison: str = "error"
    barriers: bool = False
    pushed: bool = False
    align: int = 1
    most: int | None = None
    batches: bool = False
    padded: bool = False
    share: Share | None = None
    late: bool = False
    media_fields: tuple[Field, ...] = ()
    media_factors: tuple[int, int, int] = (0, 0, 0)
    limits: MediaLimits = NO_LIMITS
    no_loss_tokens: str = "train"

    def fits(self, lengths: I64) -> bool:
        """Return whether one pack can hold samples of these lengths; a sample of length 0 is left out.

        ``lengths`` int64 [n]: tokens of each sample, without those that it shares with the sample before it.
        """
        tokens = int((-(-lengths // self.align) * self.align).sum())
        return tokens <= self.limit and (self.most is None or int((lengths > 0).sum()) <= self.most)


def terms_of(rules: Rules) -> list[StreamTerms]:
    """Return the terms of every stream, in the order of the rules."""
    drain = rules.between_passes == "drain"
    return [
        StreamTerms(
            each.name, each.partitions, rules.budget, each.passes, each.overlong, each.poison, drain, each.pushed,
            rules.align.sample, rules.max_samples_per_pack, rules.batch is not None, rules.padded,
            rules.share, bool(rules.late_fields) and each.pushed, rules.media_fields, rules.balance.media_factors,
            rules.limits or NO_LIMITS, each.no_loss_tokens,
        )
        for each in rules.streams
    ]  # fmt: skip
