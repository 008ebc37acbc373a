"""The broker daemon: it gives the pure broker of ``streampack.core`` its sockets, memory, threads and clock.

One thread owns both sockets, the arena and the core. It turns messages into events for the core, and performs the
effects that the core returns. A second thread runs FORM, in kernels without the GIL, and wakes the first when a step is
formed. HTTP and metrics read ``snapshot``, which is replaced whole.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import numpy as np

from streampack.config.daemon_settings import BrokerConfig
from streampack.core.broker import Broker
from streampack.core.deal import deal_kernels
from streampack.core.form import former as form
from streampack.core.intake import admission_kernels
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Append, Cut, Recall
from streampack.core.layout.boundaries import Contents
from streampack.core.layout.step_frames import EDGES, INPUT_IDS
from streampack.core.merge import schedule
from streampack.core.model.capacity import needed_tokens
from streampack.core.model.rule_changes import Ask
from streampack.core.protocol.effects import (
    Answer,
    Change,
    Drain,
    Form,
    Formed,
    FromProducer,
    FromTrainer,
    NotSent,
    Release,
    SendProducer,
    SendShard,
    SendTrainer,
    Store,
    Withdrawn,
)
from streampack.core.protocol.events import Effect, Event, Report, Tick
from streampack.core.protocol.message import Envelope, Reject
from streampack.core.protocol.relay_messages import relay_of, relayed
from streampack.core.protocol.result_messages import AskResults
from streampack.core.protocol.rights import KEY_DIGITS, key_of
from streampack.core.protocol.trainer_messages import AskState
from streampack.core.standby.arbiter_entries import Entry
from streampack.errors import ConfigError, InternalError, UserError, WireError
from streampack.transport.curve import Door
from streampack.transport.sockets import Poller, Router, drain
from streampack.transport.unread import (
    ANSWERS_WAIT,
    MESSAGES_WAIT,
    STRANGERS_BYTES,
    CutConnection,
    Unread,
    resident_bytes,
)
from streampack.transport.waker import Waker
from streampack.version import __version__
from streampack.wire import bundles
from streampack.wire import frames as wire
from streampack_services.broker.arena import Arena
from streampack_services.broker.authorization import Allowed
from streampack_services.broker.log_keeper import Keeper
from streampack_services.broker.memory_peak import peak
from streampack_services.broker.memory_plan import Plan, check_machine, give_back_memory, plan
from streampack_services.broker.report_limit import KEY_BURST, KEY_PER_SECOND, ReportLimit
from streampack_services.broker.reporter import Counters, Reporter
from streampack_services.broker.status import BrokerStatus
from streampack_services.broker.turns import Turns
from streampack_services.descriptors import num_free
from streampack_services.standby.arbiter import Arbiter
from streampack_services.standby.shipping import Shipping

log = logging.getLogger("streampack.broker")

TICK_S = 0.2
"""Time between two ticks of the core, in seconds."""
TURN_AT_MOST_S = 1.0
"""Most seconds that one turn adds to the core's clock; a longer turn means that the process was stopped."""
MANY_WARNINGS, TELL_MANY_S = 100, 600.0
"""Refused messages of a key after which the log has their number and the command that revokes the key. The log has them
again after so many seconds."""
TELL_REVOKED_S = 0.4
"""Seconds that peers of a revoked key have to read why they are rejected, before their connections are cut."""
TELL_CUT_S = 3.0
"""Seconds until the cut of a connection is logged, unless its key is blocked until then."""
SAY_S = 5.0
"""Time between two log lines about messages that cannot be decoded, in seconds."""
FAREWELL_S = 3.0
"""Time that producers have to disconnect at the end, in seconds. Otherwise they would wait for the broker forever."""
ON_THE_WAY_BYTES = 8 << 20
"""Bytes that peers may send beyond their credits, for requests and repeated messages."""
DRAIN_AT_MOST = 4096
"""Most messages that are read from one socket in a turn."""
WAITING_BYTES = 8 << 20
"""Most bytes of a key's messages that wait to be handled, beside the credit of producers and a snapshot."""
ALL_WAITING_BYTES = 32 << 20
"""Bytes of messages that wait, of all keys, beyond which each key has an equal share of them, beside these credits."""
TRIM_S, TRIM_BYTES = 10.0, 16 << 20
"""Seconds between two looks at the memory, and its growth after which freed memory is given back to the system."""
READ_S = HANDLE_S = 0.02
"""Seconds in a turn for which messages are handled as they come, lined up from each socket, and handled in order."""
UNREAD_ANSWERS_BYTES = 4 << 20
"""Most bytes of answers that wait for the connections of a key, beside the steps on their way."""


class Leadership(NamedTuple):
    """The entry of the arbiter with which a broker is active."""

    entry: Entry
    arbiter: Arbiter


class BrokerService:
    """One broker; ``run`` serves in the calling thread until the broker is drained.

    ``endpoints`` has the addresses, with ports, as soon as the object exists.

    Args:
        config: The broker's configuration.
        lead: The arbiter's entry with which this broker is active, if it has a standby.
        exit_when_finished: End ``run`` once all readers have left and every feed that was read has been read to its
            end.

    Raises:
        ConfigError: The memory is too small for the rules or more than the machine has, or the log belongs to another
            run.
        UserError: An address, the keys or the log cannot be used.
    """

    def __init__(
        self, config: BrokerConfig, *, exit_when_finished: bool = False, lead: Leadership | None = None
    ) -> None:
        self.config = config
        check_machine(config)
        self.plan = plan(config)
        capacity = self.plan.capacity
        self.counters = Counters(started=time.monotonic())
        self._say_damaged_at = 0.0
        self._lines = ReportLimit()
        self._version_answers = ReportLimit()
        self._exit_when_finished = exit_when_finished
        self._formed: deque[tuple[Formed, float] | BaseException] = deque()
        self._tokens = itertools.count()
        self._asked: deque[tuple[Change, Future[Answer]]] = deque()
        self._answers: dict[int, Future[Answer]] = {}
        self._drain_until: float | None = None
        self._copied_until: float | None = None
        """Time until which a broker that stops waits for the standby to copy the log."""
        self._drain_asked = threading.Event()
        self._stop_now = False
        self._hands_over = False
        """True once this broker ends and leaves its producers and trainers to the standby, without a goodbye."""
        self._events: deque[Event] = deque()
        self._bundled: dict[bytes, list[tuple[str, Envelope]]] = {}
        """Messages for the readers of each relay, which are sent together at the end of a turn."""
        self._to_form: SimpleQueue[Form | None] = SimpleQueue()
        """Requests for the thread that runs FORM; None ends it."""
        self._forming = threading.Thread(target=self._form_steps, name="streampack-form", daemon=True)
        self._allowed: Allowed | None = None
        self._turns = Turns(KEY_DIGITS if config.listen.keys is not None else 0)
        """Messages that have come, and whose is next."""
        self._speaking = b""
        """Connection of the message that is handled; empty outside."""
        self._warnings = Counter[str]()
        """Number of warnings about messages, by name of the key."""
        self._tell_many_at: dict[str, float] = {}
        """When their number may be logged again, by name of the key."""
        self._key_lines: dict[str, ReportLimit] = {}
        """Limits on the log lines about messages of a key, by the text that names the key."""
        self._revoked: deque[tuple[float, bytes]] = deque()
        """Revoked keys whose connections are to be cut, and when."""
        self._cut_lines: deque[tuple[float, bytes, str]] = deque()
        """Log lines about cut connections of keys: when they are due, the peer, and the text."""
        self._shipping: Shipping | None = None
        self.over = ""
        """The reason why ``run`` has ended, because another broker is active; empty if that is not the reason."""
        with contextlib.ExitStack() as opened:  # memory before sockets; what is open is closed if the rest fails
            self.arena = self._allocate()
            self._waker = Waker()
            opened.callback(self._waker.close)
            self.keeper = Keeper(config, self._waker.wake) if config.state_dir is not None else None
            if self.keeper is not None:
                opened.callback(self.keeper.close)
            self.core = Broker(
                run=config.run_id, epoch=time.time_ns() if lead is None else lead.entry.epoch,
                feeds=self.plan.feeds, capacity=capacity,
                steps_ahead=config.steps_ahead, journal=Journal(self.keeper is not None), run_name=config.run,
                outbids=lead is None,
            )  # fmt: skip
            if config.listen.keys is not None:
                self._allowed = Allowed(Path(config.listen.keys), self._waker.wake)
                opened.callback(self._allowed.close)
            if self.keeper is not None:
                self.keeper.recover(self.core)
            if lead is not None and self.keeper is not None and config.standby is not None:
                self._shipping = self.keeper.ship(
                    config.standby, config.run_id, lead.entry, lead.arbiter, config.digest, self._allowed
                )
                self.core.journal.safe_upto = self._shipping.safe_upto
            self._producers, self._trainers = self._listen()
            opened.callback(self._producers.close)
            opened.callback(self._trainers.close)
            sockets = [self._producers, self._trainers]
            sockets += [self._shipping.router] if self._shipping is not None else []
            self._poller = Poller(sockets, self._waker)
            self._reporter = Reporter(
                config.run, self.endpoints, self.core, self.plan, self.arena, self.keeper, self.counters
            )
            self.snapshot: BrokerStatus = self._reporter.take(self.counters.started)
            """Replaced twice a second; any thread may read it."""
            self.rank_page = self._reporter.rank_page
            opened.pop_all()
        self.on_snapshot: Callable[[BrokerStatus], None] = lambda _: None
        """Called with each snapshot, in the broker's thread."""
        self.on_endpoints: Callable[[], None] = lambda: None
        """Called in the broker's thread when ``all_endpoints`` has changed."""

    def _allocate(self) -> Arena:
        """Return an arena of the planned size; raise ConfigError if the system does not give the memory."""
        rules, size = self.plan.rules, self.plan.memory_bytes
        try:
            return Arena(size, rules.tokens, self.plan.block_tokens, rules.fields)
        except MemoryError:
            raise ConfigError(
                f"memory: got {self.config.memory}, but the system cannot allocate {size >> 20}MiB for this process. "
                f"Lower memory, or raise the limit (ulimit -v, vm.overcommit_memory)"
            ) from None

    def _listen(self) -> tuple[Router, Router]:
        """Bind the sockets; return the one for producers and the one for trainers."""
        largest = max(self.plan.capacity.max_chunk_bytes, 2 << 20)
        door = Door(self._allowed.key.secret, self._allowed.admits) if self._allowed is not None else None
        capacity, expected = self.plan.capacity, peak(self.config, self.plan)
        slack = expected.leaving + expected.tables
        partitions = sum(stream.partitions for feed in self.plan.feeds for stream in feed.rules.streams)
        credit = self._credit_bytes = capacity.quota_tokens * self.plan.token_bytes * partitions
        strangers = max(num_free() // 4, 1)  # of each address, and as many of HTTP
        unread = Unread(
            2 * credit + ON_THE_WAY_BYTES, STRANGERS_BYTES, self._known_bytes, slack, strangers,
            UNREAD_ANSWERS_BYTES, self._credit_of,
        )  # fmt: skip
        producers = Router(self.config.listen.producers, largest, door, unread)
        try:
            self._snapshot_bytes = largest = (1 << 20) + self._largest_snapshot()
            unread = Unread(
                4 * largest + ON_THE_WAY_BYTES, STRANGERS_BYTES, self._known_bytes, slack, strangers,
                self.plan.leaving_bytes + UNREAD_ANSWERS_BYTES, self._snapshot_credit_of,
            )  # fmt: skip
            return producers, Router(self.config.listen.trainers, largest, door, unread)
        except Exception:
            producers.close()
            raise

    def _known_bytes(self) -> int:
        """Return the bytes of the arena, and of messages that wait, which limits on unread messages do not count."""
        return self.arena.touched_bytes + self._turns.num_bytes

    def _credit_of(self, peer: bytes) -> int:
        """Return the bytes of samples that a producer, or the producers of a key, may send ahead: 0 without a lease."""
        key = key_of(peer) if self._allowed is not None else peer
        has_lease = any(each.peer.startswith(key) for each in self.core.leases.producers)
        return self._credit_bytes if has_lease else 0

    def _snapshot_credit_of(self, peer: bytes) -> int:
        """Return the bytes of a snapshot if a trainer, or one with its key, was asked for one; else 0."""
        key = key_of(peer) if self._allowed is not None else peer
        return self._snapshot_bytes if self.core.expects_snapshot_from(key) else 0

    def _largest_snapshot(self) -> int:
        """Return the most bytes of a snapshot in a checkpoint: about 48 for each sample that a feed may hold."""
        sample = self.plan.capacity.max_sample_tokens
        held = max(
            needed_tokens(feed.rules, sample) if feed.rules.batch is None else feed.merged_tokens
            for feed in self.plan.feeds
        )
        return min(48 * held, wire.MAX_META_BYTES)

    @property
    def endpoints(self) -> dict[str, str]:
        """Addresses of the sockets, with ports, by ``producers`` and ``trainers``."""
        return {"producers": self._producers.endpoint, "trainers": self._trainers.endpoint}

    @property
    def all_endpoints(self) -> dict[str, str]:
        """The addresses of ``endpoints``, each with that of the standby behind it, separated by a comma."""
        standby = self._shipping.standby_addresses if self._shipping is not None else {}
        return {side: ",".join([own, *filter(None, [standby.get(side)])]) for side, own in self.endpoints.items()}

    def drain(self) -> None:
        """Serve the steps that are formed, then stop; a second call stops at once.

        With a standby that may take over, stop at once: producers and trainers move to it. A standby that still copies
        the log gets half of ``drain_timeout`` to do so. Otherwise none would serve after this broker.

        Safe in any thread and in signal handlers.
        """
        if self._drain_asked.is_set():
            self._stop_now = True
        self._drain_asked.set()
        self._waker.wake()

    def ask(self, feed: str, ask: Ask, at_step: int | None, note: str) -> Future[Answer]:
        """Ask the core to change a feed while it runs. Safe in any thread.

        Args:
            feed: Name of the feed.
            ask: The change.
            at_step: Step at which the change takes effect; None: as early as possible.
            note: A person's reason, which is recorded with the change.

        Returns:
            The core's answer. It is canceled if the broker ends before.
        """
        future: Future[Answer] = Future()
        self._asked.append((Change(next(self._tokens), feed, ask, at_step, note), future))
        self._waker.wake()
        return future

    def warm_up(self) -> None:
        """Compile or load the kernels, so that the first step is as fast as the others."""
        warm_up(self.plan)

    def run(self) -> None:
        """Serve until the broker is drained, then close sockets, log and threads."""
        try:
            self.warm_up()
            self._forming.start()
            self._perform_all(self.core.begin())
            self._ticked = time.monotonic()
            self._handle(Tick(self._clock))
            self.counters.ready = True
            self._publish(self._reporter.take(time.monotonic()))
            log.info("ready")
            while not self._done():
                self._turn(TICK_S)
            if self.over:
                return
            if self._allowed is not None:
                self._tell_cuts(self._allowed, math.inf)
            if not self._hands_over:
                self._say_goodbye()
            if self._shipping is not None:
                self._keep_log()
                self._shipping.leave(self._exit_when_finished and self.core.finished)
        except UserError:
            raise
        except Exception as bug:
            bug.add_note(self.core.recent.text)  # for the report of the bug, below the traceback
            raise
        finally:
            self.close()

    def _say_goodbye(self) -> None:
        """Tell producers that the broker ends, and wait a little until they have left."""
        if not self.core.draining:
            self._handle(Drain())  # producers with nothing left to send wait for this
        until = time.monotonic() + FAREWELL_S
        while self.core.leases.num_producers and time.monotonic() < until and not self._stop_now:
            self._turn(TICK_S)

    def close(self) -> None:
        """Close the sockets and end the threads; idempotent."""
        self.counters.ready = False
        if self._forming.is_alive():
            self._to_form.put(None)
            self._forming.join()
        self._producers.close()
        self._trainers.close()
        self._waker.close()
        for future in [*self._answers.values(), *(future for _, future in self._asked)]:
            future.cancel()
        if self.keeper is not None:
            self.keeper.close()
        if self._allowed is not None:
            self._allowed.close()

    def _done(self) -> bool:
        """Return True if ``run`` is to end."""
        if self.over or self._stop_now or self._hands_over or (self._exit_when_finished and self.core.finished):
            return True
        if self._drain_until is None:
            return False
        return not self.core.num_readers or time.monotonic() > self._drain_until

    _trim_at, _trimmed_bytes, _trims_again = 0.0, 0, False
    _ticked = 0.0
    _clock = 0.0
    """The core's time, in seconds. It stands still while the process is suspended, so that no peer times out."""

    def _turn(self, timeout_s: float = 0.0) -> None:
        """Run one turn of the main loop: wait up to ``timeout_s`` for messages or a wake-up, then handle everything."""
        self._poller.wait(0.0 if self._turns else timeout_s)
        now = time.monotonic()
        ticks = now - self._ticked >= TICK_S
        if ticks:
            self._clock += min(now - self._ticked, TURN_AT_MOST_S)
            self._ticked = now
            self._handle(Tick(self._clock))
            if self._allowed is not None:
                self.counters.strangers = self._allowed.refused
            if (snapshot := self._reporter.tick(now)) is not None:
                self._publish(snapshot)
            if now >= self._trim_at:
                self._give_back_memory(now)
        self._take_messages()
        self._handle_messages()
        self._take_formed()
        self._keep_log()
        if self._shipping is not None:
            known = self._shipping.standby_addresses
            self._shipping.turn(self._clock if ticks else None)
            self._keep_log()
            if self._shipping.standby_addresses != known:
                self.on_endpoints()
            self.over = self._shipping.over
        if self._allowed is not None:
            self._withdraw_keys(self._allowed, now)
            self._tell_cuts(self._allowed, now)
        while self._asked:
            change, future = self._asked.popleft()
            self._answers[change.token] = future
            self._handle(change)
        if self._drain_asked.is_set() and self._drain_until is None:
            self._begin_to_stop(now)
            if self._hands_over:
                return
        self._send_all_bundles()

    def _begin_to_stop(self, now: float) -> None:
        """Hand over to the standby, wait for one that copies the log, or drain."""
        self.counters.ready = False
        if self._shipping is not None and self._shipping.may_hand_over:
            self._hands_over = True
            log.info("stopping: the standby takes over, and producers and trainers move to it")
            return
        half_s = self.config.drain_timeout_s / 2
        if self._shipping is not None and self._shipping.lets_in:
            if self._copied_until is None:
                self._copied_until = now + half_s
                log.info("stopping: waiting at most %.0f s until the standby has copied the log", half_s)
            if now < self._copied_until:
                return
        drain_s = self.config.drain_timeout_s if self._copied_until is None else half_s
        self._drain_until = now + drain_s
        log.info("draining: serving the steps that are formed, for at most %.0f s", drain_s)
        self._handle(Drain())
        self._publish(self._reporter.take(now))

    def _give_back_memory(self, now: float) -> None:
        """Give freed memory back to the system, if the process has grown much since the last time.

        Do it once more when no messages wait: only then is the memory of a flood free.
        """
        self._trim_at = now + TRIM_S
        has_grown = resident_bytes() > self._trimmed_bytes + TRIM_BYTES
        if has_grown or (self._trims_again and not self._turns):
            give_back_memory()
            self._trims_again = has_grown
        self._trimmed_bytes = resident_bytes() if has_grown else min(self._trimmed_bytes, resident_bytes())

    def _take_messages(self) -> None:
        """Handle the messages that come within ``HANDLE_S``, in the order of the sockets; later ones line up."""
        began = now = time.perf_counter()
        for router, kind in ((self._trainers, FromTrainer), (self._producers, FromProducer)):
            until = max(now, began + HANDLE_S) + READ_S
            for frames in drain(router, DRAIN_AT_MOST):
                if self._turns or now > began + HANDLE_S:
                    self._line_up(router, frames, kind)
                else:
                    self._receive(router, frames, kind)
                    self._take_formed()
                if (now := time.perf_counter()) > until:
                    break
            for cut in router.take_cuts():
                self._turns.drop(cut.peer)
                self._on_cut(cut)

    def _take_formed(self) -> None:
        """Hand the results of FORM to the core."""
        while self._formed:
            self._on_formed(self._formed.popleft())

    def _line_up(self, router: Router, frames: list[Any], kind: type[FromProducer] | type[FromTrainer]) -> None:
        """Put a message into the line of its connection, unless too much of its key waits."""
        peer, num_bytes = frames[0].bytes, sum(memoryview(frame).nbytes for frame in frames)
        message = router, frames, kind
        if self._turns.put(peer, message, num_bytes, WAITING_BYTES, ALL_WAITING_BYTES):
            return
        credit = self._credit_of(peer) if kind is FromProducer else self._snapshot_credit_of(peer)
        if not credit or not self._turns.put(peer, message, num_bytes, WAITING_BYTES + credit):
            router.note_dropped(peer, bundles.num_messages(frames[1:]), MESSAGES_WAIT)

    def _handle_messages(self) -> None:
        """Handle messages for ``HANDLE_S``, in the order of ``Turns``."""
        began = now = time.perf_counter()
        while self._turns and now - began < HANDLE_S:
            if (message := self._turns.take()) is not None:
                self._receive(*message)
            self._take_formed()
            before, now = now, time.perf_counter()
            self._turns.give(now - before)

    def _withdraw_keys(self, allowed: Allowed, now: float) -> None:
        """Remove the peers of keys whose rights have changed; cut connections of revoked keys once they were told."""
        for key in allowed.take_changed_keys():
            revoked = allowed.rights(key).role == "none"
            self._handle(Withdrawn(key, revoked))
            if revoked:
                self._revoked.append((now + TELL_REVOKED_S, key))
        while self._revoked and self._revoked[0][0] <= now:
            _, key = self._revoked.popleft()
            if allowed.rights(key).role == "none":
                shipping = [self._shipping.router] if self._shipping is not None else []
                for router in (self._producers, self._trainers, *shipping):
                    router.cut_key(key)

    def _publish(self, snapshot: BrokerStatus) -> None:
        """Replace ``snapshot`` and call ``on_snapshot``."""
        self.snapshot = snapshot
        self.on_snapshot(snapshot)

    def _on_cut(self, cut: CutConnection) -> None:
        """Count and log a connection that the router has cut, and count the cut against the key of the peer."""
        self.counters.cut += 1
        if self._allowed is None or not cut.peer:
            self._report(Report("warning", f"cut the connection of {cut.address}: {cut.why}"))
            return
        text = f"cut the connection of {cut.address} (key {self._allowed.name(cut.peer)!r}): {cut.why}"
        if self._allowed.rights(cut.peer).role == "none":  # its key was revoked
            self._report(Report("warning", text))
            return
        self._allowed.note_cut(cut.peer, cut.why)
        self._cut_lines.append((time.monotonic() + TELL_CUT_S, cut.peer, text))

    def _tell_cuts(self, allowed: Allowed, now: float) -> None:
        """Log the cuts of keys, unless the key was blocked since: then the log has its name and the reason already."""
        while self._cut_lines and self._cut_lines[0][0] <= now:
            _, peer, text = self._cut_lines.popleft()
            if not allowed.is_shut_out(key_of(peer).decode("ascii", "replace")):
                self._report(Report("warning", text))

    def _receive(self, router: Router, frames: list[Any], kind: type[FromProducer] | type[FromTrainer]) -> None:
        """Decode a message and hand it to the core as an event of ``kind``; count a message that cannot be decoded."""
        peer = frames[0].bytes
        try:
            if kind is FromTrainer and bundles.is_bundle(frames[1:]):
                received = [(relayed(peer, name), each) for name, each in bundles.decode_bundle(frames[1:])]
            else:
                received = [(peer, wire.decode(frames[1:]))]
        except WireError as error:
            self.counters.damaged += 1
            router.note_damaged(peer)
            if time.monotonic() >= self._say_damaged_at:  # anyone who reaches the port may send many
                self._say_damaged_at = time.monotonic() + SAY_S
                of = "" if self._allowed is None else f" of key {self._allowed.name(peer)!r}"
                log.warning(
                    "dropped a message%s that cannot be decoded (%d so far): %s", of, self.counters.damaged, error
                )
            if isinstance(error, wire.OtherVersion):
                self._refuse_version(peer, error.version, kind)
            return
        rights = self._allowed.rights(peer) if self._allowed is not None else None
        self._speaking = peer
        for address, envelope in received:
            if isinstance(envelope.message, AskResults | AskState) and not router.takes_answers(peer):
                router.note_dropped(peer, 1, ANSWERS_WAIT)  # the answer takes long to make, and would be dropped
            else:
                self._handle(kind(address, envelope, rights))
        self._speaking = b""

    def _refuse_version(self, peer: bytes, version: int, kind: type[FromProducer] | type[FromTrainer]) -> None:
        """Reject a peer of another protocol version, in a message whose header has the peer's version."""
        if not self._version_answers.allows(time.monotonic()):
            return
        detail = (
            f"this process uses protocol version {version}, but the broker (streampack {__version__}) uses version "
            f"{wire.VERSION}. Install the same version of streampack everywhere"
        )
        reject = Reject(code="version", detail=detail)
        answer = Envelope(run=self.core.run, epoch=self.core.epoch, fence=0, message=reject)
        router = self._producers if kind is FromProducer else self._trainers
        self.counters.unsent += not router.send(peer, wire.encode(answer, version))

    def _on_formed(self, found: tuple[Formed, float] | BaseException) -> None:
        """Hand the result of FORM to the core, or raise its error."""
        if isinstance(found, BaseException):
            raise found
        self.counters.form_seconds += found[1]
        self._handle(found[0])

    def _handle(self, event: Event) -> None:
        """Hand an event to the core and perform the effects that it returns."""
        self._perform_all(self.core.handle(event))

    def _perform_all(self, effects: list[Effect]) -> None:
        """Perform effects, then handle the events that they cause."""
        for effect in effects:
            self._perform(effect)
        while self._events:
            for effect in self.core.handle(self._events.popleft()):
                self._perform(effect)

    def _send_all_bundles(self) -> None:
        """Send the messages that wait for the readers of relays."""
        for relay in list(self._bundled):
            self._send_bundles(relay)

    def _keep_log(self) -> None:
        """Write appended records to the log, and tell the core which are safe."""
        journal = self.core.journal
        for event in self.keeper.take_events(journal.safe_upto, journal.stalled, journal.full) if self.keeper else ():
            self._handle(event)

    def _perform(self, effect: Effect) -> None:
        """Perform one effect of the core."""
        if isinstance(effect, Store):
            self.arena.store(effect.handles, effect.offsets, effect.lengths, effect.rows, effect.payload)
            if effect.media_bounds is not None:
                self.arena.store_media(effect.handles, effect.media_bounds, effect.media)
        elif isinstance(effect, SendShard):
            self._send_shard(effect)
        elif isinstance(effect, SendTrainer):
            self._send_trainer(effect.peer, effect.envelope)
        elif isinstance(effect, SendProducer):
            self.counters.unsent += not self._producers.send(effect.peer, wire.encode(effect.envelope))
        elif isinstance(effect, Release):
            self.arena.release(effect.handles)
        elif isinstance(effect, Form):
            self._to_form.put(effect)
        elif isinstance(effect, Append | Recall | Cut):
            self._perform_on_log(effect)
        elif isinstance(effect, Answer):
            future = self._answers.pop(effect.token)
            if future.set_running_or_notify_cancel():  # false if the caller has given up
                future.set_result(effect)
        elif isinstance(effect, Report):
            self._report(effect)
        else:
            raise InternalError(f"the service cannot perform effect {type(effect).__name__}")

    def _report(self, report: Report) -> None:
        """Log a report of the core; leave it out if peers cause too many lines, unless it is an error.

        With keys, a warning about a message names its key.
        """
        of = self._note_warning() if report.level == "warning" else ""
        now = time.monotonic()
        if of and not self._key_lines.setdefault(of, ReportLimit(KEY_BURST, KEY_PER_SECOND)).allows(now):
            return
        if report.level != "error" and not self._lines.allows(now):
            return
        limits = (self._lines, *self._key_lines.values())
        if held_back := sum(limit.take_held_back() for limit in limits):
            log.warning("suppressed %d log lines that peers caused", held_back)
        log.log(logging.getLevelName(report.level.upper()), report.text + of, extra={"about": report.about})

    def _note_warning(self) -> str:
        """Count a warning against the key of the message that is handled; return a text that names the key.

        After many, log their number and the command that ends the key's connections.
        """
        if self._allowed is None or not self._speaking:
            return ""
        name = self._allowed.name(self._speaking)
        self._warnings[name] += 1
        count, now = self._warnings[name], time.monotonic()
        if count >= MANY_WARNINGS and now >= self._tell_many_at.get(name, 0.0):
            self._tell_many_at[name] = now + TELL_MANY_S
            log.warning(
                "key %r: %d of its messages were refused so far. To end its connections, run 'streampack keys revoke "
                "%s %s'", name, count, self.config.listen.keys, name,
            )  # fmt: skip
        return f" (key {name!r})"

    def _perform_on_log(self, effect: Append | Recall | Cut) -> None:
        """Perform one effect of the core on the log."""
        if self.keeper is None:
            raise InternalError(f"got effect {type(effect).__name__}, but the broker has no log")
        if isinstance(effect, Append):
            self.keeper.append(effect)
        elif isinstance(effect, Recall):
            self._events.append(self.keeper.recall(effect))
        else:
            self.keeper.trim(effect.lsn)

    def _send_shard(self, effect: SendShard) -> None:
        """Copy the shards of a message out of the arena and send them."""
        envelope = effect.envelope
        room = functools.partial(self._trainers.room, effect.peer)
        payload = self.arena.gather(effect.contents, effect.frames, effect.cp, effect.cp_ranks, effect.layout, room)
        whole = Envelope(
            run=envelope.run, epoch=envelope.epoch, fence=envelope.fence, message=envelope.message, payload=payload
        )
        self._send_trainer(effect.peer, whole)
        if INPUT_IDS in effect.frames:
            self.counters.sent_tokens += payload[0].size

    def _send_trainer(self, peer: bytes, envelope: Envelope) -> None:
        """Send a message to a trainer; tell the core if it cannot be sent. Readers of a relay get theirs together."""
        if (at := relay_of(peer)) is not None:
            self._bundled.setdefault(at[0], []).append((at[1], envelope))
            return
        if peer in self._bundled:  # connections keep the order of messages
            self._send_bundles(peer)
        if not self._trainers.send(peer, wire.encode(envelope)):
            self.counters.unsent += 1
            self._events.append(NotSent(peer, msgspec.structs.replace(envelope, payload=())))

    def _send_bundles(self, relay: bytes) -> None:
        """Send the messages that wait for the readers of a relay. A lost one does no harm: peers repeat themselves."""
        for frames in bundles.encode_bundles(self._bundled.pop(relay)):
            self.counters.unsent += not self._trainers.send(relay, frames)

    def _form_steps(self) -> None:
        """Run the packer for each queued request, until the queue gives None; called in a separate thread."""
        while (form := self._to_form.get()) is not None:
            try:
                self._formed.append(_form_step(form))
            except BaseException as error:
                self._formed.append(error)
            self._waker.wake()


def warm_up(plan: Plan) -> None:
    """Compile or load the kernels of a broker with this ``plan``."""
    for feed in plan.feeds:
        schedule.warm_up(feed.rules)
        form.warm_up(feed.rules)
    deal_kernels.warm_up()
    admission_kernels.warm_up()
    rules, zero, lengths = plan.rules, np.zeros(1, np.int64), np.full(1, 8)
    trial = Arena(8 * 64 * rules.token_bytes, rules.tokens, 64, rules.fields)
    sizes = [8 * np.dtype(rules.tokens).itemsize]
    sizes += [field.value_bytes * (8 if field.axis == "token" else 1) for field in rules.fields]
    trial.store(zero, zero, lengths, zero, tuple(bytes(size) for size in sizes))
    names = [INPUT_IDS, EDGES, *(field.name for field in rules.fields)]
    trial.gather(Contents(zero, np.array([1]), np.array([16]), lengths), names, 2, (0,), "zigzag")
    trial.release(zero)


def _form_step(form: Form) -> tuple[Formed, float]:
    """Choose the packs of a step; return them with the time that took, in seconds."""
    began = time.perf_counter()
    choice = form.request.choose()
    return Formed(form.feed, choice, form.request), time.perf_counter() - began
