"""The causes for which the merge of a feed waits for a partition, as texts for people."""

from __future__ import annotations

from streampack.core.feed.planner import Planner
from streampack.core.intake.leases import Leases
from streampack.core.model.rules import Rules
from streampack.core.serve.served_steps import ServedSteps
from streampack.core.stats.data_wait import Missing


class StreamWaits:
    """Explains the waits of one feed for its streams."""

    def __init__(self, feed: str, rules: Rules, planner: Planner, steps: ServedSteps, leases: Leases) -> None:
        self._feed, self._planner, self._steps, self._leases = feed, planner, steps, leases
        self._ends_by_marks = rules.batch is not None and rules.batch.samples is None
        """True if each batch ends where the pushing programs end it, instead of after a fixed number of samples."""

    def of(self, number: int) -> Missing:
        """Return why the next sample of partition ``number``, the feed's own number, is missing."""
        partitions, producers = self._leases.partitions, self._leases.producers
        p = partitions.of_feed(self._feed)[number]
        terms = partitions.stream_of[p].terms
        who, where = producers.describe(p), producers.pushed_from(p)
        end = f"end_of_batch call for batch {partitions.intakes[p].recorded.num_marks}"
        generates = False
        if lost := self._lost_text(p):
            text = lost
        elif late := self._late_text(p):
            text, generates = late, True
        elif self._ends_by_marks and where is not None:
            text, generates = f"the {end} of {self._name(p)} from the producer at {where}", True
        elif self._ends_by_marks:
            text = f"no {end} has come from {who}"
        elif terms.pushed and self._planner.merge.current.has_barriers:
            text = f"no sample and no {end} has come from {who}, but another partition ended this batch"
        elif terms.pushed and where is not None:
            text, generates = f"the next sample of {who}", True
        else:
            text = f"the next sample has not come from {who}"
        return Missing("stream", text, terms.name, batch=generates, lost=producers.is_lost(p))

    def _name(self, p: int) -> str:
        """Return ``stream 'web' partition 3``."""
        stream = self._leases.partitions.stream_of[p]
        return f"stream {stream.terms.name!r} partition {p - stream.first}"

    def _late_text(self, p: int) -> str:
        """Return a text that names the samples of partition ``p`` that wait for late fields; empty if none does."""
        waits = self._leases.staging.waiting([p])
        if waits is None or not waits.samples:
            return ""
        return (
            f"{waits.samples} samples of {self._name(p)}, which lack late fields. The oldest has waited "
            f"{waits.oldest_s:.0f} s for {', '.join(waits.fields)}"
        )

    def _lost_text(self, p: int) -> str:
        """Return an error text if the log lacks pushed samples of steps that trainers have already read; else empty."""
        partitions, begins = self._leases.partitions, self._steps.released_upto
        next_step = self._planner.former.next_step
        terms = partitions.stream_of[p].terms
        if not terms.pushed or partitions.intakes[p].behind or next_step >= begins:
            return ""
        return (
            f"samples that were pushed to stream {terms.name!r} are lost. Trainers continue at step {begins}, but the "
            f"log holds only the samples of steps before step {next_step}. Restore the state_dir that has the lost "
            f"samples, or start a new run."
        )
