"""The pages "Your own data" and "Stop and resume", typed as they stand: a run is interrupted and resumes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import BLOCKS
from tests.docs.typed_commands import ENVIRON, typed
from tests.integration.running import PATIENCE_S, until

FIRST, RESUME = "docs/get-started/your-data.md", "docs/get-started/resume.md"


def commands(page: str) -> list[str]:
    return [block.code for block in BLOCKS if block.page == page and block.language == "bash"]


def shown(page: str) -> list[str]:
    """Return the lines of a page's last example of output."""
    return [block.code for block in BLOCKS if block.page == page and not block.language][-1].splitlines()


@pytest.mark.timeout(20 * PATIENCE_S)
def test_a_first_run_is_interrupted_and_resumes_with_the_same_steps(tmp_path: Path) -> None:
    for block in BLOCKS:
        if block.page == FIRST and block.code.startswith("# "):
            (tmp_path / block.code.split()[1]).write_text(block.code)
    assert {"make_data.py", "broker.yaml", "producer.yaml", "train.py"} == {path.name for path in tmp_path.iterdir()}
    _, make_data, check, train = commands(FIRST)
    start, why, again, verify = commands(RESUME)
    assert train == again
    typed(make_data, tmp_path)
    printed = typed(check, tmp_path)
    assert [line for line in shown(FIRST) if line not in printed] == []

    with subprocess.Popen(["bash", "-c", start], cwd=tmp_path, env=ENVIRON, start_new_session=True) as running:
        until(
            lambda: (tmp_path / "checkpoints/checkpoint-20/trainer_state.json").exists() or running.poll() is not None
        )
        assert running.poll() is None
        os.killpg(running.pid, signal.SIGINT)
    before = typed(why, tmp_path)
    assert "digest" in before
    typed(again, tmp_path)
    after = typed(verify, tmp_path)
    assert after.startswith(before)
    assert [line for line in shown(RESUME) if line not in after] == []
    assert (tmp_path / "checkpoints/checkpoint-120").exists()
