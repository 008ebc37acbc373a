"""The commands of the page "Change a run", typed in their order at a running job; docs/how-to/change-a-run.md."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

import streampack
from streampack.config.typed_yaml import convert
from streampack.sources import SourceSettings, open_source
from tests.docs.pages import BLOCKS
from tests.integration.running import in_process, producing_here, running_broker, write_jsonl

PAGE = [block for block in BLOCKS if block.page == "docs/how-to/change-a-run.md"]


def test_the_commands_of_the_page_work_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = next(block.code for block in PAGE if "run: pretrain" in block.code)
    stage, commands = next(
        (block.code, PAGE[number + 1].code) for number, block in enumerate(PAGE) if "# cooldown.yaml" in block.code
    )
    monkeypatch.chdir(tmp_path)
    Path("cooldown.yaml").write_text(stage)
    settings = yaml.safe_load(config)
    for stream in settings["streams"].values():
        stream["repeat"] = True
    files = write_jsonl(tmp_path / "rows.jsonl", [{"text": "word " * 50}] * 300)
    source = open_source(convert({"source": "jsonl", "shards": str(files)}, SourceSettings))
    served = running_broker(settings | {"state_dir": "state", "memory": "512MiB"})
    with served as broker, producing_here(broker.producers, dict.fromkeys(settings["streams"], source)):
        monkeypatch.setenv("STREAMPACK_HTTP", broker.http)
        with streampack.connect(broker.trainers, format="numpy") as loader:
            next(iter(loader))
            for line in commands.splitlines():
                done = in_process(*shlex.split(line, comments=True)[1:])
                assert done.returncode == 0, line + done.stderr
                listed = done.stdout if "--list" in line else ""
                assert not listed or ("budget=32768 packs=128" in listed and "cooldown weights" in listed)
    assert "change 3 is canceled" in done.stdout
