"""The page "Slurm on four nodes", docs/how-to/slurm.md: its job runs here on one node, and resumes.

Slurm's own commands are replaced: ``scontrol`` names this host, ``srun`` starts its command here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import BLOCKS, ROOT
from tests.docs.typed_commands import ENVIRON
from tests.integration.running import PATIENCE_S

PAGE = [block for block in BLOCKS if block.page == "docs/how-to/slurm.md"]
JOB = next(block.code for block in PAGE if block.code.startswith("#!/bin/bash"))
COMMANDS = {
    "scontrol": "echo 127.0.0.1",
    "srun": 'while [[ $1 == --* ]]; do shift; done\nSLURM_PROCID=0 exec "$@"',
}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "2"}


def lines(folder: Path) -> list[str]:
    """Run the page's job; return the lines of its steps."""
    done = subprocess.run(
        ["bash", "job.sbatch"], cwd=folder, capture_output=True, text=True, timeout=5 * PATIENCE_S, check=False,
        env=ENVIRON | SLURM | {"SLURM_GPUS_ON_NODE": "1", "PATH": f"{folder}/bin:{ENVIRON['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return re.findall(r"^step .*$", done.stdout, re.MULTILINE)


@pytest.mark.timeout(10 * PATIENCE_S)
def test_the_job_of_the_page_resumes_with_the_same_losses(tmp_path: Path) -> None:
    for block in PAGE:
        if block.code.startswith("# "):
            (tmp_path / block.code.split()[1]).write_text(block.code.replace("range(2000)", "range(80)"))
    (tmp_path / "job.sbatch").write_text(JOB.replace(":29500", ":0"))
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("")
    (tmp_path / "bin").mkdir()
    for name, code in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True)
    first = lines(tmp_path)
    assert [line.split()[1] for line in first] == [str(number) for number in range(len(first))]
    assert len(first) > 10
    assert lines(tmp_path) == first[len(first) // 10 * 10 :], "from the last checkpoint on"


def test_the_job_of_the_page_starts_as_the_exported_script_does() -> None:
    exported = (ROOT / "deploy/slurm/run.sbatch").read_text()
    short = (
        exported.replace("--config", "-c")
        .replace("--produce", "-p")
        .replace("${SLURM_CPUS_PER_TASK:-1}", "$SLURM_CPUS_PER_TASK")
    )
    begins = re.compile(r"^exec srun .*\\\n.* -- ", re.MULTILINE)
    assert begins.findall(JOB) == begins.findall(short) != []
    kept = {line for line in JOB.splitlines() if re.match(r"#SBATCH --(ntasks|open|requeue|signal|output)", line)}
    assert kept <= set(exported.splitlines())
