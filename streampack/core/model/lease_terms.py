"""The terms of a stream: the rules that its samples have to meet, as a lease tells them to a producer."""

from __future__ import annotations

from msgspec import structs

from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import MediaLimits
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import I64, Share

NO_LIMITS = MediaLimits()


class StreamTerms(StreamRules, frozen=True, kw_only=True):
    """The rules of a stream when it was opened, and what the feed's rules demand of its samples.

    Attributes:
        limit: The budget of a pack in tokens; longer samples are overlong.
        barriers: True if steps do not mix passes.
        align: Each sample is padded to a multiple of this number of tokens.
        most: Most samples in a pack; None for no limit.
        batches: True if each step is one batch; False if steps follow each other in a stream.
        padded: True if samples are padded to rows, instead of packed.
        share: Kind of sharing that groups may have; None for none.
        late: True if samples wait for late fields.
        media_fields: Fields of axis item and patch; empty if samples have no media.
        media_factors: Factors of the cost of media: see ``Balance.media_factors``.
        limits: MediaLimits of packs for media.
        later: The largest budget of the stages that are to come; 0 without any. With ``overlong: error``, samples up to
            this length are admitted, because their stage may have begun when their turn comes.
    """

    limit: int
    barriers: bool = False
    align: int = 1
    most: int | None = None
    batches: bool = False
    padded: bool = False
    share: Share | None = None
    late: bool = False
    media_fields: tuple[Field, ...] = ()
    media_factors: tuple[int, int, int] = (0, 0, 0)
    limits: MediaLimits = NO_LIMITS
    later: int = 0

    @property
    def cuts(self) -> tuple[object, ...]:
        """The terms that decide which pieces of a sample are admitted."""
        return self.limit, self.align, self.most, self.limits, self.overlong

    def fits(self, lengths: I64) -> bool:
        """Return whether one pack can hold samples of these lengths; a sample of length 0 is left out.

        ``lengths`` int64 [n]: tokens of each sample, without those that it shares with the sample before it.
        """
        tokens = int((-(-lengths // self.align) * self.align).sum())
        return tokens <= self.limit and (self.most is None or int((lengths > 0).sum()) <= self.most)


def terms_of(rules: Rules, later: int = 0) -> list[StreamTerms]:
    """Return the terms of every stream, in the order of the rules; ``later``: see ``StreamTerms``."""
    return [
        StreamTerms(
            **structs.asdict(stream), limit=rules.budget, barriers=rules.between_passes == "drain",
            align=rules.align.sample, most=rules.max_samples_per_pack, batches=rules.batch is not None,
            padded=rules.padded, share=rules.share, late=bool(rules.late_fields) and stream.pushed,
            media_fields=rules.media_fields, media_factors=rules.balance.media_factors,
            limits=rules.limits or NO_LIMITS, later=later,
        )
        for stream in rules.streams
    ]  # fmt: skip
