"""The Pods of ``standby`` in ``streampack export k8s``, as processes of this machine; the active one's node is lost.

Each Pod has the command, the files and the mounts that its manifest names. Two nodes are network namespaces; a mount
and a UTS namespace give each Pod its folders and its name. A third namespace has the API server, which keeps the Lease,
the producers and the trainer.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.commands.manifests import addresses, two_brokers
from tests.integration.running import PATIENCE_S, folder, in_process, until, write, write_jsonl
from tests.services.standby import lease_server
from tests.soak.host_loss import ADDRESSES, three_hosts

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
API = (ADDRESSES["a"][:-1] + "2", 6443)
NODES = {"streampack-0": "a", "streampack-1": "b"}
ACCOUNT = "/mnt/account"
RULES = {"budget": 512, "step": {"packs": 4}, "overlong": "truncate"}
TRAINER = """
import time, streampack
with streampack.connect(format="numpy") as loader:
    for step in loader.steps():
        print(step.index, time.monotonic(), flush=True)
        time.sleep(0.05)
        loader.commit(step.index)
"""


class Pods:
    """The cluster: a file system for each Pod below ``top``, and the processes that were started."""

    def __init__(self, top: Path, names: dict[str, str], exported: Path) -> None:
        self.top, self._names, self.exported = top, names, exported
        self.etc = top / "etc"
        shutil.copytree("/etc", self.etc, symlinks=True, ignore_dangling_symlinks=True)
        hosts = [f"{ADDRESSES[node]} {pod}.streampack\n" for pod, node in NODES.items()]
        (self.etc / "hosts").unlink(missing_ok=True)
        (self.etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        for each in ("streampack", "kubernetes"):
            (self.etc / each).mkdir(exist_ok=True)
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, pod: str, node: str, words: list[str], mounts: dict[str, Path], env: dict[str, str]) -> Path:
        """Start a container of a Pod on a node; return the file with its output."""
        lines = [f"hostname {pod}", f"mount --bind {self.etc} /etc", "mount -t tmpfs none /var/lib",
                 "mount -t tmpfs none /mnt"]  # fmt: skip
        for path, source in mounts.items():
            lines += [f"mkdir -p {path}", f"mount --bind {source} {path}"]
        lines.append(f"exec {shlex.join(words)}")
        said = self.top / f"{pod}.log"
        command = ["ip", "netns", "exec", self._names[node], "unshare", "--mount", "--uts", "sh", "-ec",
                   "\n".join(lines)]  # fmt: skip
        path = f"{BIN}:{os.environ['PATH']}"
        with said.open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=os.environ | env | {"PATH": path})
        self.started[pod] = process
        return said

    def start_broker(self, pod: str, container: dict[str, Any]) -> Path:
        """Start a broker's Pod; its volume ``state`` stays if it was there."""
        state = self.top / f"state-{pod}"
        state.mkdir(exist_ok=True)
        sources = {"config": self.exported, "state": state}
        mounts = {
            each["mountPath"]: sources[each["name"]] for each in container["volumeMounts"] if each["name"] in sources
        }
        mounts[ACCOUNT] = self.top / "api" / "serviceaccount"
        known = [each["name"] for each in container["env"] if "value" in each]
        assert known == ["NUMBA_CACHE_DIR"], "this machine has its own kernels"
        env = {"KUBERNETES_SERVICE_HOST": API[0], "KUBERNETES_SERVICE_PORT": str(API[1])}
        # The mount point of a service account is not on every machine.
        patched = (
            "import pathlib; from streampack_services.standby import lease_arbiter; "
            f"lease_arbiter.ACCOUNT = pathlib.Path({ACCOUNT!r}); from streampack_services.entry import main; main()"
        )
        return self.start(pod, NODES[pod], [sys.executable, "-c", patched, *container["args"]], mounts, env)

    def ready(self, pod: str, path: str) -> int:
        """The status of a Pod's readiness probe, which the kubelet asks; 0 without an answer."""
        words = ["ip", "netns", "exec", self._names["c"], "curl", "-s", "-o", "/dev/null", "-m", "2", "-w",
                 "%{http_code}", f"http://{ADDRESSES[NODES[pod]]}:7400{path}"]  # fmt: skip
        return int(subprocess.run(words, capture_output=True, text=True).stdout or 0)

    def connect(self, node: str, up: bool) -> None:
        """Cut a node off, or connect it again."""
        words = ["ip", "-n", self._names["c"], "link", "set", f"v{node}", "up" if up else "down"]
        subprocess.run(words, check=True, timeout=10)

    def end(self) -> None:
        for process in self.started.values():
            process.kill()
            process.wait()


@pytest.fixture
def pods() -> Iterator[Pods]:
    with three_hosts() as names, folder() as top, ExitStack() as stack:
        if names is None:
            pytest.skip("no network namespaces here: they need root, ip, and a kernel that has veth")
        rows = [{"text": f"{number} " + "x" * (number % 300)} for number in range(6000)]
        (top / "data").mkdir()
        write_jsonl(top / "data" / "rows.jsonl", rows)
        mine = write(top / "mine.yaml", {
            "run": "pods", "state_dir": "x", "memory": "64MiB", "limits": {"sample_tokens": 4096, "chunk": "16KiB"},
            "rules": RULES, "streams": {"web": {}}, "standby": {"arbiter": "x", "takeover_s": 3},
        })  # fmt: skip
        result = in_process("export", "k8s", top / "k8s", "-c", mine)
        assert result.returncode == 0, result.stderr
        found = Pods(top, names, top / "k8s" / "standby")
        stack.callback(found.end)
        yield found


def steps_of(said: Path) -> list[tuple[int, float]]:
    """Number and time of each step of the trainer."""
    lines = [line.split() for line in said.read_text().splitlines()] if said.exists() else []
    return [(int(line[0]), float(line[1])) for line in lines if len(line) == 2 and line[0].isdigit()]


def test_the_pods_of_an_export_go_on_when_the_node_of_the_active_broker_is_lost(pods: Pods) -> None:
    top = pods.top
    pods.start("api", "c", [sys.executable, "-m", lease_server.__name__, str(top / "api"), API[0], str(API[1])], {}, {})
    until(lambda: (top / "api" / "serviceaccount" / "namespace").exists())
    (container,) = two_brokers(pods.exported.parent)["spec"]["template"]["spec"]["containers"]
    said = {pod: pods.start_broker(pod, container) for pod in NODES}
    ready = container["readinessProbe"]["httpGet"]["path"]

    # One of both is active, the other one follows it.
    until(lambda: any("this broker is active" in each.read_text() for each in said.values()))
    until(lambda: any("has every safe record" in each.read_text() for each in said.values()))
    (active,) = (pod for pod, each in said.items() if "this broker is active" in each.read_text())
    (standby,) = NODES.keys() - {active}
    until(lambda: [pods.ready(pod, ready) for pod in (active, standby)] == [200, 200])
    assert pods.ready(standby, "/readyz") == 503, "it serves nobody"
    endpoint = addresses(pods.exported.parent, "standby")
    (job,) = yaml.safe_load_all((pods.exported.parent / "standalone/producers.yaml").read_text())
    (producer,) = job["spec"]["template"]["spec"]["containers"]
    mounts = {"/etc/streampack": pods.exported, "/mnt/data": top / "data"}
    shards = pods.exported / "producer.yaml"
    shards.write_text(shards.read_text().replace('"/data/', '"/mnt/data/'))
    pods.start("producer", "c", ["streampack", *producer["args"]], mounts, {})
    trained = pods.start("trainer", "c", [sys.executable, "-c", TRAINER], {}, {"STREAMPACK_ENDPOINT": endpoint})
    until(lambda: len(steps_of(trained)) > 30)

    # Its node is lost, with its disk.
    pods.connect(NODES[active], up=False)
    pods.started[active].kill()
    pods.started[active].wait(PATIENCE_S)
    shutil.rmtree(top / f"state-{active}")
    before = len(steps_of(trained))
    lost_at = time.monotonic()
    until(lambda: len(steps_of(trained)) > before + 20)
    assert "this broker is active" in said[standby].read_text()

    # A new node takes its Pod, which copies the log. Then the other Pod is deleted, as an update does it.
    pods.connect(NODES[active], up=True)
    said[active].write_text("")
    pods.start_broker(active, container)
    until(lambda: pods.ready(active, ready) == 200)
    stopped_at = time.monotonic()
    pods.started[standby].terminate()
    assert pods.started[standby].wait(PATIENCE_S) == 0
    assert "draining" not in said[standby].read_text(), "clients move, and get no goodbye"
    until(lambda: "this broker is active" in said[active].read_text())
    assert pods.started["trainer"].wait(PATIENCE_S) == 0, trained.read_text()

    steps = steps_of(trained)
    assert [number for number, _ in steps] == list(range(len(steps))), "each step once, in order"
    assert len(steps) > 400
    pauses = [(after, after - earlier) for (_, earlier), (_, after) in itertools.pairwise(steps)]
    lost = max(pause for at, pause in pauses if lost_at < at < stopped_at)
    stopped = max(pause for at, pause in pauses if at > stopped_at)
    print(json.dumps({"steps": len(steps), "pause after the loss": lost, "pause after the stop": stopped}))
    assert lost < 60.0
    assert stopped < 60.0
