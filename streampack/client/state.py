"""A loader's state: what a trainer saves with its model, and what a loader goes on from.

Plain JSON with nothing of the mesh: the place (round, step, the digest of all before it), what it is a place in (run,
feed, rules), and the broker's snapshot, so that a broker on another host, without the disk of this one, can go on from
it. Making a state has no side effects; reading one refuses what is not of this run and names the key.

The states of all ranks after one step are equal, also where a broker with a log restarts between two ranks' calls. A
broker without a log takes other snapshots once it has restarted: ``snapshot`` may then differ, and each one is good.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, UnsetType

from streampack.core.model.rules import Rules
from streampack.core.model.snapshot import Count
from streampack.core.protocol.trainer_messages import State
from streampack.core.sessions.client_events import Begin
from streampack.errors import StateError, WireError
from streampack.wire import record_frames

VERSION = 1
Digest = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=128)]


class RulesSaid(Struct, frozen=True, forbid_unknown_fields=True):
    """Rules by their digest, and as canonical JSON, so that a difference can be named."""

    digest: str
    json: str


class SavedState(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``next_step`` is the first that is not wholly returned, ``chain`` the digest of all before it. ``snapshot``:
    base64 of the nearest one not after it, empty where that is step 0. ``epoch`` is in states of earlier versions.
    """

    version: int
    run: str
    feed: str
    round: Count
    lineage: Count
    next_step: Count
    chain: Digest
    rules: RulesSaid
    snapshot: str
    epoch: Count | UnsetType = msgspec.UNSET


class Origin(Struct, frozen=True):
    """What a state is of."""

    run: int
    feed: str
    rules: Rules

    @property
    def name(self) -> str:
        """The run's number, as states have it."""
        return f"{self.run:016x}"


def save(origin: Origin, round_: int, state: State) -> dict[str, Any]:
    """The state of a loader whose next step is ``state.step``."""
    snapshot = b"" if state.snapshot is None else record_frames.encode_snapshot(state.snapshot)
    rules = RulesSaid(origin.rules.digest, msgspec.json.encode(origin.rules, order="sorted").decode())
    said = SavedState(
        version=VERSION, run=origin.name, feed=origin.feed, round=round_, lineage=state.lineage, next_step=state.step,
        chain=state.chain.hex(), rules=rules, snapshot=base64.b64encode(snapshot).decode(),
    )  # fmt: skip
    plain: dict[str, Any] = msgspec.to_builtins(said)
    return plain


def load(state: Any, origin: Origin) -> Begin:
    """Where a loader with this state begins.

    Raises StateError for a state of another version, run, feed or rules, and for what is none.
    """
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION or isinstance(version, bool):
        what = f"version: got {version!r}" if isinstance(state, dict) else f"got a {type(state).__name__}"
        raise StateError(f"{what}, expected version {VERSION} of what state_dict() gives: was it saved by another?")
    try:
        said = msgspec.convert(state, SavedState)
    except (msgspec.ValidationError, RecursionError) as error:
        raise StateError(f"state: {error}; expected what state_dict() gave, as it was") from None
    for key, got, expected in (("run", said.run, origin.name), ("feed", said.feed, origin.feed)):
        if got != expected:
            raise StateError(
                f"{key}: got {got!r}, expected {expected!r}: this is a checkpoint of another {key}: load one of this "
                f"{key}, or connect to the other"
            )
    if said.rules.digest != origin.rules.digest:
        differs = _difference(said.rules.json, origin.rules)
        raise StateError(f"{differs}: put the broker's back, or start a new run without this state")
    return Begin(said.next_step, bytes.fromhex(said.chain), said.round, said.lineage, _snapshot(said))


def _snapshot(said: SavedState) -> Any:
    if not said.snapshot:
        return None
    try:
        found = record_frames.decode_snapshot(base64.b64decode(said.snapshot, validate=True))
    except (WireError, binascii.Error, ValueError) as error:
        raise StateError(f"snapshot: {error}; expected what state_dict() gave, as it was") from None
    if found.step > said.next_step:
        raise StateError(f"snapshot: got one of step {found.step}, expected one not after step {said.next_step}")
    return found


def _difference(text: str, rules: Rules) -> str:
    """The first rule that differs, with both values."""
    try:
        other = msgspec.json.decode(text, type=Rules)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        return f"rules: got some that this version does not read ({error}), expected {rules.digest}"
    for path, got, expected in _unequal("rules", other, rules):
        return f"{path}: got {got!r}, expected {expected!r} as the run has it"
    return f"rules.digest: got {other.digest} for what the state says, expected its own"


def _unequal(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two of a kind differ, in the order in which they are declared."""
    if isinstance(a, Struct) and type(a) is type(b):
        for name in a.__struct_fields__:
            yield from _unequal(f"{path}.{name}", getattr(a, name), getattr(b, name))
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for i, (mine, theirs) in enumerate(zip(a, b, strict=True)):
            yield from _unequal(f"{path}.{getattr(theirs, 'name', i)}", mine, theirs)
    elif a != b:
        yield path, _plain(a), _plain(b)


def _plain(value: Any) -> Any:
    """Of structs, their names: short."""
    return [getattr(each, "name", each) for each in value] if isinstance(value, tuple) else value
