"""No body that comes over HTTP raises in the broker's thread: the application, the broker's shell and core, its log."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from streampack_services.broker.changes.asked_changes import Asked
from streampack_services.broker.service import BrokerService
from streampack_services.http.history import Timelines
from streampack_services.http.metrics import exposition
from streampack_services.http.server import make_app

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.protocol.effects import Answer
from tests.integration.running import PATIENCE_S, folder

NUMBERS = st.one_of(
    st.integers(-2, 9), st.integers(), st.floats(), st.just(10**400),
    st.sampled_from([2**k + d for k in (31, 32, 53, 62, 63, 64, 70) for d in (-1, 0)]),
)  # fmt: skip
TEXTS = st.one_of(st.sampled_from(["web", "code", "train", "", "a" * 201, "\ud800", "1-2", "3"]), st.text(max_size=20))
STEPS = st.tuples(NUMBERS, NUMBERS).map(lambda steps: f"{steps[0]}-{steps[1]}")
ANYTHING = st.recursive(
    st.one_of(NUMBERS, TEXTS, st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)), max_leaves=5,
)  # fmt: skip
STREAM = st.fixed_dictionaries({}, optional={
    "weight": NUMBERS, "passes": NUMBERS, "partitions": st.one_of(st.integers(1, 3), NUMBERS), "repeat": st.booleans(),
    "pushed": st.booleans(), "overlong": st.sampled_from(["error", "drop", "truncate", "split"]),
})  # fmt: skip
SIZE = st.one_of(
    st.integers(1, 99), NUMBERS, st.fixed_dictionaries({"from": NUMBERS, "to": NUMBERS, "over": NUMBERS})
)  # fmt: skip
RULES = st.one_of(ANYTHING, st.fixed_dictionaries({}, optional={
    "budget": SIZE, "step": st.fixed_dictionaries({"packs": SIZE}), "max_samples_per_pack": st.none() | NUMBERS,
    "window": st.one_of(st.just("auto"), st.fixed_dictionaries({"samples": NUMBERS})),
    "balance": st.fixed_dictionaries({}, optional={"kind": st.sampled_from(["joint", "none"]), "group": NUMBERS}),
    "align": st.fixed_dictionaries({}, optional={"sample": NUMBERS, "pack": NUMBERS, "lcm": NUMBERS}),
}))  # fmt: skip
BEGIN = st.fixed_dictionaries({}, optional={"step": NUMBERS, "tokens": st.one_of(NUMBERS, st.just("2.8T"), TEXTS)})
SHARED: dict[str, st.SearchStrategy[Any]] = {"note": TEXTS, "feed": TEXTS, "at_step": NUMBERS}


def bodies() -> st.SearchStrategy[tuple[str, Any]]:
    def fields(required: dict[str, Any], **optional: Any) -> st.SearchStrategy[Any]:
        return st.one_of(st.fixed_dictionaries(required, optional=SHARED | optional), ANYTHING)

    weights = st.dictionaries(st.one_of(st.sampled_from(["web", "code"]), TEXTS), NUMBERS, max_size=3)
    streams = fields({}, add=st.dictionaries(TEXTS, STREAM, max_size=2), remove=st.lists(TEXTS, max_size=2))
    return st.one_of(
        st.tuples(st.just("weights"), fields({"weights": weights})),
        st.tuples(st.just("streams"), streams),
        st.tuples(st.just("skip"), fields({"steps": st.one_of(STEPS, TEXTS)})),
        st.tuples(st.just("rules"), fields({"rules": RULES})),
        st.tuples(
            st.just("stage"),
            fields(
                {},
                rules=RULES,
                weights=weights,
                over=NUMBERS,
                name=TEXTS,
                at=BEGIN,
                planned_mesh=st.fixed_dictionaries({}, optional={"dp": NUMBERS}),
            ),
        ),
        st.tuples(st.just("cancel"), fields({"id": NUMBERS})),
    )


@pytest.fixture(scope="module")
def service() -> Iterator[BrokerService]:
    """A broker with a log, which runs in the thread that asks."""
    with folder() as path:
        tree = {
            "listen": {"producers": f"ipc://{path}/p", "trainers": f"ipc://{path}/t"}, "state_dir": f"{path}/log",
            "streams": {"web": {}, "code": {}}, "rules": {"budget": 64, "window": {"samples": 16}}, "memory": "256MiB",
        }  # fmt: skip
        service = BrokerService(convert(tree, BrokerConfig))
        service._perform_all(service.core.begin())
        yield service
        service.close()


async def post(app: Any, path: str, body: bytes) -> int:
    found: list[int] = []
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "headers": [], "client": ("127.0.0.1", 1), "state": {},
    }  # fmt: skip

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    await app(scope, receive, send)
    return found[0]


@given(bodies())
@example(("weights", {"weights": {"web": 0.5, "code": 0.5}, "at_step": 2**64}))
@example(("weights", {"weights": {"web": 0.5, "code": 0.5}, "at_step": 2**63}))
@example(("streams", {"add": {"more": {"passes": 2**64}}}))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_body_raises_in_the_brokers_thread(service: BrokerService, asked: tuple[str, Any]) -> None:
    def ask(feed: str, what: Asked, at_step: int | None, note: str) -> Future[Answer]:
        future = service.ask(feed, what, at_step, note)
        until = time.monotonic() + PATIENCE_S
        while not future.done() and time.monotonic() < until:
            service._turn()
        return future

    app = make_app(lambda: service.snapshot, Timelines(lambda: service.snapshot), ask)
    status = asyncio.run(post(app, f"/control/{asked[0]}", json.dumps(asked[1]).encode()))
    assert status in (200, 400, 409)
    snapshot = service._reporter.take(time.monotonic())
    assert msgspec.json.decode(msgspec.json.encode(snapshot))["run"] == service.config.run
    assert exposition(snapshot)
