"""Messages of every type with values that are likely to hit, and events with them."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from streampack.core.feed.resume import snapshot
from streampack.core.form.former import Former
from streampack.core.merge.schedule import merge_of
from streampack.core.model.samples import SampleTable
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.message import Message
from streampack.core.protocol.producer_messages import Eos, Hello, Samples, Sent
from streampack.core.protocol.result_messages import AskResults, Results
from streampack.core.protocol.trainer_messages import AskSnapshot, Attach, Brought, Get, Mixture
from streampack.wire.frames import ALL_MESSAGES
from tests.core.sessions.bench import EPOCH, RUN, Bench, attach, fill, hello
from tests.world.chunks import u32

_SMALL = st.integers(0, 6)
_COUNTS = st.one_of(_SMALL, _SMALL, st.sampled_from([63, 2**20 - 1, 2**31, 2**32, 2**62 - 1]))
_NAMES = st.sampled_from(["a", "b", "p", "q", "train", "zz"])
_LENGTHS = st.lists(st.sampled_from([0, 1, 4, 5, 16, 17, 40, 2**32 - 1]), max_size=6)


def _snapshots() -> list[Snapshot]:
    """Return snapshots of the beginning, of a place between steps, and one that no feed can go on from."""
    bench = Bench()
    start = snapshot(bench.rules, merge_of(bench.rules), Former(bench.rules, SampleTable()), [(0, None)] * 3)
    bench.produce(b"p", hello("p", "a", "b"))
    bench.read(b"1", attach("r"))
    fill(bench, chunks=4)
    planner = bench.feed.planner
    between = snapshot(bench.rules, planner.merge.current, planner.former, [(0, None)] * 3)
    assert between.step > 0
    return [start, between, msgspec.structs.replace(between, rules="other")]


SNAPSHOTS = _snapshots()


@st.composite
def _messages(draw: st.DrawFn) -> tuple[Message, bytes]:
    """A message that decodes, of any type, with fields that are likely to hit; and its payload."""
    often: list[type[Message]] = [
        Hello, Samples, Samples, Samples, Eos, Sent, Attach, Attach, Brought, Get, Get,
    ]  # fmt: skip
    kind = draw(st.sampled_from([*often, *ALL_MESSAGES]))
    if kind is Samples:
        lengths = draw(_LENGTHS)
        size = 4 * sum(lengths)
        column = u32(lengths)
        other = draw(st.sampled_from([column, column, column, b"", column + b"\0"]))
        message = Samples(
            stream=draw(_NAMES), partition=draw(_SMALL), base_seq=draw(_COUNTS), lengths_u32=column, crcs_u32=other,
            loss_tokens_u32=column, cursor=(0, 0, 0), rejected=draw(st.dictionaries(_NAMES, _COUNTS, max_size=2)),
            keep=draw(st.sampled_from([msgspec.UNSET, msgspec.UNSET, "pack", "step"])),
            shared_u32=draw(st.one_of(st.just(msgspec.UNSET), st.just(other), st.just(u32([0, 1, 2])))),
        )  # fmt: skip
        return message, bytes(size if size < 4096 and draw(st.integers(0, 9)) else draw(_SMALL))
    known: dict[type, Any] = {str: _NAMES, int: _COUNTS, bytes: st.binary(max_size=8), bool: st.booleans()}
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        is_bool = field.type in (bool, bool | msgspec.UnsetType)
        fields[field.encode_name] = draw(known[bool] if is_bool else _field(kind, field.encode_name, known))
    return msgspec.convert(fields, kind), b""


def _field(kind: type[Message], name: str, known: dict[type, Any]) -> Any:
    if kind is Mixture and name == "streams":
        return _MIXED
    if name in _VALUES:
        return _VALUES[name]
    if name == "cursor":
        return known[int] if kind in (AskResults, Results) else st.just((0, 0, 0))
    if name == "digest" and kind in (AskSnapshot, Brought):
        return _VALUES["snapshot_digest"]
    if name.endswith(("_u32", "_u64")) or name in ("digest", "chain", "kinds", "config_digest"):
        return known[bytes]
    return known[str if name in _TEXTS else int]


_FEW_NAMES = st.lists(_NAMES, max_size=3)
_MIXED_STREAM: dict[str, Any] = {
    "weight": 0.5, "share": None, "ended": False, "passes": 1, "trained_samples": 3, "trained_tokens": 30,
    "trained_share": 1.0, "rejected": {},
}  # fmt: skip
_MIXED = st.lists(st.builds(lambda name: {"stream": name, **_MIXED_STREAM}, _NAMES), max_size=3)
_SIZE = {"shards": 2**62 - 1, "opened": 1, "samples": 2**62 - 1, "squares": 1e36}
_WAITS = {"causes_s": {"zz": 1e12, "stream": 2.0}, "streams_s": {"a": 1.0}, "waits": [2**62 - 1] * 64}
_MESH = st.sampled_from([1, 1, 1, 2, 3, 4096])
_REPORT = {"reader": _NAMES, "fence": _SMALL, "done_upto": _COUNTS, "have_upto": _COUNTS}
_FIELDS = st.sampled_from([(), [{"name": "a", "dtype": "int8"}]])
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("frames", "streams", "names"), _FEW_NAMES),
    **dict.fromkeys(("fields", "late_fields"), _FIELDS),
    **dict.fromkeys(("rejected", "stats", "rules"), st.just({})),
    **dict.fromkeys(("partition", "partitions", "part", "parts", "first", "micro_batches", "iteration"), _SMALL),
    **dict.fromkeys(("rank_part", "rank_parts"), _SMALL),
    **dict.fromkeys(("dp_ranks", "cp_ranks"), st.lists(_SMALL, max_size=3)),
    "offers": st.lists(st.builds(lambda s, d: {"stream": s, "source_digest": d}, _NAMES, st.just("d")), max_size=3),
    "open": st.lists(st.tuples(_SMALL, _SMALL), max_size=3),
    "attempt": st.tuples(_SMALL, _SMALL),
    "media": st.sampled_from([{"items_u32": b"", "bytes_u32": b""}, {"items_u32": u32([1]), "bytes_u32": b"\0"}]),
    "media_fields": st.sampled_from([(), [{"name": "a", "dtype": "int8", "axis": "item"}]]),
    "mesh": st.builds(lambda d, c, t: {"dp": d, "cp": c, "tp": t, "dp_rank": d - 1}, _MESH, _MESH, _MESH),
    "readers": st.sampled_from([{}, {}, {"tp": [0]}, {"pp": [-1], "tp": [1, 9]}]),
    "share": st.just("prefix"),
    "dealt_by": st.sampled_from(["zigzag", "zigzag", "zigzag", "whole"]),
    "deal": st.builds(lambda number: {"number": number, "digest": b"1"}, _SMALL),
    "stage": st.sampled_from([{"number": 1}, {"number": 2, "name": "long", "rules": {"budget": 32}}]),
    "refused": st.dictionaries(_NAMES, st.binary(max_size=8), max_size=2),
    "ping_s": st.sampled_from([0.1, 1.0, 60.0]),
    "cp": st.integers(1, 4096),
    "done": st.lists(st.tuples(_NAMES, _COUNTS), max_size=3),
    "ranks": st.lists(st.fixed_dictionaries(_REPORT), max_size=3),
    "silent_s": st.sampled_from([0.0, 1e9]),
    "sizes": st.sampled_from([{}, {"a": _SIZE, "zz": _SIZE}]),
    "starvation": st.sampled_from([None, {}, _WAITS]),
    "feed": st.sampled_from(["train", "train", "train", "zz"]),
    "snapshot": st.sampled_from(SNAPSHOTS),
    "snapshot_digest": st.sampled_from([b"", b"of none", *[snapshot.digest for snapshot in SNAPSHOTS]]),
}
_TEXTS = (
    "stream", "producer", "host", "failure", "reason", "dtype", "overlong", "poison", "code", "detail", "reader",
    "layout", "name", "process", "producers", "trainers", "refusal", "waiting", "no_loss_tokens",
)  # fmt: skip
EVENTS = st.tuples(
    st.sampled_from([b"1", b"2", b"3"]), st.booleans(), st.integers(0, 5), st.sampled_from([EPOCH, EPOCH, EPOCH, 0, 5]),
    st.sampled_from([RUN, RUN, RUN, 0, 3]), _messages(), st.sampled_from([0.0, 0.0, 0.3, 20.0]),
)  # fmt: skip
