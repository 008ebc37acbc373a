"""The page "Size a run": its table follows from the costs on the page, and memory is what `check` says."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT
from tests.integration.running import in_process

PAGE = PAGES[ROOT / "docs/how-to/sizing.md"]
ROWS = [row.strip("| ").split(" | ") for row in re.findall(r"^\| [\d,]+ \| [\d,]+ \|.*$", PAGE, re.MULTILINE)]
A_GPU, PACK, PACKS, SAMPLE = 10_000, 8192, 8, 500


def costs(part: str) -> list[float]:
    """Return the numbers that the page has for a part."""
    (found,) = re.findall(rf"^\| {part} \| ([^|]+) \|", PAGE, re.MULTILINE)
    return [float(number) for number in re.findall(r"[\d.]+", found)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_follows_from_the_costs_of_the_page(row: list[str], tmp_path: Path) -> None:
    gpus, tokens = (int(number.replace(",", "")) for number in row[:2])
    assert tokens == gpus * A_GPU
    ms, slowest = costs("broker, one million tokens over TCP")[0], costs("producer, tokenizing text or chats")[0]
    sample = costs("log, one sample")[1]
    cores = tokens * ms * 1e-9 + gpus * (tokens / (gpus * PACKS * PACK)) / 7000
    assert cores < 0.5, "the page says less than half a core"
    assert (row[2], row[4]) == ("2", str(ceil(tokens / (slowest * 1e6))))
    assert row[5] == f"{tokens * 4e-6:.{int(tokens < 1e5)}f} MB/s"
    assert row[6] == f"{tokens / SAMPLE * sample * 86_400 / 1e9:.0f} GB"
    file = tmp_path / "broker.yaml"
    memory = "4GiB" if gpus == 4096 else "1GiB"
    file.write_text(
        f"run: sizing\nstate_dir: state\nmemory: {memory}\nplanned_mesh: {{dp: {gpus}}}\n"
        f"rules: {{budget: {PACK}, step: {{packs: {gpus * PACKS}}}, overlong: truncate}}\n"
        "streams: {web: {weight: 0.7, repeat: true}, code: {weight: 0.3, repeat: true}}\n"
    )
    said = " ".join(in_process("check", file).stdout.split())
    (limit,) = re.findall(r"limit a container to ([\d.]+) GiB", said)
    assert row[3] == f"{ceil(float(limit) + 0.5)} GiB"


def test_the_page_has_a_row_for_each_size() -> None:
    assert [row[0] for row in ROWS] == ["8", "64", "512", "4,096"]
