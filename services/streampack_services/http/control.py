"""Changes of a running broker over HTTP: ``POST /control/weights``, and the other paths in ``BODIES``.

A body is one JSON object with typed keys; an unknown key is an error. The broker's thread decides and answers. Requests
from other machines are rejected unless ``listen.control`` is ``any``. Requests of web pages, which have an ``Origin``
header, are always rejected.

    curl --json '{"weights": {"code": 0.3}}' http://127.0.0.1:7400/control/weights
    {"feed": "train", "step": 1288, "id": 3}
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from streampack.config.stage_settings import StageAt, StageRulesSettings, StageSettings
from streampack.config.stream_settings import StreamSettings
from streampack.core.model.bounded import Name
from streampack.core.model.keys.stream_keys import SamplePolicies
from streampack.core.model.rule_changes import MAX_WEIGHT, Ask, Cancel, Restream, Reweigh, parse_steps
from streampack.core.protocol.effects import Answer
from streampack_services.broker.changes.asked_changes import Asked
from streampack_services.http.http_guard import is_loopback

MAX_BODY_BYTES = 1 << 16
ANSWER_S = 10.0
"""Time that the broker's thread has to answer, in seconds."""

At = Annotated[int, Meta(ge=0, lt=2**62)]
"""Number of a step, as large as a record of the log can hold."""

AskBroker = Callable[[str, Asked, int | None, str], "Future[Answer]"]
"""Asks the broker's thread for a change: (feed or "", change, at_step, note) -> its answer."""


class _Body(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys that all requests have: the feed (empty if there is only one), and a person's reason."""

    feed: Annotated[str, Meta(max_length=200)] = ""
    note: Annotated[str, Meta(max_length=500)] = ""


class WeightsBody(_Body, frozen=True, kw_only=True):
    """New weights by stream. Other streams keep theirs; 0 removes a stream."""

    weights: Annotated[dict[Name, Annotated[float, Meta(ge=0, le=MAX_WEIGHT)]], Meta(min_length=1)]
    at_step: At | None = None

    def ask(self) -> Ask:
        """Return the change for the broker."""
        return Reweigh(self.weights)


class StreamsBody(_Body, frozen=True, kw_only=True):
    """Streams to add, with settings as in broker.yaml, and names of streams to remove."""

    add: dict[Name, StreamSettings] = {}
    remove: list[Name] = []
    at_step: At | None = None

    def ask(self) -> Ask:
        """Return the change for the broker; raise ValueError if there is no stream to add or remove."""
        if not self.add and not self.remove:
            raise ValueError("got neither add nor remove, expected at least one of them")
        return Restream(
            tuple(stream.recorded(name, SamplePolicies()) for name, stream in self.add.items()), tuple(self.remove)
        )


class SkipBody(_Body, frozen=True, kw_only=True):
    """Steps to skip: a range such as ``120-140``, or one number."""

    steps: str

    @property
    def at_step(self) -> None:
        """None: the change names its steps itself."""

    def ask(self) -> Ask:
        """Return the change for the broker; raise ValueError if ``steps`` is not a range of steps."""
        return parse_steps(self.steps)


class StageBody(StageSettings, frozen=True, kw_only=True):
    """A stage as broker.yaml has it. Without ``at``, it begins as soon as possible."""

    feed: Annotated[str, Meta(max_length=200)] = ""
    note: Annotated[str, Meta(max_length=500)] = ""

    @property
    def at_step(self) -> None:
        """None: the stage has its own begin."""

    def ask(self) -> Asked:
        """Return the stage for the broker; raise ValueError if its begin is wrong."""
        _ = self.at and self.at.begin
        return self


class RulesBody(_Body, frozen=True, kw_only=True):
    """Rules as in a stage of broker.yaml; they hold from ``at_step`` on, or as soon as possible."""

    rules: StageRulesSettings
    at_step: At | None = None

    def ask(self) -> Asked:
        """Return the change for the broker."""
        return StageSettings(rules=self.rules, at=None if self.at_step is None else StageAt(step=self.at_step))


class CancelBody(_Body, frozen=True, kw_only=True):
    """The number of a change that has not begun."""

    id: Annotated[int, Meta(ge=0, lt=2**62)]

    @property
    def at_step(self) -> None:
        """None: a change is canceled at once."""

    def ask(self) -> Asked:
        """Return the change for the broker."""
        return Cancel(self.id)


Body = WeightsBody | StreamsBody | SkipBody | StageBody | RulesBody | CancelBody
BODIES: dict[str, type[Body]] = {
    "/control/weights": WeightsBody,
    "/control/streams": StreamsBody,
    "/control/skip": SkipBody,
    "/control/stage": StageBody,
    "/control/rules": RulesBody,
    "/control/cancel": CancelBody,
}


def handler(path: str, ask_broker: AskBroker, any_host: bool) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler for a path of ``BODIES``.

    Args:
        path: The path of the request.
        ask_broker: Asks the broker's thread for the change.
        any_host: Accept requests from other machines, too.
    """
    body_type = BODIES[path]

    async def control(request: Request) -> Response:
        """Hand the change in a request to the broker, and answer with its feed and first step."""
        rejection = _rejection(request, any_host)
        if rejection:
            return _error(403, rejection)
        try:
            body = msgspec.json.decode(await _read(request), type=body_type)
            ask = body.ask()
        except ValueError as error:  # msgspec's errors are ValueErrors, too
            return _error(400, str(error))
        future = ask_broker(body.feed, ask, body.at_step, body.note)
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_S)
        except TimeoutError:
            return _error(504, f"the broker did not answer within {ANSWER_S} s. Check the broker's status and log")
        except asyncio.CancelledError:
            return _error(503, "the broker is stopping")
        if answer.refusal:
            return _error(409, answer.refusal)
        tokens = ask.at.begin.tokens if isinstance(ask, StageSettings) and ask.at is not None else None
        more = {"id": answer.id, "tokens": tokens}
        return JSONResponse(
            {"feed": answer.feed, "step": answer.step, **{key: more[key] for key in more if more[key] is not None}}
        )

    return control


async def _read(request: Request) -> bytes:
    """Return the body of a request; raise ValueError if it is larger than ``MAX_BODY_BYTES``."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(
                f"got a request body of more than {MAX_BODY_BYTES} bytes, expected at most {MAX_BODY_BYTES} bytes. "
                f"Send fewer changes at once"
            )
    return bytes(body)


def _rejection(request: Request, any_host: bool) -> str:
    """Return the reason that this client may not change the broker; empty if it may."""
    if "origin" in request.headers:
        return (
            "got a request from a web page, and web pages must not change a run. Use 'streampack set' or 'streampack "
            "skip'"
        )
    host = (
        request.client.host if request.client else ""
    )  # with a proxy on this machine, perhaps the address that it forwards
    if any_host or is_loopback(host):
        return ""
    return f"got a request from {host or 'an unknown host'}. Send it from the broker's host, or set listen.control: any"


def _error(code: int, error: str) -> Response:
    """Return a response with this HTTP status and the error as JSON."""
    return JSONResponse({"error": error}, code)
