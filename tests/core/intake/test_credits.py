"""Credits are said seldom, and always before a producer whose samples are waited for would have to stop."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.broker import Broker
from streampack.core.intake.intake import MAX_UNMERGED
from streampack.core.model.capacity import Capacity, FeedPlan
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.protocol.effects import Form, FromProducer
from streampack.core.protocol.events import Event, FromBroker, Send, Tick
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Flow, Offer, Samples
from streampack.core.sessions.producer_session import ProducerSession, Read, ReadFirst
from tests.world.chunks import chunk_of
from tests.world.shell import Sending, Shell, chosen

PARTITIONS = 2
BUDGET, MOST = 32, 64
"""Of a pack, and the tokens of the largest chunk."""


class Row(Shell):
    """Two producers and a broker; messages come at once, nothing is repeated, and packs are chosen when told."""

    def __init__(self, quota_chunks: int, chunks: list[list[int]]) -> None:
        rules = Rules(budget=BUDGET, packs=2, streams=(StreamRules(name="s", partitions=PARTITIONS),))
        capacity = Capacity(quota_chunks * MOST, BUDGET, 4 * MOST)
        feed = FeedPlan("train", rules, 1 << 30)
        super().__init__()
        self.start(Broker(run=1, epoch=1, feeds=[feed], capacity=capacity, steps_ahead=1 << 30))
        self.left, self.flows, self.sent = chunks, 0, 0
        self.reads: list[Read | None] = [None] * PARTITIONS
        self.holders = [0] * PARTITIONS
        self.forms: list[Form] = []
        self.producers: list[ProducerSession] = []
        for number in range(PARTITIONS):
            offers = [Offer(stream="s", source_digest="d")]
            self.producers.append(ProducerSession(run=0, producer=f"p{number}", host="h", pid=number, offers=offers))
            self.to_producer(number, Tick(0.0))

    def to_producer(self, number: int, event: Event) -> None:
        for effect in self.producers[number].handle(event):
            if isinstance(effect, Send):
                self.sent += isinstance(effect.envelope.message, Samples)
                self.handle(FromProducer(b"%d" % number, effect.envelope))
            elif isinstance(effect, Read):
                self.reads[effect.lease.partition] = effect
                self.holders[effect.lease.partition] = number

    def carry(self, effect: Sending, envelope: Envelope) -> bool:
        self.flows += isinstance(envelope.message, Flow)
        self.to_producer(int(effect.peer), FromBroker(envelope))
        return True

    def form(self, form: Form) -> None:
        self.forms.append(form)

    def read(self, partition: int) -> bool:
        """The producer's next chunk of a partition, if it asked for one and there is any left."""
        asked = self.reads[partition]
        if asked is None or not self.left[partition]:
            return False
        self.reads[partition] = None
        samples = [bytes(4)] * min(self.left[partition].pop(0), MOST)
        self.to_producer(self.holders[partition], chunk_of(("s", partition), samples, (0, 0, 0), session=asked.session))
        return True

    def choose(self) -> bool:
        """A packer's choice, if one was asked for."""
        if not self.forms:
            return False
        self.handle(chosen(self.forms.pop()))
        return True

    def check(self) -> None:
        """Who is waited for has nothing that it may not send."""
        blocked = self.core.feeds["train"].planner.blocked
        if blocked is not None and not self.forms:
            held = self.producers[self.holders[blocked]].held["s", blocked]
            assert held.chunk is None, "it holds a chunk for want of credit"


class ManyStreams(Shell):
    """A broker with streams of unequal weights, whose producer reads one sample at a time."""

    def __init__(self, streams: int, seed: int) -> None:
        super().__init__()
        names = [f"s{number}" for number in range(streams)]
        rules = Rules(
            budget=BUDGET,
            packs=4,
            window=8,
            seed=seed,
            streams=tuple(StreamRules(name=name, weight=1 + number % 7) for number, name in enumerate(names)),
        )
        self.start(Broker(run=1, epoch=1, feeds=[FeedPlan("train", rules, 1 << 30)],
                          capacity=Capacity(8 * MOST, BUDGET, 4 * MOST), steps_ahead=1 << 30))  # fmt: skip
        self.reads, self.num_read, self.wanted, self.formed = list[Read](), 0, 0, False
        offers = [Offer(stream=name, source_digest="d") for name in names]
        self.producer = ProducerSession(run=0, producer="p", host="h", pid=1, offers=offers)
        self.to_producer(Tick(0.0))

    def to_producer(self, event: Event) -> None:
        for effect in self.producer.handle(event):
            if isinstance(effect, Send):
                self.handle(FromProducer(b"p", effect.envelope))
            elif isinstance(effect, Read):
                self.reads.append(effect)
            elif isinstance(effect, ReadFirst):
                self.reads.sort(key=lambda read: (read.lease.stream, read.lease.partition) != effect.key)

    def carry(self, effect: Sending, envelope: Envelope) -> bool:
        self.wanted += isinstance(envelope.message, Flow) and envelope.message.wanted is True
        self.to_producer(FromBroker(envelope))
        return True

    def form(self, form: Form) -> None:
        self.formed = True

    def reads_to_the_first_step(self) -> int:
        """Read until the packer has what the first step needs."""
        while not self.formed:
            read = self.reads.pop(0)
            self.num_read += 1
            key = (read.lease.stream, read.lease.partition)
            self.to_producer(chunk_of(key, [bytes(4 * (1 + self.num_read % 8))], (0, 0, 0), session=read.session))
        return self.num_read


@given(st.integers(0, 99))
@settings(max_examples=5)
def test_a_producer_of_many_streams_reads_the_partitions_first_that_the_merge_waits_for(seed: int) -> None:
    many = ManyStreams(200, seed)
    assert many.reads_to_the_first_step() < 200
    assert many.wanted
    few = ManyStreams(8, seed)
    few.reads_to_the_first_step()
    assert not few.wanted


SIZES = st.lists(st.integers(1, MOST), max_size=40)


@given(st.integers(2, 6), st.tuples(SIZES, SIZES), st.lists(st.sampled_from(["0", "1", "form"])))
def test_no_producer_that_is_waited_for_wants_credit(
    quota: int, chunks: tuple[list[int], list[int]], script: list[str]
) -> None:
    row = Row(quota, [list(each) for each in chunks])
    for word in script:
        _ = row.choose() if word == "form" else row.read(int(word))
        row.check()
    while row.choose() or row.read(0) or row.read(1):
        row.check()
    assert not all(row.left), "one partition has been sent whole, and the other is waited for no more"


@given(st.integers(8, 64))
@settings(max_examples=20)
def test_credits_are_said_once_for_a_quarter_of_them(quota: int) -> None:
    count = 80
    row = Row(quota, [[MOST] * count, [MOST] * count])
    began = row.flows
    while row.choose() or row.read(0) or row.read(1):
        row.check()
    assert row.sent == 2 * count
    granted = min(quota * MOST, MAX_UNMERGED) // 4
    assert row.flows - began <= 2 * (count * MOST // granted + 1)
