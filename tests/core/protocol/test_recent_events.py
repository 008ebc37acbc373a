"""The last events of a broker, as a bug report shows them."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from streampack.core.broker import Broker
from streampack.core.model.capacity import Capacity, FeedPlan
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.protocol.effects import FromProducer
from streampack.core.protocol.events import Tick
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import ProducerPing
from streampack.core.protocol.recent_events import KEPT


def test_the_last_events_are_kept_without_their_payload() -> None:
    feed = FeedPlan("train", Rules(streams=(StreamRules("web"),)), 1 << 30)
    broker = Broker(run=1, epoch=5, feeds=[feed], capacity=Capacity(64, 16, 1 << 20))
    for second in range(KEPT + 50):
        broker.handle(Tick(float(second)))
    payload = np.zeros(8)
    gone = weakref.ref(payload)
    envelope = Envelope(run=1, epoch=5, fence=3, message=ProducerPing(producer="p"), payload=(payload,))
    broker.handle(FromProducer(b"x", envelope))
    del envelope, payload
    gc.collect()
    assert gone() is None
    lines = broker.recent.text.splitlines()
    assert lines[0] == f"the last {KEPT} events, the oldest first:"
    assert lines[1:] == [*(f"  Tick {float(second)}" for second in range(51, KEPT + 50)), "  ProducerPing b'x' 5 3"]
