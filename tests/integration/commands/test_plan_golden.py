"""The whole output of ``streampack plan`` for several inputs, as text and as JSON, against one golden file.

Where the output changes on purpose, write the file anew:

    python -m tests.integration.commands.test_plan_golden
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.commands.planned_media import make_media_files
from tests.integration.commands.planned_run import RULES, make_files
from tests.integration.running import in_process, write, write_jsonl

GOLDEN = Path(__file__).parents[2] / "fixtures" / "reports" / "plan.txt"
CASES = (
    "lengths.npy --budget 2048 --mesh dp=4,cp=2,tp=2",
    "lengths.npy --total 300000 --budget 4096 --packer exact_fill",
    "lengths.npy --budget 4096,1024 --window 64,128 --packer concatenative,exact_fill --mesh dp=2 --mesh dp=3,cp=3",
    "lengths.npy --budget 512 --overlong split",
    "batch.npy -c warmup.yaml",
    "batch.npy -c marks.yaml --batch 90 --mesh dp=2",
    "batch.npy --budget 1024 --batch 30 --mesh dp=4 --mesh dp=4,pp=2 --shape exact --shape fixed --shape multiple=128",
    "batch.npy --mesh dp=2,cp=2,tp=2 --precision mxfp8 --shape exact --batch 64",
    "-c rejected.yaml --budget 64",
    "-c text/producer.yaml -c text/broker.yaml --samples 150",
    "-c media/producer.yaml -c media/broker.yaml --packer exact_fill,sliding_ffd",
    "-c tight/producer.yaml -c tight/broker.yaml",
)
AS_JSON = (*CASES[2:3], *CASES[5:6], *CASES[10:])


def make_inputs(folder: Path) -> None:
    """Write the lengths, texts, images and configurations that the cases read."""
    lengths = np.random.default_rng(0).lognormal(5, 1, 3000)
    np.save(folder / "lengths.npy", np.clip(lengths, 1, 3000).astype(np.int64))
    np.save(folder / "batch.npy", np.random.default_rng(1).integers(1, 500, 900))
    rules = {
        "budget": 1024, "step": {"packs": 8}, "warmup": {"init": 512, "steps": 5}, "shape": {"buckets": [512]},
        "balance": {"hidden_size": 64, "order": "small_at_edges"}, "tail": "drop", "align": {"sample": "tight"},
    }  # fmt: skip
    mesh = {"dp": 2, "cp": 2, "tp": 2}
    write(folder / "warmup.yaml", {"rules": rules, "planned_mesh": mesh, "streams": {"web": {}}})
    marks = {**RULES, "step": {"end_of_batch": True, "micro_batch_multiple": 2}}
    pushed = {"rollouts": {"pushed": True}}
    write(folder / "marks.yaml", {"rules": marks, "merge": "arrival", "state_dir": "x", "streams": pushed})
    write_jsonl(folder / "rejected.jsonl", [{"text": "x" * (i % 7)} for i in range(70)])
    stream = {"source": "jsonl", "shards": str(folder / "rejected.jsonl")}
    write(folder / "rejected.yaml", {"streams": {"data": stream}})
    for name in ("text", "media", "tight"):
        (folder / name).mkdir()
    make_files(folder / "text")
    make_media_files(folder / "media")
    make_media_files(folder / "tight", limits={"patches": 45}, balance={"hidden_size": 64})


def outputs() -> str:
    """Return what the command prints for all cases; shares in JSON are rounded."""
    lines = []
    for case in CASES:
        shown = in_process("plan", *case.split())
        lines += [f"$ streampack plan {case}", *(line.rstrip() for line in shown.stdout.splitlines()), ""]
    for case in AS_JSON:
        tree = json.loads(
            in_process("plan", *case.split(), "--json").stdout, parse_float=lambda text: f"{float(text):.6g}"
        )
        lines += [f"$ streampack plan {case} --json", *_rows(tree), ""]
    return "\n".join(lines)


def _rows(tree: dict[str, Any]) -> list[str]:
    """Return one line for each key, and for each setting."""
    settings = [f"  {json.dumps(row)}" for row in tree.pop("settings")]
    return ["settings:", *settings, *(f"{key}: {json.dumps(value)}" for key, value in tree.items())]


def test_the_output_is_that_of_the_golden_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    assert outputs() == GOLDEN.read_text()


if __name__ == "__main__":
    os.environ["COLUMNS"] = "120"
    with tempfile.TemporaryDirectory() as directory:
        make_inputs(Path(directory))
        os.chdir(directory)
        GOLDEN.write_text(outputs())
