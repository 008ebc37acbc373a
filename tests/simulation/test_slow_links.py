"""Links that carry a part of a step in seconds: nothing is sent twice, and only so much waits for them."""

from __future__ import annotations

from collections import Counter

import pytest

from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.step_part import StepPart
from streampack.core.sessions.client_session import RETRY_S, ClientSession
from tests.simulation.world import Slow, World

SLOW = Slow(bytes_per_s=800.0, share=1.0, for_good=True)
PATIENCE_S = 450.0


@pytest.mark.parametrize("seed", range(12))
def test_over_a_slow_link_that_loses_nothing_every_part_is_sent_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _read_slowly(seed, monkeypatch)


def test_a_client_that_asks_again_because_time_has_passed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: this is what filled the queues of brokers."""
    keep_up = ClientSession._ping_and_request

    def impatient(self: ClientSession, now: float) -> list[Effect]:
        late = self.attached is not None and self._wants_steps() and now - self._get_again._due_at > -RETRY_S / 2
        return keep_up(self, now) + (self._request_missing() if late else [])

    monkeypatch.setattr(ClientSession, "_ping_and_request", impatient)
    with pytest.raises(AssertionError, match="was sent once more"):
        _read_slowly(0, monkeypatch)


def _read_slowly(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[tuple[bytes, int, int, int, int]] = Counter()
    to_peer = World.to_peer

    def counted(self: World, peer: bytes, envelope: Envelope) -> bool:
        message = envelope.message
        if isinstance(message, StepPart):
            part = peer, envelope.epoch, envelope.fence, message.step, message.part
            sent[part] += 1
            assert sent[part] == 1, f"after {len(sent)} parts, part {message.part} of a step was sent once more"
        return to_peer(self, peer, envelope)

    monkeypatch.setattr(World, "to_peer", counted)
    world = World(seed, slow=SLOW)
    world.quiet_at = PATIENCE_S
    outcome = world.run()
    assert outcome.seconds > 10.0, "the links are slow"
