"""Rows: which key is the sample, what chats and prompts become, and fields of every shape in every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.model.fields import Field
from streampack.errors import ConfigError
from streampack.sources import RawSample, SourceSettings, open_source
from streampack.sources.formats.rows import RowReader, as_field
from streampack.tokenizers.bytes_tokenizer import BytesTokenizer
from tests.sources.writers import PLAIN, npy, write_members, write_rows

ADVANTAGES = Field(name="advantages", dtype="float32", align="target")
REWARD = Field(name="reward", dtype="float64", axis="sample")
MASK = Field(name="loss_mask", dtype="bool", align="target")
ROUTES = Field(name="routes", dtype="uint8", shape=(2, 3))
FIELDS = (ADVANTAGES, REWARD, ROUTES)
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def read(settings: SourceSettings, fields: tuple[Field, ...] = ()) -> list[RawSample]:
    return list(open_source(settings, PLAIN).read(0, 1, seed=0, passes=1, fields=fields))


ROW_KINDS = ["jsonl", "webdataset", "parquet", "huggingface", "python"]


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_fields_come_with_their_dtypes_and_shapes(kind: str, tmp_path: Path) -> None:
    routes = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [0, 1, 2]]]
    rows: list[dict[str, Any]] = [
        {"input_ids": [1, 2], "adv": [0.5, 2.0], "reward": 3.25, "routes": routes},
        {"input_ids": [3]},
    ]
    full, empty = read(write_rows(kind, tmp_path, rows, fields={"advantages": "adv"}), FIELDS)
    assert full.reason is empty.reason is None
    assert dict(empty.fields) == {}
    assert {name: (array.dtype, array.tolist()) for name, array in full.fields.items()} == {
        "advantages": (np.dtype("f4"), [0.5, 2.0]),
        "reward": (np.dtype("f8"), 3.25),
        "routes": (np.dtype("u1"), routes),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"advantages": [0.5]}, "advantages: length"),
    ({"advantages": [0.5, 1.0, 1.5]}, "advantages: length"),
    ({"advantages": []}, "advantages: length"),
    ({"advantages": 0.5}, "advantages: shape"),
    ({"advantages": [[0.5], [1.0]]}, "advantages: shape"),
    ({"advantages": [[0.5], [1.0, 2.0]]}, "advantages: ragged"),
    ({"advantages": ["a", "b"]}, "advantages: dtype"),
    ({"advantages": [1e300, 1.0]}, "advantages: range"),
    ({"reward": [1.0]}, "reward: shape"),
    ({"reward": "good"}, "reward: dtype"),
    ({"seen": [1.5, 2.0]}, "seen: dtype"),
    ({"seen": [1.0, 2.0]}, "seen: dtype"),
    ({"seen": [1, -1]}, "seen: range"),
    ({"seen": [1, 65536]}, "seen: range"),
    ({"seen": [1, None]}, "seen: dtype"),
]


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize(("fields", "reason"), BAD)
def test_a_field_that_does_not_fit_rejects_its_sample_alone(
    kind: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    declared = (ADVANTAGES, REWARD, Field(name="seen", dtype="uint16"))
    if kind in ("parquet", "huggingface") and fields == {"advantages": []}:
        pytest.skip("a column of empty lists has no type")
    rows = [{"input_ids": [1, 2], **fields}, {"input_ids": [3]}]
    bad, good = read(write_rows(kind, tmp_path, rows), declared)
    assert bad.reason == reason
    assert len(bad.tokens) == len(bad.fields) == 0
    assert good.reason is None
    assert good.tokens.tolist() == [3]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_nan_becomes_an_int(value: float) -> None:
    field = Field(name="seen", dtype="int32")
    assert as_field(np.array([value]), field, 1) == "dtype"
    assert isinstance(as_field(np.array([value]), ADVANTAGES, 1), np.ndarray)


@given(
    st.sampled_from(["bool", "uint8", "int8", "int16", "uint32", "int64", "uint64", "float16", "bfloat16", "float64"]),
    st.lists(st.one_of(st.integers(-(2**63), 2**64 - 1), st.booleans()), min_size=1, max_size=5),
)
def test_an_array_holds_the_integers_that_were_given_or_none(dtype: Any, values: list[int]) -> None:
    field = Field(name="x", dtype=dtype)
    found = as_field(values, field, len(values))
    if isinstance(found, str):
        assert found in ("range", "dtype")
    elif found.dtype.kind in "biu":
        assert [int(value) for value in found.tolist()] == [int(value) for value in values]
    else:
        assert np.isfinite(found).all()


@given(st.one_of(st.none(), st.text(), st.floats(), st.lists(st.one_of(st.none(), st.text(), st.lists(st.floats())))))
def test_any_value_is_an_array_or_a_reason(value: object) -> None:
    for field in FIELDS:
        found = as_field(value, field, 2)
        assert isinstance(found, np.ndarray) or found in ("ragged", "shape", "length", "dtype", "range")


# The members of a tar


def test_a_field_may_be_a_member_or_a_key_of_the_json_beside(tmp_path: Path) -> None:
    write_members(
        tmp_path / "a.tar",
        [
            ("0.npy", npy([1, 2])), ("0.advantages.npy", npy([0.5, 1.5])), ("0.json", b'{"reward": 2}'),
            ("1.npy", npy([1, 2])), ("1.advantages.npy", npy([0.5])),
            ("2.npy", npy([1, 2])), ("2.advantages.npy", b"broken"),
            ("3.npy", npy([1, 2])), ("3.json", b"{"),
            ("4.npy", npy([1, 2])),
            ("5.txt", b"ab"), ("5.json", b'{"advantages": [1, 2], "text": "not this"}'),
            ("6.json", b'{"text": "ab", "reward": 1}'), ("6.advantages.npy", npy([1, 2])),
        ],
    )  # fmt: skip
    records = read(SourceSettings("webdataset", path=str(tmp_path / "a.tar"), shuffle=False), (ADVANTAGES, REWARD))
    assert [record.reason for record in records] == [
        None, "advantages: length", "advantages: npy", "advantages: json", None, None, None,
    ]  # fmt: skip
    assert {name: value.tolist() for name, value in records[0].fields.items()} == {
        "advantages": [0.5, 1.5],
        "reward": 2.0,
    }
    assert dict(records[4].fields) == {}
    assert records[5].fields["advantages"].tolist() == records[6].fields["advantages"].tolist() == [1, 2]
    assert [record.reason for record in read(SourceSettings("webdataset", path=str(tmp_path / "a.tar")))] == [None] * 7


# Which key is the sample


DETECTED: list[tuple[dict[str, Any], list[int] | str]] = [
    ({"text": "a", "tokens": [1], "input_ids": [2]}, [1]),
    ({"text": "a", "input_ids": [2]}, [2]),
    ({"text": "a", "tokens": 7}, [97]),
    ({"text": "a", "tokens": ["a"]}, [97]),
    ({"text": "a", "tokens": ["a"], "input_ids": [2]}, [2]),
    ({"tokens": ["a"]}, "dtype"),
    ({"text": "a", "messages": CHAT}, [97]),
    ({"tokens": [1], "input_ids": [2], "messages": CHAT}, [1]),
    ({"input_ids": [2], "messages": CHAT}, [2]),
    ({"text": None, "input_ids": [2]}, [2]),
    ({"prompt": "a", "id": 7}, "missing"),
    ({"id": 7}, "missing"),
]


@pytest.mark.parametrize(("row", "expected"), DETECTED)
def test_the_first_key_that_is_there_is_the_sample(row: dict[str, Any], expected: list[int] | str) -> None:
    found = RowReader(SourceSettings("jsonl", "a"), PLAIN)(row)
    assert (found if isinstance(found, str) else found.tokens.tolist()) == expected


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_chats_and_prompts_bring_a_loss_mask(kind: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": CHAT},
        {"prompt": "ab", "completion": "c"},
        {"prompt": "ab", "response": "c"},
    ]
    chat, pair, other = read(write_rows(kind, tmp_path, rows))
    want = PLAIN.encode_chat(CHAT)
    assert not isinstance(want, str)
    assert chat.tokens.tolist() == want.tokens.tolist()
    assert want.loss_mask is not None
    assert chat.fields["loss_mask"].tolist() == want.loss_mask.tolist()
    assert pair.tokens.tolist() == other.tokens.tolist()
    assert bytes(pair.tokens[:3].astype(np.uint8)) == b"abc"
    assert pair.fields["loss_mask"].tolist()[:3] == [0, 0, 1]
    (tmp_path / "declared").mkdir()
    declared = read(write_rows(kind, tmp_path / "declared", rows), (MASK,))
    assert declared[1].fields["loss_mask"].dtype == np.bool_


def test_named_keys_are_the_only_ones_looked_at() -> None:
    def sample(row: dict[str, Any], **keys: str) -> list[int] | str:
        found = RowReader(SourceSettings("jsonl", "a", **keys), PLAIN)(row)  # type: ignore[arg-type]
        return found if isinstance(found, str) else found.tokens.tolist()

    chat = PLAIN.encode_chat(CHAT)
    assert not isinstance(chat, str)
    assert sample({"text": "a", "talk": CHAT}, messages_key="talk") == chat.tokens.tolist()
    assert sample({"text": "a", "messages": CHAT}, messages_key="talk") == "missing"
    assert sample({"text": "a", "q": "b", "answer": "c"}, prompt_key="q", completion_key="answer")[:2] == [98, 99]
    assert sample({"text": "a", "prompt": "b", "answer": "c"}, completion_key="answer")[:2] == [98, 99]
    assert sample({"q": "b", "response": "c"}, prompt_key="q")[:2] == [98, 99]
    assert sample({"messages": "no list"}) == "messages"


def test_nulls_that_a_table_adds_to_messages_are_taken_out(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi", "name": "Ann"}, {"role": "assistant", "content": None, "calls": ["f"]}]
    pq.write_table(pa.table({"messages": [talk]}), tmp_path / "a.parquet")
    seen: list[Any] = []

    class Spy(BytesTokenizer):
        def encode_chat(self, messages: object, tools: object = None, variables: object = None) -> str:
            seen.extend((messages, tools))
            return "seen"

    list(open_source(SourceSettings("parquet", path=str(tmp_path / "a.parquet")), Spy()).read(0, 1, seed=0, passes=1))
    assert seen == [talk, None]


def test_a_mapped_field_that_the_run_does_not_declare_is_refused(tmp_path: Path) -> None:
    settings = write_rows("jsonl", tmp_path, [{"text": "a"}], fields={"advantage": "adv"})
    with pytest.raises(
        ConfigError, match=r"got advantage, expected one of the fields that the run declares \(advantages\)"
    ):
        read(settings, (ADVANTAGES,))
