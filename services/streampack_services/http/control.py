"""Changes of a running broker, asked for over HTTP: ``POST /control/weights``, ``/control/streams``, ``/control/skip``.

A body is one JSON object, typed, unknown keys refused. It becomes an event of the broker's own thread,
which answers; nothing is decided here. Answered to this machine alone unless ``listen.control`` says
``any``, and never to a page in a browser: those say where they come from (``Origin``).

    curl --json '{"weights": {"code": 0.3}}' http://127.0.0.1:7400/control/weights
    {"feed": "train", "step": 1288}
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from streampack.config.daemon_settings import Name, StreamSettings
from streampack.core.model.rule_changes import MAX_WEIGHT, Ask, Restream, Reweigh, Skip, describe_change
from streampack.core.model.rules import StreamRules
from streampack.core.protocol.effects import Answer
from streampack_services.http.http_guard import is_loopback

MAX_BODY_BYTES = 1 << 16
ANSWER_S = 10.0
"""What the broker's loop may take to answer."""
_STEPS = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)

At = Annotated[int, Meta(ge=0, lt=2**62)]
"""A step, as large as a record can hold: a larger number would end the broker where it is written."""

Asking = Callable[[str, Ask, int | None, str], "Future[Answer]"]
"""(feed or "", what, at_step, note) -> what the broker says to it, from its own thread."""


class _Body(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    feed: Annotated[str, Meta(max_length=200)] = ""
    note: Annotated[str, Meta(max_length=500)] = ""


class WeightsBody(_Body, frozen=True, kw_only=True):
    """Weights by stream; the others keep theirs, 0 removes one."""

    weights: Annotated[dict[Name, Annotated[float, Meta(ge=0, le=MAX_WEIGHT)]], Meta(min_length=1)]
    at_step: At | None = None

    def ask(self) -> Ask:
        """What is asked of the broker."""
        return Reweigh(self.weights)


class StreamsBody(_Body, frozen=True, kw_only=True):
    """Streams that join, with the settings of broker.yaml, and names of those that leave."""

    add: dict[Name, StreamSettings] = {}
    remove: list[Name] = []
    at_step: At | None = None

    def ask(self) -> Ask:
        """What is asked of the broker. Raises ValueError if it is nothing."""
        if not self.add and not self.remove:
            raise ValueError("got neither add nor remove, expected one")
        return Restream(tuple(_rules(name, stream) for name, stream in self.add.items()), tuple(self.remove))


class SkipBody(_Body, frozen=True, kw_only=True):
    """Steps to pass over: ``120-140``, or one."""

    steps: str

    @property
    def at_step(self) -> None:
        """Its steps say it."""

    def ask(self) -> Ask:
        """What is asked of the broker. Raises ValueError for what are no steps."""
        return parse_steps(self.steps)


BODIES: dict[str, type[WeightsBody | StreamsBody | SkipBody]] = {
    "/control/weights": WeightsBody,
    "/control/streams": StreamsBody,
    "/control/skip": SkipBody,
}


def parse_steps(text: str) -> Skip:
    """``Skip(120, 140)`` of ``120-140``. Raises ValueError."""
    found = _STEPS.fullmatch(text)
    if found is None:
        raise ValueError(f"got steps {text[:50]!r}, expected the first and the last, such as 120-140, or one")
    first, last = found.groups()
    return Skip(int(first), int(first if last is None else last))


def handler(path: str, asking: Asking, anybody: bool) -> Callable[[Request], Awaitable[Response]]:
    """Of one of ``BODIES``; ``anybody``: not only this machine."""
    body_type = BODIES[path]

    async def control(request: Request) -> Response:
        refusal = _stranger(request, anybody)
        if refusal:
            return _said(403, refusal)
        try:
            body = msgspec.json.decode(await _read(request), type=body_type)
            ask = body.ask()
        except ValueError as error:  # msgspec's are too
            return _said(400, str(error))
        future = asking(body.feed, ask, body.at_step, body.note or describe_change(ask))
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_S)
        except TimeoutError:
            return _said(504, f"got no answer of the broker in {ANSWER_S:.0f} s, expected one: see its status")
        except asyncio.CancelledError:
            return _said(503, "the broker is stopping")
        if answer.refusal:
            return _said(409, answer.refusal)
        return JSONResponse({"feed": answer.feed, "step": answer.step})

    return control


async def _read(request: Request) -> bytes:
    """The body. Raises ValueError for one that is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"got a body of more than {MAX_BODY_BYTES} bytes, expected at most that")
    return bytes(body)


def _stranger(request: Request, anybody: bool) -> str:
    """Why whoever asks may not; empty if they may."""
    if "origin" in request.headers:
        return "got a request of a web page, expected one of a program: a page must not change a run"
    host = request.client.host if request.client else ""  # what a proxy on this machine says of its client, perhaps
    if anybody or is_loopback(host):
        return ""
    return f"got a request from {host or 'nowhere'}, expected one of the broker's host: see listen.control"


def _rules(name: str, settings: StreamSettings) -> StreamRules:
    return StreamRules(
        name, settings.weight, settings.partitions, None if settings.repeat else settings.passes,
        settings.overlong or "error", settings.poison or "error", settings.on_exhaust, settings.pushed,
    )  # fmt: skip


def _said(code: int, error: str) -> Response:
    return JSONResponse({"error": error}, code)
