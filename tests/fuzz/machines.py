"""Targets that are state machines: whatever is said to one, it raises nothing, and what it remembers is bounded."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np
from streampack_services.http.control import BODIES

from streampack.core.model.mesh import Mesh
from streampack.core.protocol.effects import Drain
from streampack.core.protocol.events import Effect, Event, FromBroker, Tick
from streampack.core.protocol.message import Envelope, Who
from streampack.core.protocol.producer_messages import Eos, Flow, Hello, Lease, Mark, Offer, ProducerPing, Revoke
from streampack.core.protocol.trainer_messages import AskMixture, AskState, Attach, Brought, Commit
from streampack.core.sessions.client_events import Again, Ask, Begin, Deliver, Returned, Waiting
from streampack.core.sessions.client_session import MOST_AHEAD, ClientSession
from streampack.core.sessions.producer_base import Failed
from streampack.core.sessions.producer_session import ProducerSession, Read
from streampack.core.sessions.pushing.push_buffer import PushBuffer, size_of
from streampack.core.sessions.pushing.push_session import PUSHED, EndBatch, Push, PushSession
from streampack.errors import WireError
from streampack.packs.build import build_step
from streampack.packs.slabs import Slabs
from streampack.wire import frames as wire
from tests.fuzz.engine import Target
from tests.fuzz.forms import JSON, MSGPACK, packed, unpacked
from tests.fuzz.stage import EPOCH, RUN, Honest, Stage, change, chunk_event, chunk_message, chunk_of, item, read_item

MOST_ITEMS = 200
MOST_TIMES = 400
"""Of time that goes on, in seconds, at once."""


@functools.cache
def honest() -> Honest:
    found = Honest()
    found.play()
    return found


def _items(data: bytes) -> list[list[Any]]:
    tree = unpacked(data)
    return [each for each in tree[:MOST_ITEMS] if isinstance(each, list) and each] if isinstance(tree, list) else []


def _seconds(given: Any) -> float:
    return min(abs(given), MOST_TIMES) if isinstance(given, int | float) and given == given else 0.5


# The broker


def _broker_seeds() -> list[bytes]:
    said = honest().said
    state = honest().stage.core.feeds["train"].state_of(4)
    snapshot = getattr(state, "snapshot", None)
    mesh = [Mesh(dp=2, dp_rank=rank) for rank in (0, 1)]
    attach = Attach(feed="train", knows_stages=True, reader="r", host="h", pid=1, mesh=mesh[0], next_step=0)
    replace = msgspec.structs.replace
    trainers = [
        attach, replace(attach, reader="s", mesh=mesh[1]), replace(attach, reader="t", feed="push", mesh=Mesh()),
        replace(attach, reader="u", mesh=Mesh(), next_step=4, chain=getattr(state, "chain", b""),
            snapshot_digest=snapshot.digest if snapshot is not None else b""),
        *([Brought(feed="train", digest=snapshot.digest, snapshot=snapshot)] if snapshot is not None else []),
        replace(attach, reader="v", mesh=Mesh(cp=2, tp=2)), AskState(feed="train", step=2),
        Commit(feed="train", step=2), AskMixture(feed="train"),
    ]  # fmt: skip
    offers = [Offer(stream="p", source_digest=PUSHED, partition=0)]
    pushed = [
        Hello(producer="x", host="h", pid=3, offers=offers), Hello(producer="y", host="h", pid=3, offers=offers),
        ProducerPing(producer="x"), Mark(stream="p", partition=0, number=0, seq=3, batch=0),
        Eos(stream="p", partition=0, total=3), ProducerPing(producer="x", failure="it broke"),
    ]  # fmt: skip
    group = [chunk_message("p", 0, 0, [3, 4, 5], keep="pack"), chunk_message("p", 0, 3, [9], policy_version=2)]
    pushing = [
        item(0, 3, _envelope(pushed[0])), item(0, 3, group[0]), item(0, 3, group[1]), *[
            item(0, 3 + (n == 1), _envelope(message)) for n, message in enumerate(pushed)
        ], ["t", 4.0], item(0, 4, _envelope(pushed[1])),
    ]  # fmt: skip
    reading = [item(1, 5 + n, _envelope(message)) for n, message in enumerate(trainers)]
    changes = [["c", path, body] for path, body in CONTROL]
    return [
        packed(said), packed(said[: len(said) // 2]), packed(pushing), packed([*reading, ["t", 2.0]]),
        packed([*pushing, *said[:20], *reading, ["t", 16.0], *reading, *changes]),
        packed([*said[:30], ["d"], *said[30:]]),
    ]  # fmt: skip


def _envelope(message: Any) -> Envelope:
    return Envelope(run=RUN, epoch=EPOCH, fence=0, message=message)


def _run_broker(data: bytes) -> None:
    stage = Stage()
    for given in _items(data):
        _happen(stage, given)
    stage.tick(20.0)
    stage.check()


def _happen(stage: Stage, given: list[Any]) -> None:
    what, *more = given
    if what == "m" and (message := read_item(given, stage.fences)) is not None:
        stage.hear(*message)
    elif what == "t":
        stage.tick(_seconds(more[0] if more else 0.5))
    elif what == "d":
        stage.handle(Drain())
    elif what == "c" and len(more) == 2 and isinstance(more[0], str) and more[0] in BODIES:
        _ask(stage, more[0], msgspec.json.encode(_plain(more[1])))


# What is asked of it over HTTP

CONTROL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/control/weights", {"feed": "train", "weights": {"a": 0.5, "b": 3.0}, "at_step": 6, "note": "x"}),
    ("/control/weights", {"feed": "train", "weights": {"a": 0}}),
    ("/control/streams", {"feed": "train", "add": {"c": {"weight": 2, "partitions": 2, "passes": 3}}, "remove": ["b"]}),
    ("/control/streams", {"feed": "push", "add": {"q": {"pushed": True, "poison": "drop", "overlong": "split"}}}),
    ("/control/skip", {"feed": "train", "steps": "2-3"}),
    ("/control/skip", {"feed": "train", "steps": "900719925474099-900719925474100", "note": ""}),
)


def _plain(tree: Any) -> Any:
    """What JSON can say of a tree."""
    if isinstance(tree, dict):
        return {str(key): _plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    return tree.hex() if isinstance(tree, bytes) else tree


def _ask(stage: Stage, path: str, body: bytes) -> None:
    try:
        asked = msgspec.json.decode(body, type=BODIES[path])
        ask = asked.ask()
    except ValueError:
        return
    stage.handle(change(1, ask, asked.at_step, asked.feed))


def _control_seeds() -> list[bytes]:
    return [JSON.write([path, body]) for path, body in CONTROL]


def _run_control(data: bytes) -> None:
    """The body to a broker that has streams, steps and a reader; and what follows."""
    for path in BODIES:
        try:
            msgspec.json.decode(data, type=BODIES[path]).ask()
        except ValueError:
            continue
    tree = JSON.read(data)
    if not (isinstance(tree, list) and len(tree) == 2 and isinstance(tree[0], str) and tree[0] in BODIES):
        return
    stage = Stage()
    said = honest().said
    for given in [*said[:12], ["c", *tree], *said[12:40]]:
        _happen(stage, given)
    stage.check()


# A client


def _client_seeds() -> list[bytes]:
    said = [_told(envelope) for envelope in honest().stage.told[b"2"]]
    where = [["t", 1.0], *said[:3], ["r", 1], *said[3:], ["r", 3], ["b", 0, 2], ["again"], ["ask", 2], *said[-3:]]
    return [packed([["t", 1.0], *said]), packed(where), packed([["again"], *where])]


def _told(envelope: Envelope) -> list[Any]:
    return item(1, 2, envelope)


def _run_client(data: bytes) -> None:
    client = ClientSession(run=0, feed="train", reader="reader", host="host", pid=1, mesh=Mesh(), prefetch=2)
    events = {"again": Again(), "wait": Waiting(True)}
    for given in _items(data):
        what, number = given[0], given[1] if len(given) > 1 and isinstance(given[1], int) else 1
        if what == "t":
            _perform(client, Tick(_seconds(number)))
        elif what == "m" and (message := read_item(given, {b"2": 1})) is not None:
            _perform(client, FromBroker(message[2]))
        elif what == "r" and client.attached is not None:
            _perform(client, Returned(min(abs(number), client.arrivals.have_upto)))
        elif what == "b":
            _perform(client, Begin(abs(number) % 2**62, b"", 1, 0, None))
        elif what == "ask":
            _perform(client, Ask(AskState(feed="train", step=abs(number) % 2**62)))
        elif isinstance(what, str) and what in events:
            _perform(client, events[what])
        assert client.arrivals.num_incomplete <= MOST_AHEAD
        assert all(len(assembly.parts) <= MOST_ITEMS for assembly in client.arrivals._assembling.values())


def _perform(client: ClientSession, event: Event) -> None:
    for effect in client.handle(event):
        if isinstance(effect, Deliver):
            try:
                build_step(effect.parts, effect.attached, client.mesh, Slabs())
            except WireError:
                continue
        elif hasattr(effect, "envelope"):
            wire.encode(effect.envelope)


def _step_seeds() -> list[bytes]:
    found = []
    for step in honest().steps[:6]:
        attached = msgspec.to_builtins(step.attached, builtin_types=(bytes,))
        found.append(packed([attached, [_told(part) for part in step.parts], [1, 1]]))
    return found


def _run_step(data: bytes) -> None:
    """A step's messages to a pack's arrays: ``build_step`` raises WireError, or makes what its message says."""
    tree = unpacked(data)
    if not isinstance(tree, list) or len(tree) != 3 or not isinstance(tree[1], list):
        return
    try:
        attached = msgspec.convert(tree[0], type=type(honest().steps[0].attached), builtin_types=(bytes,))
        cp, rank = tree[2]
        mesh = msgspec.convert({"cp": cp, "cp_rank": rank - 1}, type=Mesh)
    except (msgspec.ValidationError, ValueError, TypeError):
        return
    if attached.rules.budget > 1 << 16 or mesh.cp > 64:
        return  # as large as it says: whose rules it goes by is believed
    parts = [read[2] for given in tree[1][:8] if (read := read_item(given, {})) is not None]
    try:
        step = build_step(parts, attached, mesh, Slabs())
    except WireError:
        return
    for pack in step.packs:
        assert int(pack.cu_seqlens[-1]) <= sum(lengths := np.diff(pack.cu_seqlens_padded).tolist())
        assert pack.num_segments == len(lengths)


# Producers


def _producer_seeds() -> list[bytes]:
    said = [item(0, 0, envelope) for peer in (b"0", b"1") for envelope in honest().stage.told[peer]]
    lease = next(e.message for e in honest().stage.told[b"0"] if isinstance(e.message, Lease))
    mine = msgspec.structs.replace(lease, stream="p", partition=0)
    flow = Flow(stream="p", partition=0, expected_seq=3, grant_seq=100, grant_bytes=1 << 20, durable_seq=2)
    pushed = [
        mine, flow, msgspec.structs.replace(flow, expected_seq=6, durable_seq=6, durable_marks=1), Who(),
        Revoke(stream="p", partition=0), msgspec.structs.replace(mine, first_seq=6), flow,
    ]  # fmt: skip
    told = [item(0, 0, msgspec.structs.replace(_envelope(message), fence=1)) for message in pushed]
    return [
        packed([["t", 1.0], *said]),
        packed([["t", 1.0], ["p", 3], *told[:2], ["e", 1], ["p", 9], *told[2:], ["t", 2]]),
    ]


def _run_producer(data: bytes) -> None:
    """Both kinds of producers, that hear the same."""
    offers = [Offer(stream=name, source_digest="data") for name in ("a", "b")]
    reads = ProducerSession(run=0, producer="x", host="h", pid=1, offers=offers)
    pushes = PushSession(
        run=0, producer="x", host="h", pid=1, process=1, stream="p", partition=0, buffer=PushBuffer(1 << 16)
    )
    for given in _items(data):
        what, number = given[0], given[1] if len(given) > 1 and isinstance(given[1], int) else 1
        if what == "t":
            event: Event = Tick(_seconds(number))
        elif what == "m" and (read := read_item(given, {})) is not None:
            event = FromBroker(msgspec.structs.replace(read[2], fence=abs(given[6])))
        elif what == "p":
            if pushes.room(
                size_of(chunk := chunk_event(("p", 0), 0, [abs(number) % 50], cursor=(0, 0, 0), rejected={}))
            ):
                _sent(pushes.handle(Push(chunk)))
            continue
        elif what == "e":
            _sent(pushes.handle(EndBatch(abs(number))))
            continue
        elif what == "f":
            event = Failed("it broke")
        else:
            continue
        _sent(pushes.handle(event))
        asked = [effect for effect in _sent(reads.handle(event)) if isinstance(effect, Read)]
        for effect in asked:
            _sent(reads.handle(chunk_of(effect)))


def _sent(effects: list[Effect]) -> list[Effect]:
    """Effects; what is to be sent can be."""
    for effect in effects:
        if hasattr(effect, "envelope"):
            wire.encode(effect.envelope)
    return effects


TARGETS = (
    Target("broker", MSGPACK, _broker_seeds, _run_broker),
    Target("control", JSON, _control_seeds, _run_control),
    Target("client", MSGPACK, _client_seeds, _run_client),
    Target("step", MSGPACK, _step_seeds, _run_step),
    Target("producer", MSGPACK, _producer_seeds, _run_producer),
)
