"""The mixture of a feed's streams: the weights in force, and what was trained of each stream."""

from __future__ import annotations

from collections.abc import Sequence

from streampack.core.feed.planner import Planner
from streampack.core.intake.intake import Intake
from streampack.core.intake.leases import Leases
from streampack.core.journal.history import History
from streampack.core.protocol.trainer_messages import MixedStream
from streampack.core.serve.served_steps import ServedSteps


class FeedMixture:
    """The mixture of one feed, whose steps ``planner`` forms and ``steps`` serves."""

    def __init__(self, planner: Planner, history: History, steps: ServedSteps, leases: Leases) -> None:
        self._planner, self._history, self._steps, self._leases = planner, history, steps, leases

    def streams(self) -> list[MixedStream]:
        """Return all streams in the order of their numbers, also those that a requested change adds later."""
        planner, partitions = self._planner, self._leases.partitions
        latest, merge = planner.live.latest.streams, planner.merge.current
        current = planner.live.current.streams
        streams = (*current, *latest[len(current) :])
        shares: list[float | None] = [0.0] * len(streams)
        if planner.live.latest.merge == "arrival":
            shares = [None] * len(streams)
        else:
            gives = merge.giving_streams.tolist()
            now = planner.live.current.shares_at(planner.former.next_step)
            weights = [weight * more for weight, more in zip(now, gives, strict=False)]
            shares[: len(weights)] = [weight / (sum(weights) or 1.0) for weight in weights]
        ended = merge.ended_streams.tolist()
        samples, tokens = self._history.trained_before(self._steps.released_upto).tolist()
        rows = []
        for number, (stream, counts) in enumerate(zip(streams, planner.admission.counts, strict=False)):
            own = tokens[number] if number < len(tokens) else 0
            rows.append(
                MixedStream(
                    stream=stream.name,
                    weight=stream.weight,
                    share=shares[number],
                    ended=number < len(ended) and ended[number],
                    passes=None
                    if stream.pushed
                    else _passes(
                        [partitions.intakes[p] for p in partitions.of_stream(stream.name)],
                        partitions.begins.get(stream.name, (0,))[0],
                    ),
                    trained_samples=samples[number] if number < len(samples) else 0,
                    trained_tokens=own,
                    trained_share=own / sum(tokens) if sum(tokens) else None,
                    rejected=dict(counts.rejected),
                )
            )
        return rows


def _passes(intakes: Sequence[Intake], first: int) -> int:
    """Return the whole passes that have come of all partitions of a stream that have samples.

    ``first``: the pass in the cursor of the stream's first sample, which may have a mark.
    """
    of_each = (intake.cursor[0] - first if intake.cursor else 0 for intake in intakes if intake.total != 0)
    return min(of_each, default=0)
