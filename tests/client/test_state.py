"""A loader's state: JSON there and back, and a refusal that names the key for what is of another run."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.client.state import Origin, load, save
from streampack.core.feed.resume import snapshot
from streampack.core.form.former import Former
from streampack.core.merge.schedule import merge_of
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import SampleTable
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.trainer_messages import State
from streampack.core.sessions.client_events import Begin
from streampack.errors import StateError
from tests.world.live import SlowDisk

RULES = Rules(budget=4096, streams=(StreamRules("web", 0.7), StreamRules("code", 0.3)))
ORIGIN = Origin(77, "train", RULES)
EMPTY = snapshot(RULES, merge_of(RULES), Former(RULES, SampleTable()))
SMALL = Rules(budget=32, packs=2, window=4, seed=3, streams=(StreamRules("web", 1.0, 1),))
COUNTS = st.integers(0, 2**62 - 1)


def of_step(step: int, taken: Snapshot | None = None, chain: bytes = bytes(16)) -> State:
    return State(feed="train", lineage=0, step=step, chain=chain, snapshot=taken)


@st.composite
def snapshots(draw: st.DrawFn, upto: int) -> Snapshot:
    """Of any numbers, that decides steps from one before ``upto`` on."""
    replace = msgspec.structs.replace
    form = replace(
        EMPTY.form, next_step=draw(st.integers(0, upto)), chain=draw(st.binary(max_size=16)),
        window=draw(st.binary(max_size=100)), ages=draw(st.lists(COUNTS, max_size=4)),
    )  # fmt: skip
    floors = st.tuples(COUNTS, st.none() | st.tuples(COUNTS, COUNTS, COUNTS))
    return replace(EMPTY, form=form, floors=draw(st.lists(floors, max_size=4)), lineage=draw(COUNTS))


@given(st.data(), COUNTS, COUNTS, COUNTS, st.binary(max_size=32))
def test_a_state_goes_through_json_and_comes_back_as_it_was(
    data: st.DataObject, step: int, iteration: int, epoch: int, chain: bytes
) -> None:
    taken = data.draw(st.none() | snapshots(step))
    state = save(ORIGIN, iteration, of_step(step, taken, chain))
    assert json.loads(json.dumps(state)) == state
    assert load(json.loads(json.dumps(state)), ORIGIN) == Begin(step, chain, iteration, 0, taken)
    old = state | {"epoch": epoch}  # as an earlier version saved it
    assert load(old, ORIGIN) == load(state, ORIGIN)


def test_a_state_says_no_more_than_where_it_is_and_of_what() -> None:
    state = save(ORIGIN, 1, of_step(7, EMPTY))
    assert list(state) == [
        "version", "run", "feed", "round", "lineage", "next_step", "chain", "rules", "snapshot",
    ]  # fmt: skip
    assert (state["version"], state["run"], state["feed"], state["next_step"]) == (1, "000000000000004d", "train", 7)
    assert state["rules"]["digest"] == RULES.digest
    assert msgspec.json.decode(state["rules"]["json"], type=Rules) == RULES


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"budget": 8192}, "rules.budget: got 4096, expected 8192"),
        ({"packs": 32}, "rules.packs: got 64, expected 32"),
        ({"align": {"sample": 1, "pack": 8}}, "rules.align.pack: got 1, expected 8"),
        ({"streams": [{"name": "web"}]}, r"rules.streams: got \['web', 'code'\], expected \['web'\]"),
        (
            {"streams": [{"name": "web", "weight": 0.7}, {"name": "code", "weight": 0.5}]},
            "rules.streams.code.weight: got 0.3, expected 0.5",
        ),
        ({"fields": [{"name": "reward", "dtype": "float32"}]}, r"rules.fields: got \[\], expected \['reward'\]"),
    ],
)
def test_other_rules_are_named_by_the_first_key_that_differs_with_both_values(rules: Any, said: str) -> None:
    here = msgspec.convert(msgspec.to_builtins(RULES) | rules, Rules)
    with pytest.raises(StateError, match=f"^{said}.* Restore the broker's rules"):
        load(save(ORIGIN, 0, of_step(3)), Origin(77, "train", here))


def test_rules_that_this_version_does_not_read_are_refused_with_the_key() -> None:
    state = save(ORIGIN, 0, of_step(3))
    later = json.loads(state["rules"]["json"]) | {"moon": "full"}
    state["rules"] = {"digest": "0" * 32, "json": json.dumps(later)}
    with pytest.raises(StateError, match=r"rules: got rules that this version cannot read .*`moon`"):
        load(state, ORIGIN)
    state["rules"]["json"] = msgspec.json.encode(RULES).decode()
    with pytest.raises(StateError, match=r"rules\.digest: got "):
        load(state, ORIGIN)


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        (Origin(78, "train", RULES), "run: got '000000000000004d', expected '000000000000004e'"),
        (Origin(77, "valid", RULES), "feed: got 'train', expected 'valid'. The checkpoint belongs to another feed"),
    ],
)
def test_a_state_of_another_run_or_feed_is_refused_naming_both(origin: Origin, said: str) -> None:
    with pytest.raises(StateError, match=said):
        load(save(ORIGIN, 0, of_step(3)), origin)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, r"version: got 2, expected a dict from state_dict\(\) with version 1"),
        ({"version": True}, "version: got True"),
        ({"version": None}, "version: got None"),
        ({"next_step": -1}, r"state: Expected `int` >= 0 - at `\$.next_step`"),
        ({"next_step": "3"}, r"state: Expected `int`, got `str` - at `\$.next_step`"),
        ({"next_step": True}, r"state: Expected `int`, got `bool`"),
        ({"chain": "xyz"}, r"\$.chain"),
        ({"epoch": 2.5}, r"\$.epoch"),
        ({"moon": "full"}, "unknown field `moon`"),
        ({"moon\ud821": "full"}, "state: .*surrogates not allowed"),
        ({"rules": "all"}, r"\$.rules"),
        ({"snapshot": "not base64!"}, "snapshot: "),
        ({"snapshot": "AAAA"}, "snapshot: got a snapshot that cannot be decoded"),
    ],
)
def test_a_state_with_a_wrong_value_is_refused_naming_the_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(StateError, match=said):
        load(save(ORIGIN, 0, of_step(3, EMPTY)) | changes, ORIGIN)


@pytest.mark.parametrize("garbage", [None, 3, "state", [], b"", {}, {1: 2}, [("version", 1)]])
def test_garbage_is_refused_as_such(garbage: Any) -> None:
    with pytest.raises(StateError, match=r"expected a dict from state_dict\(\) with version 1"):
        load(garbage, ORIGIN)


@pytest.mark.parametrize("key", ["run", "feed", "round", "lineage", "next_step", "chain", "rules", "snapshot"])
def test_a_key_that_is_missing_is_named(key: str) -> None:
    state = save(ORIGIN, 0, of_step(3))
    del state[key]
    with pytest.raises(StateError, match=f"missing required field `{key}`"):
        load(state, ORIGIN)


def test_a_snapshot_of_a_later_step_is_refused() -> None:
    later = msgspec.structs.replace(EMPTY, form=msgspec.structs.replace(EMPTY.form, next_step=4))
    with pytest.raises(
        StateError, match="snapshot: got a snapshot of step 4, expected a snapshot of step 3 or earlier"
    ):
        load(save(ORIGIN, 0, of_step(3, later)), ORIGIN)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
), st.sampled_from(["version", "round", "rules", "chain", "snapshot", "next_step", "lineage"]))  # fmt: skip
def test_anything_under_any_key_is_taken_or_refused_and_never_breaks(value: Any, key: str) -> None:
    with contextlib.suppress(StateError):
        load(save(ORIGIN, 0, of_step(3, EMPTY)) | {key: value}, ORIGIN)


@given(st.integers(0, 999), st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=5))
def test_states_after_one_step_are_equal_though_the_broker_is_killed_between_two_calls(
    seed: int, story: list[tuple[int, bool]]
) -> None:
    """Each call is another rank's. What is not in the log yet is lost with the broker, as with the power."""
    live = SlowDisk(SMALL, {"web": [[7, 3, 12, 9, 5, 16, 2, 8] * 40]}, seed)
    for count, kills in story:
        live.read(live.had + count)
        step = live.had
        states = [save(ORIGIN, 0, live.state(step))]
        if kills:
            live.start_broker()
        states.append(save(ORIGIN, 0, live.state(step)))
        assert states[0] == states[1]
