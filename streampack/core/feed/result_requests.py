"""Messages about results: policies that trainers publish, values that they report, and requests of subscribers."""

from __future__ import annotations

from collections.abc import Callable

from streampack.core.feed.live_rules import LiveRules
from streampack.core.intake.leases import Leases
from streampack.core.journal.history import History
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_records import PolicyPublished
from streampack.core.model.bounded import MOST_VERSION
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Envelope, Identity
from streampack.core.protocol.result_messages import ABOUT_RESULTS, AskResults, Publish, ReportValues
from streampack.core.results.step_values import StepValues
from streampack.core.serve.readers import Readers


class ResultRequests:
    """Handles the messages about results of one feed.

    ``results`` keeps the values. The function ``safe`` handles the feed's records that are safe now.
    """

    def __init__(
        self, identity: Identity, feed: str, live: LiveRules, history: History, readers: Readers, results: StepValues,
        journal: Journal, leases: Leases, safe: Callable[[int], list[Effect]],
    ) -> None:  # fmt: skip
        self._identity, self._feed, self._live, self._history = identity, feed, live, history
        self._readers, self._results, self._journal, self._safe = readers, results, journal, safe
        self._credits = leases.credits
        self._ignored: int | None = None
        """Version of a published policy in the log that no trainer can have published."""

    def recover(self, published: PolicyPublished | None) -> None:
        """Take the last published policy from the log, unless no trainer can have published it.

        Earlier versions accepted numbers of any size.
        """
        possible = published is None or (
            published.version <= MOST_VERSION and published.attempt[0] <= self._identity.epoch
        )
        if possible:
            self._history.published = published
        elif published is not None:
            self._ignored = published.version

    def begin(self) -> list[Effect]:
        """Tell producers the policy that the log has."""
        if self._history.published is not None:
            self._credits.publish(self._history.published)
        if self._ignored is None:
            return []
        text = (
            f"feed {self._feed!r}: ignored policy version {self._ignored} in the log, because no trainer of this run "
            f"can have published it. Producers get the version that is published next"
        )
        return [Report("warning", text, feed=self._feed)]

    def receive(self, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """Handle a message about results, and return the answers."""
        self._results.subscribers.streams = [stream.name for stream in self._live.latest.streams]
        message = envelope.message
        return self._handlers[type(message)](self, message, peer, envelope, now)

    _handlers = Handlers[[bytes, Envelope, float], list[Effect]]()

    @_handlers.of(AskResults)
    def _on_ask(self, message: AskResults, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """Answer a subscriber."""
        return self._results.subscribers.ask(peer, message, now)

    @_handlers.of(ReportValues)
    def _on_values(self, message: ReportValues, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """Record the values that a rank reports."""
        if (refused := self._refuse_attempt(peer, message)) is not None:
            return refused
        steps, history = self._readers.steps, self._history
        samples = steps.samples_of(message.step, message.part, message.parts)
        served = max(steps.formed_upto, history.num_steps)  # also by an earlier broker
        return self._results.report(peer, message, envelope.payload, history.lineage, served, samples)

    @_handlers.of(Publish)
    def _on_publish(self, message: Publish, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """Record the version of a policy, unless it is known; answer once that is safe.

        Trainers that go back to a checkpoint begin a new attempt, whose versions may be lower. A process that takes a
        rank over stays in the attempt. It publishes again what was published at the steps that it repeats, and these
        versions change nothing.
        """
        if (refused := self._refuse_attempt(peer, message)) is not None:
            return refused
        if message.attempt[0] > self._identity.epoch:
            return []  # a standby has taken over. The rank repeats its message until it knows
        if text := self._impossible(message):
            return self._results.refuse(peer, message.number, text)
        effects, last = list[Effect](), self._history.published
        if last is None or (message.attempt, message.version) > (last.attempt, last.version):
            record = PolicyPublished(
                feed=self._feed, version=message.version, step=message.step, attempt=message.attempt
            )
            effects += self._journal.append(record)
            self._history.published = record
            self._credits.publish(record)
        self._results.note(peer, message.number)
        return effects + self._safe(self._journal.safe_upto) + self._credits.tell_published()

    def _impossible(self, message: Publish) -> str:
        """Return why no trainer can publish this version now; empty if one can."""
        if message.version > MOST_VERSION:
            return f"got policy version {message.version}, expected at most {MOST_VERSION}"
        attempts, last = self._readers.attempts, self._history.published
        upto = max(attempts.known_upto, self._history.num_steps)
        if message.attempt == (self._identity.epoch, attempts.number) and attempts.number and message.step > upto:
            return f"got a policy version for step {message.step}, expected at most step {upto}, which is formed next"
        if last is None or message.attempt != last.attempt or message.version >= last.version:
            return ""
        if message.step <= last.step:
            return ""
        return (
            f"got policy version {message.version}, but version {last.version} is published, expected a version "
            f"that is not lower. To publish a lower one, restart all ranks"
        )

    def _refuse_attempt(self, peer: bytes, message: Publish | ReportValues) -> list[Effect] | None:
        """Return the answer to a message that cannot be of the present attempt yet; None for any other message."""
        if self._results.is_unanswered(peer):
            return []  # the trainer repeats the message
        (epoch, attempt), present = message.attempt, self._readers.attempts.number
        if epoch != self._identity.epoch or attempt <= present:
            return None
        text = f"got attempt {attempt}, expected at most {present}, the present attempt"
        return self._results.refuse(peer, message.number, text)

    _handlers.require(ABOUT_RESULTS)
