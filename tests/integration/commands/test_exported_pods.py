"""Pods, containers and units of ``streampack export``, for configurations of several sizes, and with keys.

A Pod's files are laid out as the kubelet does it, and read as the user of each container. An edited configuration is
compared field by field with the one that was applied before.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from streampack_services.broker.memory_peak import peak
from streampack_services.broker.memory_plan import plan
from streampack_services.broker.serving.allowed_keys import Allowed
from streampack_services.export_limits import COMPILING_BYTES, GIB, PROCESS_GIB, RELAY_BYTES

from streampack.config.config_files import read_broker
from streampack.errors import UserError
from streampack.transport.keys import KEY_FILE, load_key
from streampack.transport.secret_files import read_secret
from tests.integration.commands.manifests import Tree, containers, every_kind, exported, loaded, make_keys
from tests.integration.running import folder, write

KEYS = "/etc/streampack-keys"
GROUP = 10001


def limits(where: str, top: Path) -> dict[str, float]:
    """The memory limit of each process, in GiB, by its name."""
    if where == "compose":
        services = yaml.safe_load((top / "compose.yaml").read_text())["services"]
        return {name: float(services[name]["mem_limit"].removesuffix("g")) for name in ("broker", "producer", "relay")}
    if where == "systemd":
        units = {name: (top / f"streampack-{name}@.service").read_text() for name in ("broker", "producer", "relay")}
        return {name: float(re.findall(r"^MemoryMax=(\d+)G$", unit, re.M)[0]) for name, unit in units.items()}
    found = {}
    for kind, tree in every_kind(top).items():
        for each in containers(tree["spec"]["template"]["spec"]):
            if each.get("args"):
                assert each["resources"]["requests"] == each["resources"]["limits"]
                limit = each["resources"]["limits"]["memory"]
                found[f"{kind}: {each['args'][0]}"] = float(limit.removesuffix("Gi"))
    return found


@pytest.mark.parametrize("memory", ["1GiB", "36GiB"])
@pytest.mark.parametrize("where", ["k8s", "compose", "systemd"])
def test_each_process_gets_the_memory_of_its_own_configuration(where: str, memory: str, tmp_path: Path) -> None:
    config = write(tmp_path / "mine.yaml", {"memory": memory, "streams": {"code": {}}})
    producer = write(
        tmp_path / "p.yaml", {"processes": 6, "streams": {"code": {"source": "jsonl", "shards": "/data/*.jsonl"}}}
    )
    top = exported(where, tmp_path / "out", "-c", config, "-p", producer)
    found = limits(where, top)
    assert len(found) == (7 if where == "k8s" else 3)
    for name, gib in found.items():
        if name.endswith("relay"):
            assert gib * GIB == RELAY_BYTES + GIB
        elif name.endswith(("produce", "producer")):
            assert gib == 6 * PROCESS_GIB
        else:
            place = "components/sidecar" if name.startswith("sidecar") else "standalone" if where == "k8s" else ""
            own = read_broker(top / ("compose" if where == "compose" else place) / "broker.yaml")
            rest = gib * GIB - peak(own, plan(own), mean_tokens=None).total
            assert COMPILING_BYTES <= rest < COMPILING_BYTES + GIB
    text = "".join(path.read_text() for path in top.rglob("*") if path.is_file())
    relays = re.findall(r"relay,? --memory,? (\w+)", text)
    assert set(relays) == {f"{RELAY_BYTES // GIB}GiB"}
    assert len(relays) == {"k8s": 3, "compose": 1, "systemd": 1}[where]


@pytest.mark.parametrize("where", ["k8s", "compose", "systemd"])
def test_a_broker_has_the_time_and_the_disk_of_its_own_configuration(where: str, tmp_path: Path) -> None:
    config = write(
        tmp_path / "mine.yaml", {"drain_timeout_s": 200, "retain": {"bytes": "2TiB"}, "streams": {"code": {}}}
    )
    top = exported(where, tmp_path / "out", "-c", config)
    if where != "k8s":
        (unit,) = top.glob("compose.yaml" if where == "compose" else "streampack-broker@.service")
        (time,) = re.findall(r"^(?:TimeoutStopSec=| +stop_grace_period: )(\d+)", unit.read_text(), re.M)
        assert int(time) == 235
        return
    kinds = every_kind(top)
    times = {
        name: tree["spec"]["template"]["spec"].get("terminationGracePeriodSeconds") for name, tree in kinds.items()
    }
    assert times == {
        "broker": 235, "standby": 235, "sidecar": 265, "producers": 30, "relays": None, "relay": None,
        "relay-of-node": None,
    }  # fmt: skip
    operations = loaded(top / "components/sidecar/jobset.yaml")[0]
    assert 265 in [each["value"] for each in operations if each["path"].endswith("/terminationGracePeriodSeconds")]
    (claim,) = kinds["broker"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2560Gi"


def test_only_the_brokers_of_standby_have_a_token_of_kubernetes(tmp_path: Path) -> None:
    kinds = every_kind(exported("k8s", tmp_path))
    with_token = {name for name, tree in kinds.items()
                  if tree["spec"]["template"]["spec"].get("automountServiceAccountToken") is not False}  # fmt: skip
    assert with_token == {"standby"}


def test_a_drain_of_nodes_never_stops_the_last_broker(tmp_path: Path) -> None:
    kubernetes = exported("k8s", tmp_path)
    resources = {each: loaded(kubernetes / each / "kustomization.yaml")[0]["resources"]
                 for each in ("standalone", "standby")}  # fmt: skip
    assert "disruption-budget.yaml" in resources["standalone"]
    assert "../standalone" in resources["standby"]
    (budget,) = loaded(kubernetes / "standalone/disruption-budget.yaml")
    assert (budget["spec"]["minAvailable"], budget["spec"]["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    for name in ("broker", "standby"):
        labels = every_kind(kubernetes)[name]["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def applied(kubernetes: Path, of: str) -> tuple[Tree, Tree]:
    """The StatefulSet and the Job of producers, with the names of ConfigMaps that kustomize gives them."""
    (kustomization,) = loaded(kubernetes / of / "kustomization.yaml")
    names = {}
    for each in kustomization["configMapGenerator"]:
        data = b"".join((kubernetes / of / name).read_bytes() for name in each.get("files", []))
        is_fixed = each.get("options", {}).get("disableNameSuffixHash", False)
        names[each["name"]] = each["name"] if is_fixed else f"{each['name']}-{hashlib.sha256(data).hexdigest()[:10]}"
    kinds = every_kind(kubernetes)
    for tree in kinds.values():
        for volume in tree["spec"]["template"]["spec"]["volumes"]:
            if "configMap" in volume:
                volume["configMap"]["name"] = names[volume["configMap"]["name"]]
    return kinds["broker" if of == "standalone" else "standby"], kinds["producers"]


@pytest.mark.parametrize("of", ["standalone", "standby"])
def test_an_edited_configuration_can_be_applied_to_a_run(of: str, tmp_path: Path) -> None:
    """Kubernetes refuses another template of a Job, and of a StatefulSet all but its template and a few more."""
    config = write(tmp_path / "mine.yaml", {"memory": "1GiB", "streams": {"web": {}}})
    kubernetes = exported("k8s", tmp_path / "out", "-c", config)
    brokers, producers = applied(kubernetes, of)
    for name in ("broker.yaml", "producer.yaml"):
        path = kubernetes / of / name
        path.write_text(path.read_text() + "# edited\n")
        edited_brokers, edited_producers = applied(kubernetes, of)
        assert edited_producers == producers
        assert {**edited_brokers["spec"], "template": 0} == {**brokers["spec"], "template": 0}
        assert edited_brokers != brokers, "a broker restarts with its new file"
    write(config, {"memory": "2GiB", "drain_timeout_s": 100, "streams": {"web": {}}})
    again, same = applied(exported("k8s", tmp_path / "out", "-c", config, "--force"), of)
    assert same == producers
    assert {**again["spec"], "template": 0} == {**brokers["spec"], "template": 0}
    assert again["spec"]["template"] != brokers["spec"]["template"]


# Keys


class Secrets(dict[str, dict[str, bytes]]):
    """The contents of each Secret that the component makes, with a token for HTTP."""

    def __init__(self, kubernetes: Path) -> None:
        make_keys(kubernetes)
        component = kubernetes / "components/keys"
        for each in loaded(component / "kustomization.yaml")[0]["secretGenerator"]:
            self[each["name"]] = {Path(name).name: (component / name).read_bytes() for name in each["files"]}
            self[each["name"]] |= {
                name: value.encode()
                for name, _, value in (literal.partition("=") for literal in each.get("literals", []))
            }
        self["streampack-http"] = {"http.token": b"t" * 40}

    def mount(self, volume: Tree, fs_group: int | None, path: Path) -> None:
        """Write a volume of Secrets as the kubelet does: files of root, which the Pod's fsGroup may read."""
        if "projected" in volume:
            mode, sources = (
                volume["projected"]["defaultMode"],
                [each["secret"] for each in volume["projected"]["sources"]],
            )
        else:
            mode, sources = (
                volume["secret"]["defaultMode"],
                [{"name": volume["secret"]["secretName"]} | volume["secret"]],
            )
        assert all(each["optional"] for each in sources), "Pods start without keys, too"
        inner = path / "..2026_11_29"
        inner.mkdir(parents=True)
        (path / "..data").symlink_to(inner.name)
        for each in sources:
            items = {item["key"]: item["path"] for item in each.get("items", [])}
            for key, data in self[each["name"]].items():
                if not items or key in items:
                    name = items.get(key, key)
                    (inner / name).write_bytes(data)
                    (path / name).symlink_to(f"..data/{name}")
                    os.chown(inner / name, 0, fs_group or 0)
                    (inner / name).chmod(mode | (0o440 if fs_group else 0))
        for each in (path, inner):
            os.chown(each, 0, fs_group or 0)
        inner.chmod(0o2755)
        path.chmod(0o3777)


def reads(uid: int, groups: list[int], path: Path) -> bool:
    """Return whether a process of this user accepts the file at ``path``: a folder of keys, a key or a token."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(UserError):
            os.setgroups(groups)
            os.setgid(groups[0])
            os.setuid(uid)
            if path.is_dir():
                assert Allowed(path, lambda: None).num_keys == 4
            elif path.suffix == ".token":
                read_secret(path)
            else:
                load_key(path)
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="files of root and processes of other users need root")
def test_every_container_reads_its_own_key_as_its_user_and_no_other(tmp_path: Path) -> None:
    kubernetes = exported("k8s", tmp_path)
    secrets, number = Secrets(kubernetes), itertools.count()
    found: dict[str, list[str]] = {}
    with folder() as top:
        top.chmod(0o755)
        for kind, tree in every_kind(kubernetes).items():
            pod = tree["spec"]["template"]["spec"]
            volumes = {each["name"]: each for each in pod["volumes"]}
            for each in containers(pod):
                if not (keys := [mount for mount in each["volumeMounts"] if mount["mountPath"] == KEYS]):
                    assert each["name"] == "folder", f"{kind}: {each['name']} has no key"
                    continue
                (mount,) = keys
                assert mount["readOnly"] is True
                user: dict[str, Any] = pod["securityContext"] | each["securityContext"]
                at = top / str(next(number))
                secrets.mount(volumes[mount["name"]], user["fsGroup"], at)
                env = {variable["name"]: variable for variable in each.get("env", [])}
                wanted = [at] if each.get("args", [""])[0] == "broker" else []
                if KEY_FILE in env:
                    source = env[KEY_FILE]["valueFrom"]["secretKeyRef"]
                    assert source["optional"] is True
                    value = secrets[source["name"]][source["key"]].decode()
                    wanted.append(at / Path(value).relative_to(KEYS))
                groups = [user.get("runAsGroup", GROUP), user["fsGroup"]]
                for path in wanted:
                    assert reads(user["runAsUser"], groups, path), (kind, each["name"], path)
                    assert reads(1000, [1000, user["fsGroup"]], path), "an image of another user"
                    assert not reads(user["runAsUser"], [1000], path), "the group decides"
                found[f"{kind}: {each['name']}"] = sorted(path.name for path in at.glob("*.*") if path.suffix == ".key")
    producer, relay, trainer, broker = ["producers.key"], ["relays.key"], ["trainers.key"], ["broker.key"]
    assert found == {
        "broker: broker": [*broker, "standby.key"], "standby: broker": [*broker, "standby.key"],
        "producers: producer": producer, "relays: relay": relay, "relay: streampack-relay": relay,
        "relay: trainer": trainer, "relay-of-node: trainer": trainer, "sidecar: streampack-broker": broker,
        "sidecar: streampack-producer": producer, "sidecar: trainer": trainer,
    }  # fmt: skip


def test_keys_in_a_configuration_switch_their_component_on(tmp_path: Path) -> None:
    config = write(tmp_path / "mine.yaml", {"listen": {"keys": KEYS}, "streams": {"web": {}}})
    for options, is_on in (((), False), (("-c", config), True)):
        kubernetes = exported("k8s", tmp_path / str(is_on), *options)
        for each in ("standalone", "sidecar"):
            (tree,) = loaded(kubernetes / each / "kustomization.yaml")
            assert ("../components/keys" in (tree["components"] or [])) is is_on
            assert read_broker(kubernetes / "standalone/broker.yaml").listen.keys == (KEYS if is_on else None)
