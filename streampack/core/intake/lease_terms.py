"""The terms of a stream: the rules that its samples have to meet, as a lease tells them to a producer."""

from __future__ import annotations

from dataclasses import dataclass

from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64


@dataclass(frozen=True, slots=True)
class StreamTerms:
    """What the broker asks of a stream's producers: the rules' part of a lease."""

    name: str
    partitions: int
    limit: int
    """Tokens over which a sample is over-long."""
    passes: int | None = 1
    overlong: str = "error"
    poison: str = "error"
    barriers: bool = False
    """Passes are kept apart."""
    pushed: bool = False
    align: int = 1
    """Tokens that samples are padded to a multiple of."""
    most: int | None = None
    """Samples that a pack holds."""
    batches: bool = False
    """Steps are batches."""
    padded: bool = False
    """Nothing is packed."""

    def fits(self, lengths: I64) -> bool:
        """Does a pack hold samples of these lengths, int64 [n], 0 being none?"""
        tokens = int((-(-lengths // self.align) * self.align).sum())
        return tokens <= self.limit and (self.most is None or int((lengths > 0).sum()) <= self.most)


def terms_of(rules: Rules) -> list[StreamTerms]:
    """The terms of every stream of some rules, in their order."""
    drain = rules.between_passes == "drain"
    return [
        StreamTerms(
            each.name, each.partitions, rules.budget, each.passes, each.overlong, each.poison, drain, each.pushed,
            rules.align.sample, rules.max_samples_per_pack, rules.batch is not None, rules.padded,
        )
        for each in rules.streams
    ]  # fmt: skip
