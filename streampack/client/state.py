"""A loader's state: ``save`` makes the dict that a trainer saves with its model, ``load`` reads the dict.

A state is plain JSON and independent of the mesh. It holds a position (iteration, next step, digest of all steps
before), its origin (run, feed, rules), and a snapshot of the broker. With the snapshot, a broker on another host can
continue without this broker's disk. ``load`` rejects a state of another run and names the key.

The states of all ranks after one step are equal, even if a broker with a log restarts between two ranks' calls. A
broker without a log makes other snapshots after a restart: ``snapshot`` may then differ, and each is valid.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, UnsetType

from streampack.config.stage_settings import other_stages, written
from streampack.core.model.rules import Rules, as_recorded
from streampack.core.model.snapshot import Count
from streampack.core.protocol.trainer_messages import State
from streampack.core.sessions.client_events import Begin
from streampack.errors import StateError, WireError
from streampack.wire import record_frames

VERSION = 1
Digest = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=128)]


class RulesSaid(Struct, frozen=True, forbid_unknown_fields=True):
    """Rules in a state: their digest, and their canonical JSON so that an error can name the key that differs."""

    digest: str
    json: str


class SavedState(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a saved state.

    - ``next_step``: index of the first step that was not used up.
    - ``chain``: digest of all steps before, in hex.
    - ``snapshot``: the broker's last snapshot that is not after ``next_step``, in base64; empty at a feed's start.
    - ``epoch``: only in states of earlier versions.
    """

    version: int
    run: str
    feed: str
    iteration: Count = msgspec.field(name="round")
    lineage: Count
    next_step: Count
    chain: Digest
    rules: RulesSaid
    snapshot: str
    epoch: Count | UnsetType = msgspec.UNSET


class Origin(Struct, frozen=True):
    """The run, feed and rules that a state is valid for."""

    run: int
    feed: str
    rules: Rules

    @property
    def name(self) -> str:
        """The run's number as 16 hex digits."""
        return f"{self.run:016x}"


def save(origin: Origin, iteration: int, state: State) -> dict[str, Any]:
    """Return the state, as plain JSON values, of a loader whose next step is ``state.step``."""
    snapshot = b"" if state.snapshot is None else record_frames.encode_snapshot(state.snapshot)
    rules = RulesSaid(origin.rules.digest, msgspec.json.encode(origin.rules, order="sorted").decode())
    saved = SavedState(
        version=VERSION, run=origin.name, feed=origin.feed, iteration=iteration, lineage=state.lineage,
        next_step=state.step, chain=state.chain.hex(), rules=rules, snapshot=base64.b64encode(snapshot).decode(),
    )  # fmt: skip
    plain: dict[str, Any] = msgspec.to_builtins(saved)
    return plain


def load(state: Any, origin: Origin) -> Begin:
    """Return the position at which a loader with this state begins.

    Raises StateError for a state of another version, run, feed or rules, and for anything else than a state.
    """
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION or isinstance(version, bool):
        problem = f"version: got {version!r}" if isinstance(state, dict) else f"got a {type(state).__name__}"
        raise StateError(
            f"{problem}, expected a dict from state_dict() with version {VERSION}. Load a state that this version of "
            "streampack saved"
        )
    try:
        saved = msgspec.convert(state, SavedState)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as error:
        raise StateError(f"state: {error}. Load the dict from state_dict() unchanged") from None
    for key, saved_value, expected in (("run", saved.run, origin.name), ("feed", saved.feed, origin.feed)):
        if saved_value != expected:
            raise StateError(
                f"{key}: got {saved_value!r}, expected {expected!r}. The checkpoint belongs to another {key}. Load a "
                f"checkpoint of this {key}, or connect to the other {key}"
            )
    if saved.rules.digest != origin.rules.digest:
        raise StateError(f"{_difference(saved.rules.json, origin.rules)}, or start a new run without this state")
    return Begin(saved.next_step, bytes.fromhex(saved.chain), saved.iteration, saved.lineage, _snapshot(saved))


def _snapshot(saved: SavedState) -> Any:
    """Return the decoded snapshot of a state, or None if the state has none. Raises StateError."""
    if not saved.snapshot:
        return None
    try:
        snapshot = record_frames.decode_snapshot(base64.b64decode(saved.snapshot, validate=True))
    except (WireError, binascii.Error, ValueError) as error:
        raise StateError(f"snapshot: {error}. Load the dict from state_dict() unchanged") from None
    if snapshot.step > saved.next_step:
        raise StateError(
            f"snapshot: got a snapshot of step {snapshot.step}, expected a snapshot of step {saved.next_step} or "
            f"earlier"
        )
    return snapshot


def _difference(text: str, rules: Rules) -> str:
    """Return a text that names the first rule that differs between a state's JSON and ``rules``, with both values."""
    try:
        other = msgspec.json.decode(text, type=Rules)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        return (
            f"rules: got rules that this version cannot read ({error}), expected the rules with digest {rules.digest}. "
            "Restore the broker's rules"
        )
    if rules.stages != other.stages:
        stages = msgspec.json.encode([written(stage) for stage in other.stages]).decode()
        return (
            f"rules.stages: got a state of a run with other stages: {other_stages(rules.stages, other.stages)}. To go "
            f"on from the state, write its stages into broker.yaml, `stages: {stages}`, and change them with "
            f"'streampack set stage' while the run goes on"
        )
    if rules != other and as_recorded(rules, other) == other:
        lines = [f"window: {{samples: {other.window}}}"] if rules.window != other.window else []
        lines += [f"in_turn: {str(other.in_turn).lower()}"] if rules.in_turn != other.in_turn else []
        return (
            f"rules: got window {other.window} and in_turn {str(other.in_turn).lower()}, expected window "
            f"{rules.window} and in_turn {str(rules.in_turn).lower()} as in the run. To go on from the state, write "
            f"`rules: {{{', '.join(lines)}}}` in broker.yaml (for a feed with rules of its own, there), or pass both "
            f"to `local`"
        )
    for path, saved_value, expected in _unequal("rules", other, rules):
        return f"{path}: got {saved_value!r}, expected {expected!r} as in the run. Restore the broker's rules"
    return (
        f"rules.digest: got another digest than that of the state's rules, expected {other.digest}. Restore the "
        "broker's rules"
    )


def _unequal(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value in a, value in b) of each field that differs, in the order of declaration."""
    if isinstance(a, Struct) and type(a) is type(b):
        for name in a.__struct_fields__:
            yield from _unequal(f"{path}.{name}", getattr(a, name), getattr(b, name))
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _unequal(f"{path}.{getattr(other, 'name', i)}", one, other)
    elif a != b:
        yield path, _plain(a), _plain(b)


def _plain(value: Any) -> Any:
    """Return ``value``; if it is a tuple, replace each struct in it by its name, to keep an error short."""
    return [getattr(item, "name", item) for item in value] if isinstance(value, tuple) else value
