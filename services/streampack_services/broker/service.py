"""The broker daemon: it gives the pure broker of ``streampack.core`` its sockets, memory, threads and clock.

One thread owns both sockets, the arena and the core. It turns messages into events for the core, and performs the
effects that the core returns. A second thread runs FORM, in kernels without the GIL, and wakes the first when a step is
formed. HTTP and metrics read ``snapshot``, which is replaced whole.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.stage_settings import StageSettings
from streampack.core.broker import Broker
from streampack.core.deal import deal_kernels
from streampack.core.deal.dynamic_cp import cp_plan
from streampack.core.form import former as form
from streampack.core.intake import admission_kernels
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Append, Cut, Recall
from streampack.core.layout.boundaries import Contents
from streampack.core.layout.step_frames import EDGES, INPUT_IDS
from streampack.core.merge import schedule
from streampack.core.model.keys.stage_keys import Stage
from streampack.core.model.mesh import DynamicCp
from streampack.core.model.rules import Rules
from streampack.core.protocol.effects import (
    Answer,
    Drain,
    Form,
    Formed,
    Release,
    SendProducer,
    SendShard,
    SendTrainer,
    Store,
)
from streampack.core.protocol.events import Effect, Event, Report, Tick
from streampack.core.protocol.rights import KEY_DIGITS
from streampack.core.standby.arbiter_entries import Entry
from streampack.errors import ConfigError, InternalError, UserError
from streampack.transport.sockets import Poller
from streampack.transport.waker import Waker
from streampack_services.broker.arena import Arena
from streampack_services.broker.changes.asked_changes import Asked, AskedChanges
from streampack_services.broker.changes.live_stage import live_stage
from streampack_services.broker.log_keeper import Keeper
from streampack_services.broker.memory_plan import FreedMemory, Plan, as_recorded, check_machine, plan
from streampack_services.broker.reporter import Counters, Reporter
from streampack_services.broker.serving.allowed_keys import Allowed
from streampack_services.broker.serving.kept_hours import KeptHours
from streampack_services.broker.serving.peer_messages import MessageReader, MessageSender
from streampack_services.broker.serving.peer_reports import PeerReports
from streampack_services.broker.serving.peer_sockets import PeerSockets
from streampack_services.broker.serving.step_times import StepTimer
from streampack_services.broker.serving.stopping import Stopping
from streampack_services.broker.status import BrokerStatus
from streampack_services.broker.turns import Turns
from streampack_services.standby.arbiter import Arbiter
from streampack_services.standby.shipping import Shipping

log = logging.getLogger("streampack.broker")

TICK_S = 0.2
"""Time between two ticks of the core, in seconds."""
TURN_AT_MOST_S = 1.0
"""Most seconds that one turn adds to the core's clock; a longer turn means that the process was stopped."""
FAREWELL_S = 3.0
"""Time that producers have to disconnect at the end, in seconds. Otherwise they would wait for the broker forever."""


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
        recorded: The rules of each feed as the log has them. Default: those of the log's first ``Base``.

    Raises:
        ConfigError: The memory is too small for the rules or more than the machine has, or the log belongs to another
            run.
        UserError: An address, the keys or the log cannot be used.
    """

    def __init__(
        self, config: BrokerConfig, *, exit_when_finished: bool = False, lead: Leadership | None = None,
        recorded: Mapping[str, Rules] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.config = config
        check_machine(config)
        self.plan = plan(config)
        self.counters = Counters(started=time.monotonic())
        self._exit_when_finished = exit_when_finished
        self._events: deque[Event] = deque()
        """Events that performing an effect has caused."""
        self._ticked = self._clock = 0.0
        """When the core's last tick was; and the core's time, in seconds. It stands still while the process is
        suspended, so that no peer times out."""
        self._freed = FreedMemory()
        self._packer = ThreadPoolExecutor(1, "streampack-form")
        self._forming: deque[Future[tuple[Formed, float]]] = deque()
        self.over = ""
        """The reason why ``run`` has ended, because another broker is active; empty if that is not the reason."""
        with contextlib.ExitStack() as opened:  # memory before sockets; what is open is closed if the rest fails
            self._waker = Waker()
            opened.callback(self._waker.close)
            self._changes = AskedChanges(self._waker.wake)
            opened.callback(self._changes.close)
            self.keeper = Keeper(config, self._waker.wake) if config.state_dir is not None else None
            if self.keeper is not None:
                opened.callback(self.keeper.close)
                self.plan = as_recorded(config, recorded or self.keeper.rules())
            self.arena = self._allocate()
            self.core = Broker(
                run=config.run_id, epoch=time.time_ns() if lead is None else lead.entry.epoch,
                feeds=self.plan.feeds, capacity=self.plan.capacity,
                steps_ahead=config.steps_ahead, journal=Journal(self.keeper is not None), run_name=config.run,
                outbids=lead is None,
            )  # fmt: skip
            self._allowed: Allowed | None = None
            if config.listen.keys is not None:
                self._allowed = Allowed(Path(config.listen.keys), self._waker.wake)
                opened.callback(self._allowed.close)
            if self.keeper is not None:
                self.keeper.recover(self.core)
            self._shipping: Shipping | None = None
            if lead is not None and self.keeper is not None and config.standby is not None:
                self._shipping = self.keeper.ship(
                    config.standby, config.run_id, lead.entry, lead.arbiter, config.digest, self._allowed
                )
                self.core.journal.safe_upto = self._shipping.safe_upto
            self._stopping = Stopping(config.drain_timeout_s, self._shipping)
            self._turns = Turns(KEY_DIGITS if self._allowed is not None else 0)
            self._sockets = PeerSockets(
                config, self.plan, self.core, self._allowed, lambda: self.arena.touched_bytes + self._turns.num_bytes
            )
            opened.callback(self._sockets.close)
            if self._shipping is not None:
                self._sockets.routers.append(self._shipping.router)
            self._poller = Poller(self._sockets.routers, self._waker)
            self._reports = PeerReports(self._allowed, self.counters)
            self._reader = MessageReader(
                self._sockets, self._turns, self.core, self._allowed, self._reports, self.counters
            )
            self._sender = MessageSender(self._sockets, self.arena, self.counters, self._events)
            self._performers = self._make_performers()
            self._step_timer = StepTimer()
            self._reporter = Reporter(
                config.run, self.endpoints, self.core, self.plan, self.arena, self.keeper, self.counters
            )
            self.snapshot: BrokerStatus = self._reporter.take(self.counters.started)
            """Replaced twice a second; any thread may read it."""
            self.rank_page = self._reporter.rank_page
            if config.state_dir is not None:
                kept = KeptHours(Path(config.state_dir), lambda: self.snapshot, lambda: self._step_timer.times)
                opened.callback(kept.close)
            opened.callback(self._packer.shutdown)
            self._opened = opened.pop_all()
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

    def _make_performers(self) -> dict[type[Effect], Callable[[Any], None]]:
        """Return the method that performs each type of effect."""
        performers: dict[type[Effect], Callable[[Any], None]] = {
            Store: self._store,
            Release: lambda effect: self.arena.release(effect.handles),
            SendShard: self._sender.send_shard,
            SendTrainer: self._sender.send_to_trainer,
            SendProducer: self._sender.send_to_producer,
            Form: self._form,
            Answer: self._answer,
            Report: self._reports.report,
        }
        if (keeper := self.keeper) is not None:
            performers[Append] = keeper.append
            performers[Recall] = lambda effect: self._events.append(keeper.recall(effect))
            performers[Cut] = lambda effect: keeper.trim(effect.lsn)
        return performers

    @property
    def endpoints(self) -> dict[str, str]:
        """Addresses of the sockets, with ports, by ``producers`` and ``trainers``."""
        return self._sockets.endpoints

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
        self._stopping.ask()
        self._waker.wake()

    def ask(self, feed: str, ask: Asked, at_step: int | None, note: str) -> Future[Answer]:
        """Ask the core to change a feed while it runs. Safe in any thread.

        Args:
            feed: Name of the feed.
            ask: The change.
            at_step: Step at which the change takes effect; None: as early as possible.
            note: A person's reason, which is recorded with the change.

        Returns:
            The core's answer. It is canceled if the broker ends before.
        """
        return self._changes.ask(feed, ask, at_step, note)

    def _answer(self, answer: Answer) -> None:
        """Answer a person who asked for a change; ``snapshot`` has the change by then."""
        if not answer.refusal:
            self._publish(self._reporter.take(time.monotonic()))
        self._changes.answer(answer)

    def _complete(self, feed: str, settings: StageSettings) -> Stage:
        """Return the stage that a person asks for. Raises ValueError if it is not possible."""
        return live_stage(self.config, self.core.feeds, feed, settings)

    def warm_up(self) -> None:
        """Compile or load the kernels, so that the first step is as fast as the others."""
        warm_up(self.plan)

    def run(self) -> None:
        """Serve until the broker is drained, then close sockets, log and threads."""
        try:
            self.warm_up()
            self._perform_all(self.core.begin())
            self._ticked = time.monotonic()
            self._handle(Tick(self._clock))
            self.counters.ready = True
            self._publish(self._reporter.take(time.monotonic()))
            log.info("ready")
            while not self._is_done():
                self._turn(TICK_S)
            if self.over:
                return
            self._reports.tell_cuts(math.inf)
            if not self._stopping.hands_over:
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

    def _is_done(self) -> bool:
        """Return True if ``run`` is to end."""
        finished = self._exit_when_finished and self.core.finished
        return bool(self.over) or finished or self._stopping.is_over(self.core.num_readers)

    def _say_goodbye(self) -> None:
        """Tell producers that the broker ends, and wait a little until they have left."""
        if not self.core.draining:
            self._handle(Drain())  # producers with nothing left to send wait for this
        until = time.monotonic() + FAREWELL_S
        while self.core.leases.num_producers and time.monotonic() < until and not self._stopping.at_once:
            self._turn(TICK_S)

    def close(self) -> None:
        """Close the sockets and end the threads; idempotent."""
        self.counters.ready = False
        self._opened.close()

    def _turn(self, timeout_s: float = 0.0) -> None:
        """Run one turn of the main loop: wait up to ``timeout_s`` for messages or a wake-up, then handle everything."""
        self._poller.wait(0.0 if self._turns.waiting else timeout_s)
        now = time.monotonic()
        ticks = now - self._ticked >= TICK_S
        if ticks:
            self._tick(now)
        for event in self._reader.events():
            self._handle(event)
            self._take_formed()
        self._take_formed()
        self._step_timer.look(now, self.core.feeds.values())
        self._keep_log()
        if self._shipping is not None:
            addresses = self._shipping.standby_addresses
            self._shipping.turn(self._clock if ticks else None)
            self._keep_log()
            if self._shipping.standby_addresses != addresses:
                self.on_endpoints()
            self.over = self._shipping.over
        self._handle_all(self._sockets.withdrawals(now))
        self._reports.tell_cuts(now)
        self._handle_all(self._changes.take(self._complete))
        if self._stopping.is_asked:
            self.counters.ready, self.counters.stopping = False, True
            if self._stopping.begins_to_drain(now):
                self._handle(Drain())
                self._publish(self._reporter.take(now))
            if self._stopping.hands_over:
                return
        self._sender.send_bundles()

    def _tick(self, now: float) -> None:
        """Do the periodic work of each ``TICK_S``."""
        self._clock += min(now - self._ticked, TURN_AT_MOST_S)
        self._ticked = now
        self._handle(Tick(self._clock))
        if self._allowed is not None:
            self.counters.strangers = self._allowed.refused
        if (snapshot := self._reporter.tick(now)) is not None:
            self._publish(snapshot)
        self._freed.look(now, not self._turns.waiting)

    def _publish(self, snapshot: BrokerStatus) -> None:
        """Replace ``snapshot`` and call ``on_snapshot``."""
        self.snapshot = snapshot
        self.on_snapshot(snapshot)

    def _take_formed(self) -> None:
        """Hand the results of FORM to the core, or raise its error."""
        while self._forming and self._forming[0].done():
            formed, seconds = self._forming.popleft().result()
            self.counters.form_seconds += seconds
            self._handle(formed)

    def _keep_log(self) -> None:
        """Write appended records to the log, and tell the core which are safe."""
        journal = self.core.journal
        if self.keeper is not None:
            self._handle_all(self.keeper.take_events(journal.safe_upto, journal.stalled, journal.full))

    def _handle_all(self, events: Iterable[Event]) -> None:
        """Hand events to the core, one after another."""
        for event in events:
            self._handle(event)

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

    def _perform(self, effect: Effect) -> None:
        """Perform one effect of the core."""
        perform = self._performers.get(type(effect))
        if perform is None:
            raise InternalError(f"the service cannot perform effect {type(effect).__name__}")
        perform(effect)

    def _store(self, effect: Store) -> None:
        """Copy samples of a chunk into the arena."""
        self.arena.store(effect.handles, effect.offsets, effect.lengths, effect.rows, effect.payload)
        if effect.media_bounds is not None:
            self.arena.store_media(effect.handles, effect.media_bounds, effect.media)

    def _form(self, effect: Form) -> None:
        """Run the packer in its thread, which wakes this one when the packs are chosen."""
        self._forming.append(future := self._packer.submit(_form_step, effect))
        future.add_done_callback(lambda _: self._waker.wake())


def warm_up(plan: Plan) -> None:
    """Compile or load the kernels of a broker with this ``plan``."""
    for feed in plan.feeds:
        schedule.warm_up(feed.rules)
        form.warm_up(feed.rules)
        if DynamicCp.of(feed.layout) is not None:
            cp_plan.warm_up()
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
