"""Commands of the pages, typed as they stand: each block of commands runs here, or in the test that a table names.

Pages share three runs: one that has ended (``ended``), one that trains (``live``), and that of the README (``readme``).
In place of a page's are ports, folders, the number of a late step, and launchers. A block is named by its first words.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import streampack
from streampack.config.typed_yaml import convert
from streampack.sources import SourceSettings, open_source
from tests.docs.pages import BLOCKS, ROOT, Block
from tests.docs.typed_commands import typed
from tests.integration.commands.manifests import loaded
from tests.integration.running import (
    RunningBroker,
    in_process,
    producing_here,
    running,
    running_broker,
    write,
    write_jsonl,
)  # fmt: skip
from tests.sources.writers import megatron
from tests.tokenizers.trl_templates import theirs, turns

PLACES = {
    "trainers": r"tcp://node0:7402", "http": r"http://(?:127\.0\.0\.1|node0):7400", "step": r"(?<=--step )1200",
    "dir": r"\bDIR\b", "once": r"(?<=streampack top)(?=\s)",
}  # fmt: skip
"""Texts of the pages that stand for places of the reader's."""
BASH = [block for block in BLOCKS if block.language == "bash"]
ELSEWHERE = {
    "docs/get-started/your-data.md": "tests/docs/test_first_run.py",
    "docs/get-started/resume.md": "tests/docs/test_first_run.py",
    "docs/how-to/loss-rose.md": "tests/docs/test_loss_rose.py",
    "docs/how-to/observe.md": "tests/integration/watching/test_prometheus.py",
    "docs/how-to/slurm.md": "tests/docs/test_slurm.py",
    "docs/how-to/accelerate.md": "tests/integration/frameworks/test_frameworks_torch.py",
    "docs/migrate/from-dataloader.md": "tests/docs/test_migrations.py",
    "docs/migrate/from-streaming-loaders.md": "tests/docs/test_migrations.py",
    "docs/migrate/from-trl-packing.md": "tests/docs/test_isolation.py",
}
"""Pages whose blocks another file of tests types, or whose programs it runs."""
PROGRAMS = {
    "git clone URL": "tests/integration/commands/test_demo.py",
    "streampack demo --steps 50": "tests/integration/commands/test_demo.py",
    "mkdir ../rl-loop": "tests/training/test_rl_loop.py",
    "# terminal 1": "tests/training/test_rl_loop.py",
    "python -c 'for i in range(2000)": "tests/integration/frameworks/jax/test_jax.py",
    "streampack set rules budget=32768": "tests/docs/test_change_page.py",
    "export STREAMPACK_MODEL_CONFIG=": "tests/integration/watching/test_http.py",
    "streampack broker -c broker.yaml --standby": "tests/integration/faults/test_host_loss.py",
    "export STREAMPACK_ENDPOINT=tcp://node0:7402,tcp": "tests/integration/faults/test_host_loss.py",
}
"""Blocks whose programs or settings other tests use, with other sizes and ports, and these tests."""
ALONE = {
    "export STREAMPACK_RELAY=": "how-to/deploy",
    "streampack broker -c broker.yaml\nstreampack produce": "how-to/pretraining-mixture",
    "streampack check broker.yaml producer.yaml   #": "README",
    "streampack check broker.yaml\n": "how-to/change-a-run",
    "streampack check producer.yaml --samples 2": "how-to/sft-hf-trl",
    "streampack export alerts": "how-to/upgrade",
    "streampack export systemd": "how-to/systemd",
    "streampack keys new keys relays --role relay   ": "how-to/secure",
    "streampack keys new keys tokenizers": "how-to/secure",
    "streampack keys revoke": "how-to/secure",
    "streampack keys token http.token\nSTREAMPACK": "how-to/secure",
    "streampack report shared/grpo/state": "how-to/shared-prefixes",
    "streampack run -c broker.yaml -- python train.py": "how-to/rl-grpo",
    "streampack status --json": "how-to/choose-packing",
}
"""Blocks with a test of their own, and their pages."""
ENDED = {
    "streampack why --step 1200 --dp 3": "how-to/resume-and-elastic",
    "streampack replay --step 1200": "concepts/determinism",
    "streampack why --step 123": "how-to/change-a-run",
    "streampack report state/sft-8b": "how-to/plan",
    "streampack plan -c producer.yaml": "how-to/plan",
    "streampack plan -c producer.yaml -c broker.yaml --mesh": "how-to/choose-packing",
}
"""Blocks about a run that has ended, and their pages."""
LIVE = {"streampack status ": "how-to/observe", "streampack plan --stage": "how-to/change-a-run"}
"""Blocks about a run that trains, and their pages."""


def block(starts: str) -> Block:
    """Return the first block of commands of its page that begins so."""
    pages = ALONE | ENDED | LIVE
    assert starts in pages, f"add {starts!r} to ALONE"
    page = pages[starts]
    return next(each for each in BASH if each.page.endswith(f"{page}.md") and each.code.startswith(starts))


def here(code: str, **places: str) -> str:
    """Return a block with this test's places in place of the page's."""
    for name, place in places.items():
        code = re.sub(PLACES[name], place, code)
    return code


def lines(code: str) -> list[list[str]]:
    """Return the commands of a block, as words."""
    return [words for line in code.splitlines() if (words := shlex.split(line, comments=True))]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 16 ranks that has ended: its files, its data, its state, and a copy of that."""
    folder = tmp_path_factory.mktemp("ended")
    write_jsonl(folder / "train.jsonl", [{"text": "abc"[: 1 + number % 3]} for number in range(3000)])
    web: dict[str, Any] = {"source": "jsonl", "shards": str(folder / "train.jsonl")}
    settings = {
        "run": "sft-8b", "state_dir": str(folder / "state/sft-8b"), "tokens": "uint16",
        "streams": {"web": {"passes": 5}},
        "rules": {"budget": 4, "step": {"packs": 16}, "window": {"samples": 64}},
    }  # fmt: skip
    write(folder / "producer.yaml", {"streams": {"web": web}})
    with (
        running_broker(settings) as broker,
        producing_here(broker.producers, {"web": open_source(convert(web, SourceSettings))}),
    ):
        with streampack.connect(broker.trainers, format="numpy") as loader:
            for step in loader.steps():
                if step.index == 130:
                    break
        shutil.copytree(folder / "state/sft-8b", folder / "other/state")
    write(folder / "broker.yaml", settings)
    np.save(folder / "lengths.npy", np.random.default_rng(0).lognormal(5.5, 0.8, 2000).astype(np.uint32) + 1)
    return folder


@pytest.mark.parametrize("starts", list(ENDED))
def test_a_page_asks_a_run_that_has_ended(starts: str, ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ended)
    answered(here(block(starts).code, step="120"))


def answered(code: str) -> None:
    """Type a block, its commands of streampack within this process; each must succeed, and these print something."""
    for line in code.splitlines():
        match shlex.split(line, comments=True):
            case ["streampack", *words]:
                result = in_process(*words)
                assert result.returncode == 0, f"{line}\n{result.stderr}{result.stdout}"
                assert result.stdout or result.stderr, line
            case ["cd", folder]:
                os.chdir(folder)
            case [_, *_]:
                typed(line, Path.cwd())


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker of four streams, with a rank that has read 20 steps and waits."""
    rows = [{"text": "live" * (1 + number % 9)} for number in range(300)]
    file = write_jsonl(tmp_path_factory.mktemp("live") / "rows.jsonl", rows)
    names = ("web", "code", "old", "books")
    settings = {
        "tokens": "uint16", "memory": "256MiB", "rules": {"budget": 64, "step": {"packs": 8}, "overlong": "truncate"},
        "streams": {name: {"repeat": True, "weight": 0.3} for name in names}, "planned_mesh": {"dp": 1},
    }  # fmt: skip
    source = SourceSettings("jsonl", str(file))
    with (
        running_broker(settings) as broker,
        producing_here(broker.producers, {name: open_source(source) for name in names}),
        streampack.connect(broker.trainers, format="numpy") as loader,
    ):
        for step in loader.steps():
            if step.index == 20:
                yield broker
                break


@pytest.mark.parametrize("starts", list(LIVE))
def test_a_page_asks_or_changes_a_run_that_trains(
    starts: str, live: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMPACK_HTTP", live.http)
    (tmp_path / "anneal.yaml").write_text("weights: {code: 0.8, web: 0.2}\n")
    code = here(block(starts).code, http=live.http, once=" --once")
    answered(code)


def test_a_page_reads_the_figures_of_a_run_while_it_trains_and_after_it(
    live: RunningBroker, ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMPACK_HTTP", live.http)
    (tmp_path / "state").symlink_to(ended / "state/sft-8b")
    answered(block("streampack status --json").code)


def file_of(page: str, name: str, number: int = 0) -> dict[str, Any]:
    """Return a YAML file that a page shows in whole."""
    texts = [each.code for each in BLOCKS if each.page == page and each.code.startswith(f"# {name}\n")]
    found: dict[str, Any] = yaml.safe_load(texts[number])
    return found


def program(path: Path, code: str) -> None:
    """Write a program that stands for one that no test has."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    path.chmod(0o755)


RANKS = """
import threading, streampack

def rank(number):
    mesh = {"dp": 4, "cp": 2, "dp_rank": number // 2, "cp_rank": number % 2}
    with streampack.connect(mesh=mesh, format="numpy") as loader:
        print(f"got {next(iter(loader.steps())).num_samples} samples")

threads = [threading.Thread(target=rank, args=[number]) for number in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""
"""A train.py of 8 ranks in one process, which read a step without torch."""


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the README's reader: its two files, 512 archives, a tokenizer, and train.py."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("broker", "producer"):
        write(
            folder / f"{name}.yaml", file_of("README.md", f"{name}.yaml") | ({"processes": 1} if name[0] == "p" else {})
        )
    (folder / "data").mkdir()
    for number in range(512):
        with tarfile.open(folder / f"data/web-{number:03d}.tar", "w") as archive:
            for row in range(4):
                text = b"word " * (200 + 7 * row)
                entry = tarfile.TarInfo(f"{row}.txt")
                entry.size = len(text)
                archive.addfile(entry, BytesIO(text))
    megatron(folder / "data/code", [bytes(1000)] * 400)
    theirs("qwen3").save_pretrained(folder / "models/qwen")
    program(folder / "bin/torchrun", "#!/bin/sh\nexec python train.py\n")
    (folder / "train.py").write_text(RANKS)
    return folder


def test_the_readme_s_commands_check_and_run_its_files(readme: Path) -> None:
    check, run, _ = block("streampack check broker.yaml producer.yaml   #").code.splitlines()
    printed = typed(f"export PATH=$PWD/bin:$PATH\n{check}\n{run}", readme)
    assert len(re.findall(r"got \d+ samples", printed)) == 8


def test_a_relay_reads_for_the_ranks_of_a_host(live: RunningBroker, tmp_path: Path) -> None:
    code = here(block("export STREAMPACK_RELAY=").code, trainers=live.trainers)
    program(tmp_path / "bin/torchrun", "#!/bin/sh\nexec python train.py\n")
    (tmp_path / "train.py").write_text("import os; print(os.environ['STREAMPACK_RELAY'])")
    typed(
        f"PATH=$PWD/bin:$PATH\nmkdir run\n{code.replace('/run/streampack', str(tmp_path) + '/run')}\nkill %1; wait",
        tmp_path,
    )


def test_chats_are_shown_with_their_masks(readme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    rows = "".join(json.dumps({"messages": turns("who?", "a model")}) + "\n" for _ in range(20))
    (tmp_path / "data/chats-0.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "data/held-out.jsonl").write_text(rows)
    write(tmp_path / "producer.yaml", file_of("docs/how-to/sft-hf-trl.md", "producer.yaml"))
    (tmp_path / "models").symlink_to(readme / "models")
    answered(block("streampack check producer.yaml --samples 2").code)


def test_stages_of_a_page_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = next(each.code for each in BLOCKS if each.page == "docs/how-to/change-a-run.md" and "stages:" in each.code)
    (tmp_path / "broker.yaml").write_text(first)
    answered(block("streampack check broker.yaml\n").code)


def test_brokers_and_producers_of_two_hosts_find_each_other(readme: Path, tmp_path: Path) -> None:
    """Both commands run until they are stopped: here the broker is, once producers have filled its window."""
    page = "docs/how-to/pretraining-mixture.md"
    (tmp_path / "data").symlink_to(readme / "data")
    write_jsonl(readme / "data/val.jsonl", [{"text": "val"}] * 300)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/llama").symlink_to(readme / "models/qwen")
    (tmp_path / "shared/pretrain-8b").mkdir(parents=True)
    anywhere = {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*", "http": "127.0.0.1:0"}
    small = {
        "listen": anywhere,
        "memory": "1GiB",
        "rules": {"budget": 256, "step": {"packs": 128}, "overlong": "split"},
    }
    feeds = {"train": {"streams": ["web", "code"]}, "valid": {"streams": ["val"]}}
    write(tmp_path / "broker.yaml", file_of(page, "broker.yaml") | small | {"feeds": feeds})
    write(tmp_path / "producer.yaml", file_of(page, "producer.yaml") | {"processes": 1})
    broker, produce = block("streampack broker -c broker.yaml\nstreampack produce").code.splitlines()
    wait = "until streampack status -c broker.yaml | grep -q 'step'; do sleep 0.2; done"
    typed(f"{broker} &\n{produce} &\n{wait}\nkill %1 %2; wait", tmp_path)


PUSHER = """
import streampack
for worker in range(8):
    with streampack.Producer(stream="rollouts", partition=worker) as rollouts:
        rows = [{"input_ids": [*range(31), end], "loss_mask": [1] * 32, "advantages": [1.0] * 32} for end in range(4)]
        rollouts.send_group([{**row, "group": worker} for row in rows], policy_version=0)
        rollouts.end_of_batch(0)
with streampack.connect(format="numpy") as loader:
    print("got", next(iter(loader.steps())).num_samples, "samples")
"""
"""Workers and a trainer in one program, which needs no torch."""


def test_a_pushed_run_trains_and_reports_what_shared_prompts_would_save(tmp_path: Path) -> None:
    write(tmp_path / "broker.yaml", file_of("docs/how-to/rl-grpo.md", "broker.yaml") | {"memory": "64MiB"})
    (tmp_path / "train.py").write_text(PUSHER)
    assert "got 32 samples" in typed(block("streampack run -c broker.yaml -- python train.py").code, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        answered(block("streampack report shared/grpo/state").code)


def test_keys_are_made_shown_used_and_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answered(block("streampack keys new keys tokenizers").code)
    token, status = block("streampack keys token http.token\nSTREAMPACK").code.splitlines()
    answered(token)
    variable, status = status.split(" ", 1)
    monkeypatch.setenv(*variable.split("="))
    anywhere = {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*", "http": "127.0.0.1:0"}
    listen = {**anywhere, "keys": str(tmp_path / "keys"), "token_file": str(tmp_path / "http.token")}
    with running_broker({"listen": listen, "memory": "64MiB", "streams": {"web": {}}}) as broker:
        answered(here(status, http=broker.http))
        *made, relay = here(
            block("streampack keys new keys relays --role relay   ").code, trainers=broker.trainers
        ).splitlines()
        answered("\n".join(made))
        relay = relay.replace("keys/", f"{tmp_path}/keys/")
        with running("relay", *lines(relay)[0][1:]) as started:
            started.wait_for("for the ranks of this host")
        answered(block("streampack keys revoke").code)


def test_exports_have_the_files_that_pages_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of systemd, Kubernetes and Docker are read instead of run: each name must be one of the export."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "broker.yaml", {"run": "my-run", "state_dir": "/state", "streams": {"web": {}}})
    web = {"source": "jsonl", "shards": "/data/*.jsonl"}
    write(tmp_path / "producer.yaml", {"broker": "tcp://x:7401", "streams": {"web": web}})
    (tmp_path / "train.py").touch()
    answered(here(block("streampack export alerts").code, dir="watch"))
    assert Path("watch/alerts.yaml").exists()
    assert Path("watch/dashboards/streampack.json").exists()
    units = here(block("streampack export systemd").code, dir="systemd").replace(" /etc/", " etc/")
    copies, enable = units[: units.index("sudo systemctl")], units[units.index("sudo systemctl") :]
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    answered(copies.replace("sudo ", ""))
    for name in lines(enable)[0][4:]:
        template, run = name.split("@")
        assert (tmp_path / f"etc/systemd/system/{template}@.service").exists()
        assert (tmp_path / f"etc/streampack/{run}").is_dir()
    for each in filter(clustered, BASH):
        others = [
            line for line in here(each.code, dir="k8s").splitlines() if not line.startswith(("kubectl", "docker"))
        ]
        answered("\n".join(others))
        monkeypatch.chdir(tmp_path)
        for words in lines(here(each.code, dir="k8s")):
            if words[0] == "kubectl":
                kubectl(words[1:], tmp_path)
            elif words[0] == "docker":
                docker(words[1:], tmp_path)


def clustered(each: Block) -> bool:
    """If a block has commands of Kubernetes or Docker."""
    return any(text in each.code for text in ("kubectl", "DIR/components", "docker "))


def kubectl(words: list[str], folder: Path) -> None:
    """Assert that the export has everything that a command of kubectl names."""
    (brokers,) = (each for each in loaded(folder / "k8s/standalone/statefulset.yaml") if each["kind"] == "StatefulSet")
    pods = [f"{brokers['metadata']['name']}-{number}" for number in range(2)]
    match words:
        case ["apply" | "delete", "-k", place]:
            (tree,) = loaded(folder / place / "kustomization.yaml")
            assert [each for each in tree["resources"] if not (folder / place / each).exists()] == []
        case ["delete" | "get", "lease", name, *_]:
            assert name in "".join(path.read_text() for path in (folder / "k8s").rglob("*.yaml"))
        case ["delete", "pvc", *names]:
            claims = [each["metadata"]["name"] for each in brokers["spec"]["volumeClaimTemplates"]]
            assert set(names) <= {f"{claim}-{pod}" for claim in claims for pod in pods}
        case ["delete", "pod", name, *_]:
            assert name in pods
        case ["exec", name, "--", "streampack", *rest]:
            assert name in pods
            assert in_process(*rest, "--help").returncode == 0
        case ["create", "secret", "generic", name, file]:
            assert (folder / file.partition("=")[2]).exists()
            assert name in "".join(path.read_text() for path in (folder / "k8s").rglob("*.yaml"))
        case _:
            pytest.fail(f"no such command here: {words}")


def docker(words: list[str], folder: Path) -> None:
    """Assert that the file that a command of docker names is in the export or in the repository."""
    file = next(
        path for path in (folder / words[words.index("-f") + 1], ROOT / words[words.index("-f") + 1]) if path.exists()
    )
    if "--profile" in words:
        services = yaml.safe_load(file.read_text())["services"].values()
        assert any(words[words.index("--profile") + 1] in service.get("profiles", []) for service in services)


def test_packages_of_the_pages_can_be_installed() -> None:
    """As a dry run: extras that streampack does not have, or a version that nobody has, would be said."""
    pip = [line for each in BASH for line in each.code.splitlines() if line.startswith("pip install")]
    words = {word.replace("/shared/streampack", ".") for line in lines("\n".join(pip)) for word in line[2:]}
    words = {word for word in words if not word.startswith(("-", "https://"))}  # any index
    assert len(words) > 4
    dry = ["--dry-run", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *dry, *sorted(words)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr


EXAMPLES = (ROOT / "examples/README.md").read_text()
TABLE = dict(re.findall(r"^\| \[(\w+)\.py\].*\| `([^`]+)` \|$", EXAMPLES, re.MULTILINE))
"""The command of each example."""
HERE = [name for name in TABLE if name == "plain_torch" or (name != "vlm" and os.environ.get("EVERY_EXAMPLE"))]
"""Examples that run here. Others have tests with kills; with EVERY_EXAMPLE=1, all but the one of own data run."""


def test_each_example_has_a_command_whose_files_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py") if not path.stem.endswith("_without_gpu")}
    assert set(TABLE) == scripts
    monkeypatch.chdir(ROOT / "examples")
    for name, command in TABLE.items():
        assert re.search(rf"\b{name}\.py\b", command)
    for file in set(re.findall(r"-c (\w+\.yaml)", " ".join(TABLE.values()))):
        assert in_process("check", file).returncode == 0, file


@pytest.mark.parametrize("name", HERE)
def test_an_example_runs_from_an_empty_folder(name: str, tmp_path: Path) -> None:
    (made,) = re.findall(r"```bash\n(.*?)```", EXAMPLES, re.DOTALL)
    (tmp_path / "streampack").symlink_to(ROOT)
    (tmp_path / "empty").mkdir()
    printed = typed(
        f"{made.replace('../try', 'try').replace('../streampack', '../../streampack')}{TABLE[name]}", tmp_path / "empty"
    )
    assert len([line for line in printed.splitlines() if line.startswith("{")]) > 2, printed


def test_every_block_of_commands_runs() -> None:
    """Here, in another file of tests, or line by line in other blocks; or its page says why it does not."""
    by_others = [each for each in BASH if each.page in ELSEWHERE]
    here = [block(starts) for starts in ALONE | ENDED | LIVE]
    done = {line for each in (*by_others, *here, *filter(clustered, BASH)) for line in plain(each)}
    done |= {"python -m venv .venv", "source .venv/bin/activate"}
    left = [
        str(each)
        for each in BASH
        if each.reason is None
        and each.code.startswith(tuple(PROGRAMS)) is False
        and not all(
            line.startswith("pip install ") or any(other.startswith(line) for other in done) for line in plain(each)
        )
    ]
    assert left == [], "run these blocks in this file, or say on the page why they do not run"
    for page, file in ELSEWHERE.items():
        assert page in (ROOT / file).read_text()
    unused = [starts for starts in PROGRAMS if not any(each.code.startswith(starts) for each in BASH)]
    assert unused == []


def plain(each: Block) -> list[str]:
    """Return the lines of a block without comments."""
    found = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in each.code.splitlines()]
    return [line for line in found if line]
