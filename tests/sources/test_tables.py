"""Tables, columns and splits are refused where rows are expected, with what to write; what is written works."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

import streampack as sp
from streampack.errors import SampleError, UserError
from streampack.producer.pushed_samples import as_list

pd = import_module("pandas")
COLUMNS: dict[str, Any] = {"input_ids": [[3, 4], [5, 6, 7]], "attention_mask": [[1, 1], [1, 1, 1]]}
FRAME = pd.DataFrame({"text": ["ab", "cd"], "source": ["web", "web"]}, index=[5, 7])
SAVED = datasets.Dataset.from_pandas(FRAME)


def encoding() -> Any:
    """Return the encoding of many texts by a tokenizer of transformers."""
    return import_module("transformers").BatchEncoding(COLUMNS)


def samples_of(source: Any, **options: Any) -> list[list[int]]:
    """All samples that ``local`` serves, sorted."""
    with sp.local(source, budget=16, **options) as loader:
        found = [
            pack.input_ids[begin:end].tolist()
            for pack in loader
            for begin, end in zip(pack.cu_seqlens[:-1], pack.cu_seqlens[1:], strict=True)
        ]
    return sorted(sample for sample in found if sample)


REFUSED: list[tuple[Any, str]] = [
    (encoding(), r"a dict of columns \(input_ids, attention_mask\)"),
    (COLUMNS, r"a dict of columns \(input_ids, attention_mask\)"),
    ({key: np.array([[3, 4], [5, 6]]) for key in COLUMNS}, "a dict of columns"),
    ({key: torch.tensor([[3, 4], [5, 6]]) for key in COLUMNS}, "a dict of columns"),
    (SAVED[:], r"a dict of columns \(text\)"),
    (dict.fromkeys(["text", "source"], SAVED["text"]), r"a dict of columns \(text\)"),
    (FRAME.to_dict("list"), r"a dict of columns \(text\)"),
    (FRAME.to_dict(), r"a dict of columns \(text\)"),
    ({"prompt": ["a"], "completion": ["b"]}, r"a dict of columns \(prompt, completion\)"),
    ({"train": COLUMNS}, "train: got a dict with the keys input_ids, attention_mask, expected rows"),
    ({"train": encoding()}, "train: got a dict with the keys input_ids, attention_mask, expected rows"),
    (datasets.DatasetDict({"train": SAVED, "test": SAVED}), r"a DatasetDict with the splits train, test.*\['train'\]"),
    (datasets.DatasetDict({"train": SAVED}), r"a DatasetDict with the splits train, .*dataset\['train'\]"),
    (datasets.IterableDatasetDict({"train": SAVED.to_iterable_dataset()}), "an? IterableDatasetDict with the splits"),
    ({"web": datasets.DatasetDict({"train": SAVED})}, "web: got a DatasetDict with the splits train"),
    (FRAME, r"data: got a DataFrame, expected rows.*df\.to_dict\('records'\)"),
    (FRAME["text"], r"data: got a Series, expected rows.*series\.tolist\(\)"),
    ({"web": FRAME["text"]}, r"web: got a Series, expected rows.*series\.tolist\(\)"),
    (pa.table({"text": ["ab"]}), r"data: got a Table, expected rows.*table\.to_pylist\(\)"),
    (pa.chunked_array([["ab"]]), r"data: got a ChunkedArray, expected rows.*to_pylist\(\)"),
    (
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2))),
        r"data: got a DataLoader, which yields batches.* Pass its dataset",
    ),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_local_refuses_what_holds_no_rows(given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        sp.local(given, budget=16).close()


@pytest.mark.parametrize(
    ("name", "words"),
    [("num_workers", "Leave it out"), ("collate_fn", "Leave it out"), ("batch_size", "mean 'samples'"),
     ("epochs", "mean 'passes'"), ("drop_last", "mean tail='drop'")],
)  # fmt: skip
def test_an_argument_of_a_dataloader_is_refused_with_what_to_write(name: str, words: str) -> None:
    options: dict[str, Any] = {name: 2}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'.*{words}"):
        sp.local([[3, 4]], **options)


TEXTS = [[97, 98, 256], [99, 100, 256]]
IDS = [[3, 4], [5, 6, 7]]
SERVED: dict[str, tuple[Any, list[list[int]]]] = {
    "the records of a frame": (FRAME.to_dict("records"), TEXTS),
    "the list of a column of a frame": (FRAME["text"].tolist(), TEXTS),
    "the list of a table": (pa.table({"text": ["ab", "cd"]}).to_pylist(), TEXTS),
    "one split": (datasets.DatasetDict({"train": SAVED})["train"], TEXTS),
    "a dataset of columns": (datasets.Dataset.from_dict(dict(encoding())), IDS),
    "rows of columns": ([dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)], IDS),
    "streams with the names of columns": (
        {"input_ids": {"source": IDS[:1]}, "text": {"source": ["ab"]}},
        [IDS[0], TEXTS[0]],
    ),
    "streams": ({"web": ["ab"], "books": SAVED.select([1])}, TEXTS),
    "a stream called text": ({"text": ["ab", "cd"]}, TEXTS),
    "a matrix": (np.array([[3, 4], [5, 6]]), [[3, 4], [5, 6]]),
    "a tensor": (torch.tensor([[3, 4], [5, 6]]), [[3, 4], [5, 6]]),
}


@pytest.mark.parametrize("case", SERVED)
def test_settings_that_the_errors_suggest_are_served(case: str) -> None:
    source, expected = SERVED[case]
    assert samples_of(source) == sorted(expected)


def test_files_of_streams_may_have_the_names_of_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab\n")
    (tmp_path / "b.txt").write_text("cd\n")
    streams = {"text": str(tmp_path / "a.txt"), "prompt": [str(tmp_path / "b.txt")]}
    assert samples_of(streams) == TEXTS


@pytest.mark.parametrize("given", [COLUMNS, encoding(), FRAME, FRAME["text"], datasets.DatasetDict({"train": SAVED})])
def test_a_producer_refuses_columns_in_place_of_samples(given: Any) -> None:
    with pytest.raises(UserError, match=r"got a .*expected (rows|one split)"):
        as_list(given)


def batches() -> Iterator[dict[str, Any]]:
    yield COLUMNS


BAD: list[tuple[Any, str]] = [
    (batches(), r"\(ragged\), expected a 1-D array of ids, but input_ids is nested\. A row has the ids of one sample"),
    ([([3, 4], [4, 5])], r"\(ragged\), .* the row is a tuple of several values\. Write {'input_ids': ids, 'labels': "),
    ([{"text": ["ab", "cd"]}], r"\(dtype\), .* but text is a list\. A row has one text, not a batch of texts"),
    ([{"text": float("nan")}], r"\(dtype\), .* but text is NaN, which stands for a missing value\. Remove such rows"),
    ([float("nan")], r"\(dtype\), .* but the row is NaN"),
    ([{"text": b"ab"}], r"\(dtype\), .* but text is bytes\. Decode them"),
    ([b"ab"], r"\(dtype\), .* but the row is bytes\. Decode them"),
    (
        ['{"text": "ab"}'],
        r"\(dtype\), .* the row is a text that holds JSON with the key text\. Parse it with json\.loads",
    ),
    ([{"input_ids": "[1, 2]"}], r"\(dtype\), .* but input_ids is a text\. If it holds a list as JSON, parse it"),
    ([{"messages": "[]"}], r"\(messages\), .* but messages is a text, not a list\. If it holds JSON, parse it"),
    ([{"input_ids": {"ids": [1]}}], r"\(dtype\), .* but input_ids is a dict, not a list of ids"),
    ([{"input_ids": float("nan")}], r"\(dtype\), .* but input_ids is NaN, not a list of ids"),
    ([{"input_ids": torch.ones(4)}], r"\(dtype\), .* but input_ids has values of the dtype torch\.float32\. Ids are"),
    ([np.ones(4)], r"\(dtype\), .* but the row has values of the dtype float64\. Ids are integers"),
    (np.array([1, 2]), r"\(ragged\), .* but the row is a single number\. A row has a list of ids"),
    ([5, 6], r"\(dtype\), .* but the row is a int"),
    (
        [{"input_ids": [2**31]}],
        r"\(range\), expected a 1-D array of ids within int32\. Use the tokenizer of your model",
    ),
    ([{"input_ids": []}], r"\(empty\), expected at least one token id\. Remove empty samples"),
    ([{"conversations": []}], r"\(missing\), .*Set messages_key: conversations, or rename the key to messages"),
    (
        [{"instruction": "a", "input": "b", "output": "c"}],
        r"\(missing\), .*Write `prompt` \(instruction and input\) and `completion` \(output\)",
    ),
    ([{"prompt": "a", "chosen": "b", "rejected": "c"}], r"\(missing\), .*preferences holds two samples.*send_group"),
    (
        [{"prompt_ids": [1], "completion_ids": [2]}],
        r"\(missing\), .*Write `input_ids` \(prompt_ids \+ completion_ids\)",
    ),
    (
        [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}],
        r"\(messages\), .* messages has a part of the type 'image'\. For images, set tokenizer: \{processor: FOLDER\}",
    ),
]


@pytest.mark.parametrize(("rows", "words"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_each_row_that_cannot_be_used_is_rejected_in_its_own_words(rows: Any, words: str) -> None:
    loader = sp.local(rows, budget=16, tokenizer="bytes")
    with loader, pytest.raises(SampleError, match=rf"row [01].*: got a sample that cannot be used {words}"):
        list(loader)
