"""``streampack check`` warns about sorted data that is hardly mixed, and about nothing else."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack.config.daemon_settings import ProducerConfig
from streampack.config.typed_yaml import convert
from streampack.producer.first_rows import SORTED, check_rows

ROWS = [{"input_ids": [1] * (5 + i % 3), "label": i // 100} for i in range(800)]
BY_LENGTH = [{"input_ids": [1] * (1 + i)} for i in range(800)]


def write(folder: Path, rows: list[dict[str, Any]], kind: str) -> str:
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=50)
    else:
        for file in range(8):
            own = rows[100 * file : 100 * (file + 1)]
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return f"{folder}/*.{kind}"


def warned(shards: str, kind: str, **more: Any) -> list[str]:
    config = {"streams": {"a": {"source": kind, "shards": shards, **more}}, "broker": "tcp://localhost:7400"}
    found = check_rows(convert(config, ProducerConfig))
    return [warning.meaning for warning in found if warning.word == SORTED]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(("rows", "by"), [(ROWS, "one 'label' each"), (BY_LENGTH, "lengths apart from each other")])
def test_sorted_files_of_which_few_are_read_at_a_time_are_named(
    kind: str, rows: list[dict[str, Any]], by: str, tmp_path: Path
) -> None:
    shards = write(tmp_path, rows, kind)
    (text,) = warned(shards, kind, open_shards=2)
    total = 16 if kind == "parquet" else 8
    assert f"the rows at 8 places of the files have {by}, so the data is sorted. Only 2 of {total} files" in text
    assert "Write `open_shards: 32`" in text


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_that_are_mixed_or_not_sorted_or_read_in_order_are_not_named(kind: str, tmp_path: Path) -> None:
    shards = write(tmp_path, ROWS, kind)
    assert not warned(shards, kind)
    assert not warned(shards, kind, open_shards=8)
    assert not warned(shards, kind, shuffle=False)
    mixed = random.Random(3).sample(ROWS, len(ROWS))
    assert not warned(write(tmp_path, mixed, kind), kind, open_shards=1)
