"""Known keys of rows: labels, masks, padding and boundaries are read from every format, or the row is refused."""

import tempfile
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streampack as sp
from streampack.core.model.fields import Field
from streampack.errors import SampleError
from streampack.sources import RawSample, SourceSettings, open_source
from streampack.sources.row_keys import KNOWN
from tests.sources.writers import PLAIN, npy, write_members, write_rows

MASK = Field(name="loss_mask", dtype="uint8", align="target")
LABELS = Field(name="labels", dtype="int32", align="target", pad=-100)
DECLARED = [(), (MASK,), (LABELS,), (MASK, LABELS)]
LEARNED = [
    "loss_mask",
    "completion_mask",
    "assistant_masks",
    "assistant_mask",
    "response_mask",
    "token_mask",
    "label_mask",
]
POSITIONS = ["position_ids", "input_pos"]
SEGMENTS = [
    "seq_idx", "sequence_id", "sequence_ids", "segment_id", "segment_ids", "document_id", "document_ids", "doc_ids",
    "inputs_segmentation",
]  # fmt: skip
STARTS = ["cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_start_id", "seq_boundaries"]
LENGTHS = ["seq_lengths", "seq_lens", "seqlens", "doc_lens"]
ONES = [
    "loss_masks", "loss_weight", "loss_weights", "action_mask", "answer_mask", "target_mask", "tool_mask", "env_mask",
]  # fmt: skip
EQUAL = ["token_type_ids", "mm_token_type_ids", "prompt_mask", "mask", "padding_mask", "pad_mask"]
NEVER = ["shift_labels", "decoder_input_ids"]
ALL = ["labels", "attention_mask", *LEARNED, *POSITIONS, *SEGMENTS, *STARTS, *LENGTHS, *ONES, *EQUAL, *NEVER]
KINDS = ["python", "jsonl", "parquet", "huggingface"]
Row = dict[str, Any]


def test_the_oracle_knows_every_known_key() -> None:
    assert sorted(KNOWN) == sorted(ALL)


def meaning(row: Row, declared: tuple[Field, ...] = ()) -> list[tuple[int, int]] | set[str]:
    """Each token of a row with its label, not shifted; or the keys that do not let the row be one sample."""
    ids, wrong = row["input_ids"], set[str]()
    names = [field.name for field in declared]
    begin, end = 0, len(ids)
    if (real := row.get("attention_mask")) is not None:
        ones = [place for place, value in enumerate(real) if value]
        if len(real) != len(ids) or not ones or any(real[place] != 1 for place in range(ones[0], ones[-1] + 1)):
            wrong.add("attention_mask")
        else:
            begin, end = ones[0], ones[-1] + 1
    places = range(begin, end)
    labels = {place: ids[place] for place in places}
    for key, values in row.items():
        if values is None or key not in ALL or key == "attention_mask":
            continue
        by_token = len(values) == len(ids)
        if key == "labels" or key in LEARNED:
            if not by_token:
                wrong.add(key)
                continue
            if key == "loss_mask" and key in names and not all(0 <= value < 256 for value in values):
                wrong.add(key)
            for place in places:
                value = values[place]
                if key == "labels" and "labels" in names:
                    labels[place] = -100 if labels[place] == -100 else value
                elif key == "labels":
                    if value not in (-100, ids[place]):
                        wrong.add(key)
                    elif value == -100:
                        labels[place] = -100
                elif value not in (0, 1) and not (key == "loss_mask" and key in names):
                    wrong.add(key)
                elif value == 0:
                    labels[place] = -100
        elif key in POSITIONS:
            if not by_token or [values[place] for place in places] != list(range(len(places))):
                wrong.add(key)
        elif key in SEGMENTS:
            if len({values[place] for place in places} if by_token else set(values)) > 1:
                wrong.add(key)
        elif key in STARTS:
            if not set(values) <= {0, len(ids), end - begin}:
                wrong.add(key)
        elif key in LENGTHS:
            if len(values) > 1 or values[0] not in (len(ids), end - begin):
                wrong.add(key)
        elif key in ONES:
            if not by_token or any(values[place] != 1 for place in places):
                wrong.add(key)
        elif key in EQUAL:
            if by_token and len({values[place] for place in places}) > 1:
                wrong.add(key)
        else:
            wrong.add(key)
    return wrong or [(ids[place], labels[place]) for place in places]


@st.composite
def values_of(draw: st.DrawFn, key: str, ids: list[int], padding: tuple[int, int]) -> Any:
    """A value for a key of a row: often one that can be read, sometimes one that cannot."""
    size, (before, after) = len(ids), padding
    kind = draw(st.sampled_from(["good", "good", "good", "good", "any", "none"]))
    if kind == "none":
        return None
    if kind == "any":
        return draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, -100, 7]), min_size=1, max_size=size + 1))
    if key == "attention_mask":
        return [0] * before + [1] * (size - before - after) + [0] * after
    if key == "labels":
        return [draw(st.sampled_from([-100, each])) for each in ids]
    if key in LEARNED:
        return draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    if key in POSITIONS:
        return [0] * before + list(range(size - before - after)) + [0] * after
    if key in STARTS:
        return draw(st.sampled_from([[0], [0, size], [0, size - before - after]]))
    if key in LENGTHS:
        return [draw(st.sampled_from([size, size - before - after]))]
    return [1] * size


@st.composite
def tables(draw: st.DrawFn) -> list[Row]:
    """Rows of a table with the same keys: one known key, or several together."""
    usual = ["labels", "attention_mask", *LEARNED] * 3
    together = st.lists(st.sampled_from([*ALL, *usual]), min_size=2, max_size=6, unique=True)
    keys = draw(st.sampled_from(ALL).map(lambda key: [key]) | together)
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        ids = draw(st.lists(st.integers(3, 9), min_size=1, max_size=6))
        before = draw(st.sampled_from([0, 0, draw(st.integers(0, len(ids) - 1))]))
        after = draw(st.sampled_from([0, draw(st.integers(0, len(ids) - 1 - before))]))
        row: Row = {"input_ids": ids}
        for key in keys:
            row[key] = draw(values_of(key, ids, (before, after)))
        rows.append(row)
    return rows


def labels_of(record: RawSample) -> list[tuple[int, int]]:
    """The tokens of a sample that was read, with their labels."""
    tokens = record.tokens.tolist()
    labels = record.fields.get("labels", record.tokens).tolist()
    mask = record.fields.get("loss_mask", [1] * len(tokens))
    return [(token, label if learned else -100) for token, label, learned in zip(tokens, labels, mask, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(rows=tables(), declared=st.sampled_from(DECLARED))
def test_known_keys_are_read_as_the_oracle_reads_them_or_named(
    kind: str, rows: list[Row], declared: tuple[Field, ...]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(write_rows(kind, Path(folder), rows), PLAIN)
        records = list(source.read(0, 1, seed=0, passes=1, fields=declared))
    assert len(records) == len(rows)
    for row, record in zip(rows, records, strict=True):
        expected = meaning(row, declared)
        if isinstance(expected, set):
            assert record.reason is not None, f"{row} was read, but {expected} cannot be"
            assert record.reason.partition(":")[0] in expected
        else:
            assert record.reason is None, row
            assert labels_of(record) == expected


@st.composite
def good_tables(draw: st.DrawFn) -> list[Row]:
    """Many rows, all of which can be read."""
    rows = [row for _ in range(8) for row in draw(tables())]
    return [row for row in rows if isinstance(meaning(row), list)]


@pytest.mark.parametrize("kind", ["rows", "iterator", *KINDS[1:]])
@settings(max_examples=4, deadline=None)
@given(rows=good_tables())
def test_local_serves_the_labels_of_rows_without_any_declaration(kind: str, rows: list[Row]) -> None:
    rows = [{"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}, *rows]
    with tempfile.TemporaryDirectory() as folder:
        source: Any = rows
        if kind == "iterator":
            source = iter(rows)
        elif kind == "huggingface":
            keys = {key: None for row in rows for key in row}
            source = Path(folder, "saved")
            datasets.Dataset.from_list([{**keys, **row} for row in rows]).save_to_disk(source)
        elif kind in ("jsonl", "parquet"):
            write_rows(kind, Path(folder), rows)
            source = Path(folder, "a").rename(Path(folder, f"a.{kind}"))
        with sp.local(source, budget=64, shuffle=False) as loader:
            served = list[tuple[int, int]]()
            for pack in loader:
                for begin, end in zip(pack.cu_seqlens[:-1], pack.cu_seqlens[1:], strict=True):
                    ids = pack.input_ids[begin:end].tolist()
                    served += zip(ids[1:], pack.labels[begin : end - 1].tolist(), strict=True)
    expected = [tokens[1:] for row in rows if isinstance(tokens := meaning(row), list)]
    assert sorted(served) == sorted(pair for tokens in expected for pair in tokens)


@pytest.mark.parametrize("key", [key for key in ALL if key not in ("labels", "attention_mask", *LEARNED)])
def test_local_refuses_a_row_whose_key_it_does_not_read_and_names_it(key: str) -> None:
    words = rf"row 0: got a sample that cannot be used \({key}: \w+\), expected .*{key}"
    loader = sp.local([{"input_ids": [3, 4, 5, 6], key: [0, 1, 0, 1]}], budget=16)
    with loader, pytest.raises(SampleError, match=words):
        list(loader)


def test_local_names_the_line_to_write_if_only_later_rows_bring_a_mask() -> None:
    rows = [{"input_ids": [3, 4]}] * 20 + [{"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}]
    words = r"row 20: got a loss mask .* or fields=\{'loss_mask': \{\}\} to streampack\.local"
    loader = sp.local(rows, budget=16, shuffle=False)
    with loader, pytest.raises(SampleError, match=words):
        list(loader)
    with sp.local(rows, budget=16, fields={"loss_mask": {}}) as loader:
        assert sum(int((pack.labels != -100).sum()) for pack in loader) == 22


SEVERAL: list[tuple[Row, list[int] | None]] = [
    ({"text": "ab", "input_ids": [3, 4]}, [3, 4]),
    ({"text": "ab", "tokens": [3, 4]}, [3, 4]),
    ({"tokens": [3, 4], "input_ids": [5]}, [3, 4]),
    ({"messages": [{"role": "assistant", "content": "a"}], "input_ids": [3, 4]}, [3, 4]),
    ({"prompt": "a", "completion": "b", "input_ids": [3, 4]}, [3, 4]),
    ({"text": "ab", "messages": [{"role": "assistant", "content": "a"}]}, [97, 98]),
    ({"text": "ab", "prompt": "a", "completion": "b"}, [97, 98]),
    ({"prompt": "a", "completion": "b", "response": "c"}, [97, 98]),
]


@pytest.mark.parametrize("kind", [*KINDS, "webdataset"])
@pytest.mark.parametrize(("row", "tokens"), SEVERAL)
def test_ids_are_taken_first_of_several_keys_and_the_others_are_named(
    kind: str, row: Row, tokens: list[int], tmp_path: Path
) -> None:
    (record,) = open_source(write_rows(kind, tmp_path, [row]), PLAIN).read(0, 1, seed=0, passes=1)
    assert (record.tokens.tolist(), record.warnings) == (tokens, ("several_keys",))


ONE: list[Row] = [
    {"text": "ab", "prompt": "a"},
    {"text": "ab", "tokens": 7},
    {"text": "ab", "tokens": ["a", "b"]},
    {"text": "ab", "messages": None},
]


@pytest.mark.parametrize("kind", [*KINDS, "webdataset"])
@pytest.mark.parametrize("row", ONE)
def test_a_key_that_holds_no_sample_is_not_said(kind: str, row: Row, tmp_path: Path) -> None:
    (record,) = open_source(write_rows(kind, tmp_path, [row]), PLAIN).read(0, 1, seed=0, passes=1)
    assert (record.tokens.tolist(), record.warnings) == ([97, 98], ())


def test_a_named_key_is_not_said(tmp_path: Path) -> None:
    settings = write_rows("jsonl", tmp_path, [{"text": "ab", "input_ids": [3, 4]}], text_key="text")
    (record,) = open_source(settings, PLAIN).read(0, 1, seed=0, passes=1)
    assert (record.tokens.tolist(), record.warnings) == ([97, 98], ())


def test_members_of_a_tar_bring_labels_and_padding_and_ids_win_over_text(tmp_path: Path) -> None:
    write_members(
        tmp_path / "a.tar",
        [
            ("0.npy", npy([3, 4, 5])), ("0.labels.npy", npy([-100, 4, 5])),
            ("1.npy", npy([3, 4, 5])), ("1.json", b'{"attention_mask": [0, 1, 1], "url": "x"}'),
            ("2.json", b'{"seq_lengths": [1, 2]}'), ("2.npy", npy([3, 4, 5])),
            ("3.npy", npy([3, 4, 5])), ("3.txt", b"ab"),
            ("4.json", b'{"input_ids": [3, 4], "completion_mask": [0, 1]}'),
            ("5.json", b'{"labels": "news"}'), ("5.txt", b"ab"),
            ("6.npy", npy([3, 4, 5])), ("6.position_ids.npy", b"broken"),
            ("7.npy", npy([3, 4, 5])), ("7.json", b"{"),
        ],
    )  # fmt: skip
    source = open_source(SourceSettings("webdataset", path=str(tmp_path / "a.tar"), shuffle=False), PLAIN)
    records = list(source.read(0, 1, seed=0, passes=1))
    assert [record.reason for record in records] == [
        None, None, "seq_lengths: packed", None, None, None, "position_ids: npy", None,
    ]  # fmt: skip
    assert [labels_of(record) for record in records if record.reason is None] == [
        [(3, -100), (4, 4), (5, 5)], [(4, 4), (5, 5)], [(3, 3), (4, 4), (5, 5)], [(3, -100), (4, 4)],
        [(97, 97), (98, 98)], [(3, 3), (4, 4), (5, 5)],
    ]  # fmt: skip
    assert [record.warnings for record in records if record.warnings] == [("several_keys",)]
