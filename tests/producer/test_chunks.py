"""Records to chunks to the broker's books: fields, their defaults, what is refused, and the labels that count."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streampack.core.columns.chunk_body import chunk_as
from streampack.core.intake.admission import Admission
from streampack.core.intake.chunk_check import ReceivedChunk
from streampack.core.intake.intake import Intake
from streampack.core.journal.key_index import KeyIndex
from streampack.core.merge.feed_merge import FeedMerge
from streampack.core.model.fields import Field, from_bfloat16, to_bfloat16
from streampack.core.model.keys.stream_keys import Overlong
from streampack.core.model.lease_terms import StreamTerms
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import SampleTable
from streampack.core.protocol.effects import Store
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Lease, Samples
from streampack.errors import ConfigError, SampleError
from streampack.producer.chunk import TokenChunk
from streampack.producer.chunks import batches, chunk_of
from streampack.sources import Cursor, RawSample, SourceSettings, TokenizerSettings, open_source, open_tokenizer

MASK = Field(name="loss_mask", dtype="uint8", align="target")
LABELS = Field(name="labels", dtype="int32", align="target", pad=-100)
ROUTES = Field(name="routes", dtype="int16", shape=(2, 3))
REWARD = Field(name="reward", dtype="float32", axis="sample")
ADVANTAGE = Field(name="advantage", dtype="bfloat16", align="target")
LIMIT = 16


@dataclass(frozen=True)
class Listed:
    """A source of these samples: (tokens, fields)."""

    samples: Sequence[tuple[list[int], dict[str, Any]]]
    digest: str = "listed"
    num_shards: int = 1
    vocab_size: int | None = None

    def read(
        self, partition: int, partitions: int, *, seed: int, passes: int | None, fields: Sequence[Field] = (),
        start: Cursor | None = None, skip: int = 0,
    ) -> Iterator[RawSample]:  # fmt: skip
        for i, (tokens, values) in enumerate(self.samples):
            arrays = {name: np.asarray(value) for name, value in values.items()}
            yield RawSample(
                np.array(tokens, np.int32), None if tokens else "empty", f"row {i}", Cursor(0, 0, i + 1), arrays
            )


def lease(fields: tuple[Field, ...], **changes: Any) -> Lease:
    terms: dict[str, Any] = {
        "stream": "s", "partition": 0, "partitions": 1, "first_seq": 0, "cursor": None, "seed": 0, "passes": 1,
        "dtype": "int32", "fields": fields, "overlong": "error", "poison": "drop", "max_sample_tokens": 1000,
        "max_chunk_bytes": 1 << 20,
    }  # fmt: skip
    return Lease(**terms | changes)


def one(tokens: list[int], values: dict[str, Any], *fields: Field, **changes: Any) -> Any:
    """The batch of one sample."""
    (batch,) = batches(Listed([(tokens, values)]), lease(fields, **changes))
    return batch


# Fields


def test_every_field_is_as_its_bytes_hold_it() -> None:
    values = {
        "loss_mask": [0, 1, 1], "routes": np.arange(18).reshape(3, 2, 3), "reward": 0.5, "advantage": [1.0, -2.0, 0.1],
    }  # fmt: skip
    batch = one([5, 6, 7], values, MASK, ROUTES, REWARD, ADVANTAGE)
    assert batch.fields["loss_mask"].dtype == np.uint8
    assert batch.fields["routes"].tolist() == np.arange(18).reshape(3, 2, 3).tolist()
    assert batch.fields["reward"].tolist() == [0.5]
    assert batch.fields["advantage"].dtype == np.uint16
    assert from_bfloat16(batch.fields["advantage"]).tolist() == [1.0, -2.0, 0.10009765625]
    assert batch.loss_tokens.tolist() == [2]


def test_missing_fields_of_a_sample_are_filled_in_where_they_have_a_meaning() -> None:
    given_one = Field(name="weight", dtype="float16", default=1)
    positions = Field(name="position_ids", dtype="int32", shape=(3,))
    batch = one([5, 6, 7], {}, MASK, LABELS, given_one, positions)
    assert batch.fields["loss_mask"].tolist() == [1, 1, 1]
    assert batch.fields["labels"].tolist() == [5, 6, 7]
    assert batch.fields["weight"].tolist() == [1, 1, 1]
    assert batch.fields["position_ids"].tolist() == [[0] * 3, [1] * 3, [2] * 3]
    assert batch.loss_tokens.tolist() == [2]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (REWARD, None, "reward: missing"),
        (MASK, [0, 1], "loss_mask: length"),
        (MASK, [[0, 1, 1]], "loss_mask: shape"),
        (MASK, [0, 1, 256], "loss_mask: dtype"),
        (MASK, [0, 1, 0.5], "loss_mask: dtype"),
        (MASK, [0, 1, float("nan")], "loss_mask: dtype"),
        (MASK, ["0", "1", "1"], "loss_mask: dtype"),
        (LABELS, [2**40, 1, 1], "labels: dtype"),
        (ROUTES, np.zeros((3, 2, 4)), "routes: length"),
        (REWARD, [0.5], "reward: shape"),
    ],
)
def test_a_field_that_is_not_as_declared_rejects_its_sample_alone(field: Field, value: Any, reason: str) -> None:
    values = {} if value is None else {field.name: value}
    good = {"loss_mask": [1], "labels": [1], "routes": np.zeros((1, 2, 3)), "reward": 1.0}
    source = Listed([([1], good), ([1, 2, 3], values), ([4], good)])
    (batch,) = batches(source, lease((field,)))
    assert batch.lengths.tolist() == [1, 0, 1]
    assert batch.rejected == {reason: 1}
    with pytest.raises(SampleError, match=rf"row 1: got a sample that cannot be used \({reason}\)"):
        list(batches(source, lease((field,), poison="error")))


def test_frames_by_sample_are_no_larger_than_a_chunk_may_be() -> None:
    wide = Field(name="wide", dtype="float64", axis="sample", shape=(100,), default=0)
    found = list(batches(Listed([([1], {})] * 50), lease((wide,), max_chunk_bytes=8000)))
    assert [len(batch.lengths) for batch in found] == [10] * 5


@pytest.mark.parametrize(("vocab_size", "dtype", "good"), [
    (65_536, "uint16", True), (65_537, "uint16", False), (None, "uint16", True), (200_000, "int32", True),
])  # fmt: skip
def test_a_vocabulary_that_the_run_cannot_hold_is_refused_before_its_first_sample(
    vocab_size: int | None, dtype: str, good: bool
) -> None:
    source = Listed([([1, 2], {})], vocab_size=vocab_size)
    if good:
        assert len(list(batches(source, lease((), dtype=dtype)))) == 1
        return
    with pytest.raises(ConfigError, match=r"streams\.s: got a tokenizer with 65537 ids.*Set `tokens: int32"):
        next(batches(source, lease((), dtype=dtype)))


@pytest.mark.parametrize(("count", "length", "most"), [(20_000, 1, 1 << 20), (3, 400, 1000)])
def test_a_chunk_that_no_credit_allows_is_refused_and_not_waited_with(count: int, length: int, most: int) -> None:
    """A source of whole batches decides how large they are."""
    batch = TokenChunk(np.ones(count * length, np.uint16), np.full(count, length, np.uint32), Cursor(0, 0, count), {})
    expected = f"{count} samples and {2 * count * length} bytes, expected at most 16384 samples and {most} bytes"
    with pytest.raises(SampleError, match=expected):
        chunk_of(batch, lease((), dtype="uint16", max_chunk_bytes=most), (1, 1))


def test_a_mask_that_the_run_would_lose_is_refused_with_the_line_to_add() -> None:
    with pytest.raises(SampleError, match=r"Add `fields: \{loss_mask: \{\}\}` to broker.yaml"):
        one([1, 2], {"loss_mask": [0, 1]})
    assert one([1, 2], {"loss_mask": [1, 1]}).lengths.tolist() == [2], "one that masks nothing changes nothing"


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_bfloat16_is_the_nearest_and_ties_go_to_even(values: list[float]) -> None:
    array = np.array(values, np.float32)
    bits = to_bfloat16(array)
    back = from_bfloat16(bits)
    assert np.isnan(back).tolist() == np.isnan(array).tolist()
    finite = np.isfinite(back) & np.isfinite(array)
    low, high = from_bfloat16(bits - (bits & 0x7FFF > 0)), from_bfloat16(bits + 1)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(back.astype(np.float64) - array)
        for other in (low, high):
            further = np.abs(other.astype(np.float64) - array)
            some = finite & np.isfinite(other)
            assert (error[some] <= further[some]).all()
            assert (bits[some & (error == further) & (other != back)] % 2 == 0).all()


def test_bfloat16_is_torch_s() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(3).standard_normal(10_000).astype(np.float32) * 10.0 ** np.arange(-20, 20).repeat(
        250
    )
    theirs = torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bfloat16(values.astype(np.float32)), theirs)


# Over the wire into the books


@st.composite
def labeled(draw: st.DrawFn) -> list[tuple[list[int], dict[str, Any]]]:
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    rows = []
    for length in lengths:
        mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        labels = draw(st.lists(st.sampled_from([-100, 3, 9]), min_size=length, max_size=length))
        rows.append((list(range(1, length + 1)), {"loss_mask": mask, "labels": labels, "reward": float(length)}))
    return rows


def counted(tokens: range, values: dict[str, Any], names: set[str]) -> int:
    """Labels that count in a piece, one at a time: its first token is nobody's target."""
    return sum(
        ("loss_mask" not in names or values["loss_mask"][at] != 0)
        and ("labels" not in names or values["labels"][at] != -100)
        for at in tokens[1:]
    )


@given(labeled(), st.sampled_from(["truncate", "split", "drop"]), st.sets(st.sampled_from(["loss_mask", "labels"])))
def test_pieces_keep_their_own_labels_and_bytes(
    rows: list[tuple[list[int], dict[str, Any]]], policy: Overlong, names: set[str]
) -> None:
    fields = (*(field for field in (LABELS, MASK) if field.name in names), REWARD)
    rows = [
        (tokens, {name: value for name, value in values.items() if name in names | {"reward"}})
        for tokens, values in rows
    ]
    given_lease = lease(fields, overlong=policy)
    batch = next(batches(Listed(rows), given_lease))
    chunk = chunk_of(batch, given_lease, (1, 1))
    table, merge = SampleTable(), FeedMerge(Rules(streams=(StreamRules("s", 1.0, 1),)))
    terms = StreamTerms("s", partitions=1, limit=LIMIT, overlong=policy, poison="drop")
    admission = Admission([terms], "int32", fields, 1000, table, merge)
    intake = Intake(1 << 20, admission.token_bytes)
    message = chunk_as(Samples, chunk)
    envelope = Envelope(run=1, epoch=1, fence=1, message=message, payload=tuple(map(memoryview, chunk.payload)))  # type: ignore[arg-type]
    came = admission.check.verdict(envelope, message, terms, intake, KeyIndex(1))
    assert isinstance(came, ReceivedChunk)
    assert chunk.num_bytes == sum(len(tokens) for tokens, _ in rows) * admission.token_bytes
    (store,), rejected = admission.admit(0, 0, intake, came)
    assert isinstance(store, Store)
    found = [
        (int(table.index[h]), int(table.part[h]), int(table.length[h]), int(table.loss_tokens[h]))
        for h in store.handles
    ]
    expected = []
    for index, (tokens, values) in enumerate(rows):
        stops = range(0, len(tokens), LIMIT) if policy == "split" or len(tokens) <= LIMIT else [0] * (policy != "drop")
        for part, begin in enumerate(stops):
            piece = range(begin, min(begin + LIMIT, len(tokens)))
            expected.append((index, part, len(piece), counted(piece, values, names)))
    assert found == expected
    without = sum(loss == 0 for *_, loss in expected)
    assert admission.counts[0].warnings == ({"no_loss_tokens": without} if without else {})
    whole = [counted(range(len(tokens)), values, names) for tokens, values in rows if tokens]
    assert batch.warnings.get("no_loss_tokens", 0) == whole.count(0)
    assert rejected.tolist() == sorted(set(range(len(rows))) - {index for index, *_ in expected})
    assert store.rows.tolist() == [index for index, *_ in expected]
    assert [int(table.crc[h]) for h in store.handles] == [crc_of(rows[index], fields) for index, *_ in expected]


def crc_of(row: tuple[list[int], dict[str, Any]], fields: tuple[Field, ...]) -> int:
    """Of all bytes of a sample, frame by frame."""
    arrays: list[NDArray[Any]] = [np.array(row[0], "<i4")]
    arrays += [np.array(row[1][field.name], field.storage) for field in fields]
    return crc32c(b"".join(array.tobytes() for array in arrays))


# Samples without their declared loss mask

HELD = {"a": [1, 0, 1], "b": None, "c": [0, 1]}
"""The loss mask of each sample; b has lost its own."""


def npy(ids: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(ids, np.uint8))
    return file.getvalue()


def write(kind: str, folder: Path) -> SourceSettings:
    """Samples of 3, 2 and 2 ids, as one file of this kind."""
    ids = {"a": [5, 6, 7], "b": [5, 6], "c": [7, 8]}
    rows = [{"tokens": ids[key]} | ({"loss_mask": mask} if mask else {}) for key, mask in HELD.items()]
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind.startswith("parquet"):
        names = ["tokens"] if kind == "parquet of no masks" else ["tokens", "loss_mask"]
        table = {name: pa.array([row.get(name) for row in rows], pa.list_(pa.int32())) for name in names}
        pq.write_table(pa.table(table), folder / "a.parquet")
    else:
        with tarfile.open(folder / "a.tar", "w") as archive:
            for key, mask in HELD.items():
                members = [("npy", npy(ids[key])), *([("loss_mask.npy", npy(mask))] if mask else [])]
                if kind == "tar of json":
                    members = [
                        ("json", json.dumps({"tokens": ids[key]} | ({"loss_mask": mask} if mask else {})).encode())
                    ]
                elif kind == "tar of no masks":
                    members = members[:1]
                for suffix, raw in members:
                    header = tarfile.TarInfo(f"{key}.{suffix}")
                    header.size = len(raw)
                    archive.addfile(header, io.BytesIO(raw))
    source: Any = "webdataset" if kind.startswith("tar") else kind.partition(" ")[0]
    return SourceSettings(source, f"{folder}/*", shuffle=False)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_lease_among_many_begins_with_small_chunks_that_grow(kind: str, tmp_path: Path) -> None:
    ids = [[1, 2, 3, 4]] * 6000
    if kind == "parquet":
        pq.write_table(pa.table({"tokens": pa.array(ids, pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    else:
        (tmp_path / "a.jsonl").write_text('{"tokens": [1, 2, 3, 4]}\n' * len(ids))
    source = open_source(SourceSettings(kind, f"{tmp_path}/*", tokens_key="tokens"))  # type: ignore[arg-type]
    counts = [len(batch.lengths) for batch in batches(source, lease(()), share=1 / 64)]
    assert sum(counts) == len(ids)
    for number, count in enumerate(counts[:5]):
        assert 1 <= count <= 64 * 2**number
    whole = [len(batch.lengths) for batch in batches(source, lease(()))]
    assert whole[0] > 64


@pytest.mark.parametrize("kind", ["tar", "tar of json", "jsonl", "parquet", "tar of no masks", "parquet of no masks"])
@pytest.mark.parametrize("policy", [None, "train", "reject"])
def test_a_sample_without_its_loss_mask_is_rejected_or_counted(kind: str, policy: Any, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(write(kind, tmp_path), missing_mask=policy)
    (batch,) = batches(open_source(settings), lease((MASK,)))
    lost = 3 if "no masks" in kind else 1
    if policy == "reject" or (policy is None and kind.startswith("tar")):
        assert batch.lengths.tolist() == ([0, 0, 0] if lost == 3 else [3, 0, 2])
        assert (batch.rejected, batch.warnings) == ({"loss_mask: missing": lost}, {})
        said = r"got a sample without a loss_mask, but the run declares this field\. Add the mask, or"
        with pytest.raises(SampleError, match=said):
            list(batches(open_source(settings), lease((MASK,), poison="error")))
    else:
        assert batch.lengths.tolist() == [3, 2, 2]
        assert (batch.rejected, batch.warnings) == ({}, {"no_loss_mask": lost})
    (batch,) = batches(open_source(settings), lease((msgspec.structs.replace(MASK, default=1),)))
    assert (batch.lengths.tolist(), batch.warnings) == ([3, 2, 2], {}), "the run says what such samples have"


def test_the_digest_says_what_becomes_of_samples_without_a_mask(tmp_path: Path) -> None:
    def digest(kind: str, policy: Any, **more: Any) -> str:
        settings = msgspec.structs.replace(write(kind, tmp_path), missing_mask=policy)
        return open_source(settings, open_tokenizer(TokenizerSettings(**more))).digest

    assert digest("tar", None) == digest("tar", "reject") != digest("tar", "train")
    assert digest("tar", None, train_on="all") == digest("tar", "train", train_on="all")
    (tmp_path / "a.tar").unlink()
    assert digest("jsonl", None) == digest("jsonl", "train") != digest("jsonl", "reject")
