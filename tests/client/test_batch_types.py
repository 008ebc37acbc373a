"""What a type checker knows of a loader's batches, and how batches print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import run

import pytest
from hypothesis import given, settings

import streampack
from streampack.core.model.mesh import Mesh
from streampack.packs.pack import Pack
from streampack.views.formats import FORMATS, Views
from streampack.views.view import View
from tests.packs.cases import Case, attached, cases
from tests.views.shown import steps_of

ROOT = Path(__file__).parents[2]
USE = """
import streampack

{loaders}
def chosen(format: str) -> None:
    reveal_type(next(iter(streampack.connect(format=format))))
"""
LOADER = """
for number, loader in enumerate(({maker}, )):
    reveal_type(next(iter(loader)))
    step = next(loader.steps())
    reveal_type(step[0])
    reveal_type(step.regroup(8)[0])
with {maker} as entered:
    for pack in entered:
        reveal_type(pack)
        reveal_type(pack.input_ids)
        reveal_type(pack.num_samples)
"""


def test_type_checkers_know_the_batches_of_every_format(tmp_path: Path) -> None:
    loaders, expected = "", list[str]()
    for format in ("", *FORMATS):
        numpy = format == "numpy"
        batch = "streampack.packs.pack.Pack" if numpy else "streampack.views.view.View"
        arguments, tokens = format and f"format={format!r}", "numpy.ndarray" if numpy else "torch._tensor.Tensor"
        for maker in (f"streampack.connect({arguments})", f"streampack.local([[1]], {arguments})"):
            loaders += f"def f{len(expected)}() -> None:" + LOADER.format(maker=maker).replace("\n", "\n    ") + "\n"
            expected += [batch] * 4 + [tokens, "int"]
    expected.append("streampack.packs.pack.Pack | streampack.views.view.View")
    program = tmp_path / "program.py"
    program.write_text(USE.format(loaders=loaders))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--no-error-summary",
        str(program),
    ]
    done = run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    found = [
        line.split('"')[1].removeprefix("builtins.") for line in done.stdout.splitlines() if "Revealed type is" in line
    ]
    other = [line for line in done.stdout.splitlines() if "Revealed type is" not in line]
    assert (other, done.stderr) == ([], "")
    assert len(found) == len(expected)
    assert [kind for kind, wanted in zip(found, expected, strict=True) if not kind.startswith(wanted)] == []


def check_line(value: object, *parts: str) -> None:
    line = repr(value)
    assert "\n" not in line
    assert len(line) <= 120, line
    for part in parts:
        assert part in line


@settings(max_examples=20)
@given(cases())
def test_batches_print_as_one_line(case: Case) -> None:
    steps: Sequence[streampack.Step] = steps_of(case)
    for rank, step in enumerate(steps):
        packs = tuple(step)
        check_line(
            step, "Step(index=", f"packs={len(packs)}", f"samples={step.num_samples}", f"tokens={step.num_tokens}"
        )
        for pack in packs:
            assert isinstance(pack, Pack)
            shape = f"input_ids=[{len(pack.input_ids)}]"
            check_line(pack, "Pack(", f"step={pack.step}", f"tokens={pack.cu_seqlens[-1]}", shape)
        mesh = Mesh(cp=case.cp, cp_rank=rank)
        for pack in Views("thd", mesh).make(steps_of(case)[rank], attached(case).rules):
            check_line(pack, "View(", f"step={pack.step}", f"samples={pack.num_samples}", "input_ids=[")
            check_line(View(pack), "View(input_ids=[")


@pytest.mark.parametrize("format", [each for each in FORMATS if each != "padded"])
def test_loaders_batches_print_as_one_line(format: str) -> None:
    with streampack.local([[1, 2, 3]] * 9, budget=16, packs=2, format=format) as loader:
        step = next(loader.steps())
        check_line(step, "packs=2", "tokens=")
        for pack in step:
            check_line(pack, "step=0", "samples=5" if pack.pack == 0 else "samples=4", "=[")
        check_line(step.regroup(32), "ForwardPacks(packs=1, tokens=27, micro_batches=2)")


def test_padded_batches_print_as_one_line() -> None:
    with streampack.local([[1, 2, 3]] * 4, budget=16, samples=4, padded=True, align=1) as loader:
        check_line(next(iter(loader)), "View(step=0", "tokens=12", "input_ids=[4, 3]")
