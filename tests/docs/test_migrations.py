"""Pages with whole files: the files are written into an empty folder, and run there.

The loops that train on packs of ``docs/migrate`` run in ``test_isolation``, which watches their calls.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import webdataset
import yaml

from benchmarks.training import padded_and_packed
from streampack.config.typed_yaml import convert
from streampack.sources import SourceSettings, TokenizerSettings, open_source, open_tokenizer
from tests.docs.pages import written
from tests.integration.running import in_process, producing_here, running_broker

WITH_CONFIGURATIONS = (
    "docs/migrate/from-dataloader.md", "docs/migrate/from-streaming-loaders.md", "docs/how-to/accelerate.md",
)  # fmt: skip
STREAMING = WITH_CONFIGURATIONS[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, from which this process reads files and imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "data", raising=False)
    return tmp_path


def write_tars(folder: Path) -> None:
    (folder / "data").mkdir()
    for name in ("web", "code"):
        for shard in range(2):
            with webdataset.TarWriter(str(folder / f"data/{name}-{shard:03}.tar")) as tar:
                for sample in range(20):
                    tar.write({"__key__": f"{shard}-{sample}", "txt": name * (50 + 97 * sample % 400)})


@pytest.mark.parametrize("page", WITH_CONFIGURATIONS)
def test_check_finds_the_configuration_of_a_page_good(page: str, folder: Path) -> None:
    for name in written(page, folder):
        if name.startswith("make_"):
            runpy.run_path(name)
    if page == STREAMING:
        write_tars(folder)
    checked = in_process("check", "broker.yaml", "producer.yaml")
    assert checked.returncode == 0, checked.stderr
    assert "\ngood" in checked.stdout
    sys.modules.pop("data", None)


@pytest.mark.filterwarnings("ignore")  # of webdataset
def test_the_job_of_other_loaders_reads_the_same_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(STREAMING, folder)
    write_tars(folder)
    runpy.run_path("before.py")
    assert " of 8192" in capsys.readouterr().out
    producer = yaml.safe_load(Path("producer.yaml").read_text())
    tokenizer = open_tokenizer(convert(producer["tokenizer"], TokenizerSettings))
    sources = {
        name: open_source(convert(keys, SourceSettings), tokenizer) for name, keys in producer["streams"].items()
    }
    with (
        running_broker(yaml.safe_load(Path("broker.yaml").read_text()) | {"memory": "128MiB"}) as broker,
        producing_here(broker.producers, sources),
    ):
        for name, value in (("STREAMPACK_ENDPOINT", broker.trainers), ("RANK", "0"), ("WORLD_SIZE", "1")):
            monkeypatch.setenv(name, value)
        left = runpy.run_path("train.py")
    assert left["step"].index >= 1


def test_updates_of_the_same_samples_learn_the_same_padded_and_packed() -> None:
    """The benchmark behind the figure of the page about learning, with ten updates."""
    train, held_out = padded_and_packed.samples(160, 0), padded_and_packed.samples(16, 1)
    padded, packed = (padded_and_packed.curve(way, train, held_out) for way in padded_and_packed.WAYS[:2])
    assert len(padded) == 2
    assert padded[1] != padded[0]
    assert packed == pytest.approx(padded, rel=1e-9)
