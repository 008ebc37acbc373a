"""``streampack run``: one command with its broker and producers; how it ends, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from streampack_services.broker.authorization import new_key
from streampack_services.daemons.rendezvous import answers
from streampack_services.run.command import attempt, node_rank
from streampack_services.run.host_relay import local_ranks, wants_relay

from streampack.transport.secret_files import write_secret
from tests.integration.running import PATIENCE_S, STREAMPACK, running_broker, the_error, until, write, write_jsonl

BROKER: dict[str, Any] = {
    "memory": "32MiB",
    "rules": {"budget": 256, "window": {"samples": 64}, "step": {"packs": 2}},
    "limits": {"sample_tokens": 4096, "chunk": "16KiB"},
    "streams": {"web": {"partitions": 2}},
}
COUNT = (
    "import os, sys, streampack\n"
    "with streampack.connect(format='numpy') as loader:\n"
    "    print(sum(int(pack.num_samples) for pack in loader))\n"
    "assert os.environ['STREAMPACK_HTTP'].startswith('http://')\n"
    "assert os.environ['STREAMPACK_PRODUCERS'].endswith('producers')\n"
    "sys.exit(int(sys.argv[1]))\n"
)
HANG = "import sys, time; print('begun', flush=True); time.sleep(300)"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """broker.yaml and producer.yaml of 600 samples, as options."""
    for number in range(2):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"tokens": [number] * (2 + 31 * i % 97)} for i in range(300)])
    source = {"source": "jsonl", "shards": str(tmp_path / "?.jsonl")}
    broker = write(tmp_path / "broker.yaml", BROKER)
    producer = write(tmp_path / "producer.yaml", {"processes": 1, "streams": {"web": source}})
    return ["-c", str(broker), "-p", str(producer)]


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | more


def run(options: list[str], command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    words = [*STREAMPACK, "run", *options, "--", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(**env))


@contextmanager
def started(options: list[str], command: list[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose command has printed ``begun``."""
    words = [*STREAMPACK, "run", *options, "--", *command]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**env)
    ) as it:
        try:
            assert it.stdout is not None
            assert it.stdout.readline() == "begun\n"
            yield it
        finally:
            if it.poll() is None:
                it.terminate()


def warnings(stderr: str) -> list[str]:
    """Lines of warnings, but for the one that says that a machine was slow to start the producer."""
    return [line for line in stderr.splitlines() if "WARNING" in line and "no step for" not in line]


def below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    return found


def named(processes: list[psutil.Process], word: str) -> psutil.Process:
    return next(each for each in processes if word in each.cmdline())


def all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, PATIENCE_S)[1]


def test_the_command_gets_every_sample_and_its_exit_code_is_passed_on(files: list[str]) -> None:
    done = run(files, python(COUNT, "7"))
    assert (done.returncode, done.stdout) == (7, "600\n"), done.stderr
    lines = done.stderr.splitlines()
    assert "producer | " in done.stderr
    own = [line for line in lines if not line.startswith(("broker | ", "producer | "))]
    assert len(own) == 1, "its standard error is the daemons'"
    assert re.search(
        r"status page: http://127\.0\.0\.1:\d+; in another terminal, 'streampack top( -c [^ ]+)?' watches this run",
        own[0],
    )
    assert not warnings(done.stderr)


def test_a_broker_that_wants_keys_and_a_token_gets_them(files: list[str], tmp_path: Path) -> None:
    new_key(tmp_path / "keys", "somebody", "trainer", {})
    write_secret(tmp_path / "token", "a-token-of-some-length")
    listen = {"keys": str(tmp_path / "keys"), "token_file": str(tmp_path / "token")}
    write(tmp_path / "broker.yaml", BROKER | {"listen": listen})
    ask = "from streampack_services.http.http_client import fetch_status; print(fetch_status(None, 60)['run'])\n"
    done = run(files, python(ask + COUNT, "0"))
    assert (done.returncode, done.stdout) == (0, "streampack\n600\n"), done.stderr
    assert not warnings(done.stderr)


def test_two_runs_on_a_machine_do_not_meet(files: list[str]) -> None:
    with started(files, python(HANG)):
        assert run(files, python(COUNT, "0")).stdout == "600\n"


@pytest.mark.parametrize("processes", [1, 2])
def test_modules_of_the_working_folder_do_not_replace_the_librarys(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer of the folder is found nonetheless."""
    for name in ("http", "random", "numpy", "multiprocessing"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the working folder')\n")
    (tmp_path / "words.py").write_text("def encode(text):\n    return [len(word) for word in text.split()]\n")
    write_jsonl(tmp_path / "0.jsonl", [{"text": "one two three"}] * 600)
    write(tmp_path / "broker.yaml", BROKER)
    source = {"source": "jsonl", "shards": "0.jsonl", "text_key": "text", "tokenizer": {"name": "words:encode"}}
    write(tmp_path / "producer.yaml", {"processes": processes, "streams": {"web": source}})
    monkeypatch.chdir(tmp_path)
    command = Path(sys.executable).with_name("streampack")
    count = [sys.executable, "-P", "-c", COUNT, "0"]
    done = subprocess.run(
        [command, "run", "-c", "broker.yaml", "-p", "producer.yaml", "--", *count],
        capture_output=True, text=True, timeout=PATIENCE_S, env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "600\n"), done.stderr


def test_logs_may_go_to_files(files: list[str], tmp_path: Path) -> None:
    done = run([*files, "--log-dir", str(tmp_path / "logs")], python(COUNT, "0"))
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1, "the address alone"
    assert "ready" in (tmp_path / "logs" / "broker.log").read_text()
    # "all delivered", or "stopped" where the command ends before the producer is told
    assert ": 600 samples, 30010 tokens" in (tmp_path / "logs" / "producer.log").read_text()


# Ends


def test_a_command_that_a_signal_ends_gives_128_and_its_number(files: list[str]) -> None:
    assert run(files, python("import os; os.kill(os.getpid(), 9)")).returncode == 137


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_the_commands_and_then_all_ends(files: list[str], number: signal.Signals) -> None:
    with started(files, python(HANG)) as it:
        processes = below(it)
        it.send_signal(number)
        assert it.wait(PATIENCE_S) == 128 + number
        assert all_gone(processes)


def test_a_command_may_end_well_when_it_is_asked_to_stop(files: list[str]) -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); print('begun', flush=True); signal.pause()"
    with started(files, python(code)) as it:
        it.terminate()
        assert it.wait(PATIENCE_S) == 5


@pytest.mark.parametrize("daemon", ["broker", "produce"])
def test_a_daemon_that_dies_ends_the_command_and_says_so(files: list[str], daemon: str, tmp_path: Path) -> None:
    tree = BROKER | {"streams": {"web": {"partitions": 2, "repeat": True}}}
    files[1] = str(write(tmp_path / "endless.yaml", tree))
    with started(files, python(HANG)) as it:
        until(lambda: any(daemon in each.cmdline() for each in below(it)))
        processes = below(it)
        named(processes, daemon).kill()
        assert it.wait(PATIENCE_S) == 1
        assert it.stderr is not None
        last = it.stderr.read().splitlines()[-1]
        name = {"broker": "broker", "produce": "producer"}[daemon]
        assert last.startswith(f"streampack: {name} was killed by SIGKILL, perhaps because memory was short; ")
        assert last.endswith("; the command was terminated")
        assert all_gone(processes)


def test_a_producer_that_fails_gives_its_reason(files: list[str], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", [{"tokens": [1] * 999}])
    done = run(files, python(HANG))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "producer exited with 2: " in last
    assert "got a sample of 999 tokens" in last


@pytest.mark.parametrize("which", ["guard", "work"])
def test_nothing_is_left_when_run_itself_is_killed(files: list[str], which: str) -> None:
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import os, time; os.setsid(); time.sleep(300)'])\n"
        "print('begun', flush=True)\n"
        "time.sleep(300)\n"
    )
    with started(files, python(code)) as it:
        processes = below(it)
        assert len(processes) >= 4, "the work, the broker, the producer, the command and its own child"
        (work,) = psutil.Process(it.pid).children()
        (work if which == "work" else psutil.Process(it.pid)).kill()
        assert all_gone(processes)
        assert it.wait(PATIENCE_S) == (137 if which == "work" else -9)


def test_a_run_that_cannot_be_is_refused_before_anything_starts(files: list[str], tmp_path: Path) -> None:
    assert "The command 'no_such_program' was not found." in the_error(run(files, ["no_such_program"]), 2)
    bad = str(write(tmp_path / "bad.yaml", {"streams": {"web": {"wieght": 1}}}))
    assert "Did you mean 'weight'?" in the_error(run(["-c", bad], ["true"]), 2)


def test_a_taken_port_is_said(files: list[str], tmp_path: Path) -> None:
    with running_broker(BROKER) as broker:
        tree = BROKER | {"listen": {"producers": broker.producers}}
        done = run(["-c", str(write(tmp_path / "taken.yaml", tree))], ["true"])
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"broker exited with 2: cannot listen on {broker.producers}: got an address in use" in last


# Several hosts


def test_two_hosts_have_one_broker(files: list[str], tmp_path: Path) -> None:
    rendezvous = tmp_path / "streampack.json"
    stale = {"producers": "tcp://127.0.0.1:1", "trainers": "tcp://127.0.0.1:1", "http": "", "epoch": 1, "attempt": "7"}
    write(rendezvous, stale)
    files[1] = str(write(tmp_path / "shared.yaml", BROKER | {"rendezvous": str(rendezvous)}))
    go = tmp_path / "go"
    code = (
        "import os, pathlib, streampack, sys, time\n"
        "mesh = {'dp': 2, 'dp_rank': int(os.environ['SLURM_PROCID'])}\n"
        "while not pathlib.Path(sys.argv[1]).exists():\n"
        "    time.sleep(0.05)\n"
        "with streampack.connect(mesh=mesh, format='numpy') as loader:\n"
        "    print(sum(int(pack.num_samples) for pack in loader), os.environ['STREAMPACK_ENDPOINT'])\n"
    )
    words = [*STREAMPACK, "run", *files, "--", *python(code, str(go))]
    hosts, errors = [], [tmp_path / "node 0.txt", tmp_path / "node 1.txt"]
    for rank in (1, 0):
        env = environment(SLURM_PROCID=str(rank), SLURM_JOB_ID="7")
        with errors[rank].open("w") as into:
            hosts.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=into, text=True, env=env))
        time.sleep(1.5)  # the first one has seen the old file
    # Before anything is read: else all may be over before the second producer has said a word.
    until(lambda: "broker | " in errors[0].read_text() and "producer of host 1 | " in errors[1].read_text())
    go.touch()
    found = [host.communicate(timeout=PATIENCE_S)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], [each.read_text() for each in errors]
    counts, endpoints = zip(*(out.split() for out in found), strict=True)
    assert sum(map(int, counts)) == 600
    assert len(set(endpoints)) == 1
    assert "broker | " not in errors[1].read_text()
    assert ["status page: http://" in said.read_text() for said in errors] == [True, False], "it is on host 0"
    assert f"this host uses the broker at {endpoints[1]}" in errors[1].read_text()


def test_another_host_ends_with_the_reason_when_node_0_fails(files: list[str], tmp_path: Path) -> None:
    shared = str(write(tmp_path / "shared.yaml", BROKER | {"rendezvous": str(tmp_path / "streampack.json")}))
    with started(["-c", shared], python(HANG)) as first:
        with started(["-c", shared, "--node-rank", "1"], python(HANG)) as second:
            named(below(first), "broker").kill()
            assert second.wait(PATIENCE_S) == 1
            assert second.stderr is not None
            said = second.stderr.read().splitlines()[-1]
            assert said.startswith("streampack: Host 0 has ended: broker was killed by SIGKILL, ")
        assert first.wait(PATIENCE_S) == 1


def test_a_host_that_finds_no_broker_of_its_attempt_says_why(tmp_path: Path) -> None:
    path = tmp_path / "streampack.json"
    config = str(write(tmp_path / "shared.yaml", BROKER | {"rendezvous": str(path)}))
    options = ["-c", config, "--node-rank", "1", "--timeout", "0.5"]
    assert "within 0.5 s: the file does not exist" in the_error(run(options, ["true"]), 75)
    with running_broker(BROKER) as broker:
        found = json.loads(broker.rendezvous.read_text())
        write(path, found | {"attempt": "12"})
        assert "belongs to attempt '12', expected attempt '13'" in the_error(
            run(options, ["true"], STREAMPACK_ATTEMPT="13"), 75
        )
        write(path, found | {"epoch": found["epoch"] - 1})
        assert "its broker does not answer" in the_error(run(options, ["true"]), 75)
        assert answers(found["producers"], found["epoch"])
        write(path, found)
        assert run([*options[:-1], str(PATIENCE_S)], ["true"]).returncode == 0
    assert not answers(found["producers"], found["epoch"], timeout_s=0.3)


def test_another_host_needs_a_rendezvous(files: list[str]) -> None:
    assert "has no `rendezvous`, so host 1 cannot find the broker" in the_error(
        run([*files, "--node-rank", "1"], ["true"]), 2
    )


def test_the_rank_and_the_attempt_come_from_the_environment() -> None:
    assert node_rank(None, {}) == 0
    assert node_rank(2, {"SLURM_PROCID": "1"}) == 2
    assert node_rank(None, {"SLURM_PROCID": "1", "GROUP_RANK": "3"}) == 1
    assert node_rank(None, {"SLURM_PROCID": "", "NODE_RANK": "4"}) == 4
    assert attempt({}) == ""
    assert attempt({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == "7.2"
    assert attempt({"STREAMPACK_ATTEMPT": "x", "SLURM_JOB_ID": "7"}) == "x"


# A relay


@pytest.mark.parametrize(
    ("command", "env", "ranks"),
    [
        (["torchrun", "--nproc-per-node", "8", "train.py"], {}, 8),
        (["torchrun", "--nproc_per_node=4", "train.py"], {}, 4),
        (["torchrun", "--nproc-per-node=gpu", "train.py"], {"PET_NPROC_PER_NODE": "2"}, None),
        (["torchrun", "--nproc-per-node"], {}, None),
        (["torchrun", "train.py"], {"PET_NPROC_PER_NODE": "2"}, 2),
        (["python", "train.py"], {"SLURM_NTASKS_PER_NODE": "8"}, None),
    ],
)
def test_the_number_of_local_ranks_is_known_or_not(command: list[str], env: dict[str, str], ranks: int | None) -> None:
    assert local_ranks(command, env) == ranks


def test_a_relay_is_for_several_ranks_of_another_host_than_the_brokers() -> None:
    eight, far = ["torchrun", "--nproc-per-node=8", "train.py"], "tcp://node0:7402"
    assert wants_relay(None, eight, {}, 1, far)
    assert not wants_relay(None, eight, {}, 0, far)
    assert not wants_relay(None, ["torchrun", "--nproc-per-node=1", "train.py"], {}, 1, far)
    assert not wants_relay(None, ["python", "train.py"], {}, 1, far)
    assert not wants_relay(None, eight, {"STREAMPACK_RELAY": "off"}, 1, far)
    for near in ("ipc:///tmp/t", "tcp://127.0.0.1:7402", "tcp://localhost:7402", "tcp://[::1]:7402"):
        assert not wants_relay(None, eight, {}, 1, near)
        assert wants_relay(True, ["python", "train.py"], {}, 0, near)
    assert not wants_relay(False, eight, {}, 1, far)


def test_a_relay_that_is_killed_is_started_again_and_ends_with_the_command(files: list[str], tmp_path: Path) -> None:
    code = (
        "import os, pathlib, streampack, sys, time\n"
        "with streampack.connect(format='numpy') as loader:\n"
        "    for number, step in enumerate(loader.steps()):\n"
        "        if number == 3:\n"
        "            print('begun', flush=True)\n"
        "        while number == 3 and not pathlib.Path(sys.argv[1]).exists():\n"
        "            time.sleep(0.05)\n"
        "    print('ended', os.environ['STREAMPACK_RELAY'][:6])\n"
    )
    go = tmp_path / "go"
    logs = tmp_path / "logs"
    with started([*files, "--relay", "--log-dir", str(logs)], python(code, str(go))) as it:
        relay = named(below(it), "relay")
        relay.kill()
        until(lambda: (logs / "relay.log").read_text().count("ranks connect to") == 2)
        processes = below(it)
        go.touch()
        out, err = it.communicate(timeout=PATIENCE_S)
        assert (it.returncode, out) == (0, "ended ipc://\n"), err
        assert all_gone(processes)
    assert "relay was killed by SIGKILL" in err
    assert "starting it again in 1 s, and its ranks read from the broker meanwhile" in err


def test_no_relay_is_started_where_it_saves_nothing(files: list[str]) -> None:
    done = run(files, python("import os; print(os.environ.get('STREAMPACK_RELAY'))"), PET_NPROC_PER_NODE="8")
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
