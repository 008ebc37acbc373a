"""``deploy/`` and ``streampack export``: what cannot be run here is held against schemas, linters and our own parsers.

Kubernetes' own schemas (strict: a key that it does not know is an error), Compose's, systemd-analyze, ShellCheck and
hadolint say whether a file means something; the rest of this says whether it means *us*: each command parses, each
port is listened on, each file that is mounted is there, each broker has the memory that it takes and the time to drain.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from msgspec import structs
from streampack_services.cli import main
from streampack_services.export import FILES, RUN
from streampack_services.export_limits import limit_gib
from streampack_services.standby.shipping import advertised

from streampack.config.config_files import read_broker, read_producer
from streampack.config.daemon_settings import BrokerConfig
from tests.integration.commands.manifests import (
    Tree,
    addresses,
    containers,
    exported,
    loaded,
    make_keys,
    patched,
    two_brokers,
)
from tests.integration.programs import program
from tests.integration.running import in_process

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
KUBERNETES = "1.33"
"""Where native sidecars are stable."""


def run_tool(*words: str | Path) -> None:
    """A linter that has nothing to say."""
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def parse(words: list[str]) -> tuple[str, Tree]:
    """What our command line makes of the words behind ``streampack``; nothing is run."""
    group: Any = typer.main.get_command(main.app)
    context = group.make_context("streampack", list(words))
    name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    return name, command.make_context(name, rest, parent=context).params


# Configurations


@pytest.mark.parametrize("path", sorted(FILES.rglob("broker.yaml")), ids=lambda path: path.parent.name)
def test_a_brokers_configuration_is_accepted(path: Path) -> None:
    result = in_process("check", path)
    assert (result.returncode, result.stderr) == (0, "")
    assert read_broker(path).run == RUN


@pytest.mark.parametrize("path", sorted(FILES.rglob("producer.yaml")), ids=lambda path: path.parent.name)
def test_producers_find_the_broker_of_their_place(path: Path) -> None:
    producer, broker = read_producer(path), read_broker(path.parent / "broker.yaml")
    assert set(producer.streams) == set(broker.streams)
    port = broker.listen.producers.rpartition(":")[2]
    assert producer.broker in (broker.listen.producers, f"file://{broker.rendezvous}") or producer.broker.endswith(
        f":{port}"
    )


# Kubernetes


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported("k8s", tmp_path_factory.mktemp("k8s"))


@pytest.fixture(scope="module")
def sidecar(kubernetes: Path) -> Tree:
    """The example's Job with the sidecar patched in."""
    return patched(kubernetes, "sidecar", "sidecar")


@pytest.fixture(scope="module")
def pods(kubernetes: Path, sidecar: Tree) -> dict[str, Tree]:
    """Every Pod's spec, by the kind and name of what makes it."""
    found = [sidecar, *(tree for path in (kubernetes / "standalone").glob("*.yaml") for tree in loaded(path))]
    return {
        f"{tree['kind']}/{tree['metadata']['name']}": tree["spec"]["template"]["spec"]
        for tree in found
        if "template" in tree.get("spec", {})
    }


RELAYS = ("relay", "relay-of-node")
"""Components that let trainers' Pods read through a relay."""


def test_every_manifest_is_one_that_kubernetes_knows(kubernetes: Path, sidecar: Tree) -> None:
    import kubernetes_validate

    known = [tree for path in (kubernetes / "standalone").glob("*.yaml") for tree in loaded(path) if "kind" in tree]
    native = [tree for tree in [*known, sidecar] if "kustomize" not in tree["apiVersion"]]
    assert {tree["kind"] for tree in native} == {
        "StatefulSet", "Service", "Job", "NetworkPolicy", "PodDisruptionBudget",
    }  # fmt: skip
    (relays,) = loaded(kubernetes / "relays/daemonset.yaml")
    native += [relays, *(patched(kubernetes, "trainers", component) for component in RELAYS)]
    native += [tree for name in ("account", "network-policy")
               for tree in loaded(kubernetes / f"standby/{name}.yaml")]  # fmt: skip
    native.append(two_brokers(kubernetes))
    for tree in native:
        kubernetes_validate.validate(tree, KUBERNETES, strict=True)


def test_a_kustomization_names_files_that_are_there(kubernetes: Path) -> None:
    files = sorted(kubernetes.rglob("kustomization.yaml"))
    assert len(files) == 10
    make_keys(kubernetes)
    for path in files:
        (tree,) = loaded(path)
        named = [*tree.get("resources", []), *(tree.get("components") or [])]
        named += [each["path"] for each in tree.get("patches", [])]
        made = [*tree.get("configMapGenerator", []), *tree.get("secretGenerator", [])]
        named += [name for each in made for name in each.get("files", [])]
        assert named
        assert [name for name in named if not (path.parent / name).exists()] == []


@pytest.mark.parametrize("component", ["sidecar", "relay"])
def test_a_job_set_gets_what_a_job_gets(kubernetes: Path, component: str) -> None:
    (job,), (operations,) = (loaded(kubernetes / f"components/{component}/{name}.yaml") for name in ("job", "jobset"))
    found: Tree = {}
    for each in operations:
        path = each["path"].removeprefix("/spec/replicatedJobs/0/template/spec/template/").split("/")
        assert each["op"] == "add"
        if path[-1] == "-":
            found.setdefault(path[-2], []).append(each["value"])
        elif path[-2:-1] == ["securityContext"]:
            found.setdefault("securityContext", {})[path[-1]] = each["value"]
        else:
            found[path[-1]] = each["value"]
    template = job["spec"]["template"]
    pod = template["spec"]
    (trainer,) = pod["containers"]
    both = {key: value for key, value in (pod | trainer).items() if key not in ("containers", "name")}
    assert found == both | ({"metadata": template["metadata"]} if "metadata" in template else {})


def test_a_sidecar_is_native_and_the_trainer_waits_for_it(sidecar: Tree) -> None:
    broker, producer = sidecar["spec"]["template"]["spec"]["initContainers"]
    assert broker["restartPolicy"] == producer["restartPolicy"] == "Always"
    assert broker["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert broker["args"][0] == "broker"


def test_pods_keep_to_the_restricted_standard(pods: dict[str, Tree]) -> None:
    assert len(pods) == 3
    for pod in pods.values():
        for each in containers(pod):
            both = pod.get("securityContext", {}) | each["securityContext"]
            assert both["runAsNonRoot"] is True
            assert both["runAsUser"] == 10001
            assert both["seccompProfile"] == {"type": "RuntimeDefault"}
            assert (both["allowPrivilegeEscalation"], both["readOnlyRootFilesystem"]) == (False, True)
            assert both["capabilities"] == {"drop": ["ALL"]}
            assert each["resources"]["requests"] == each["resources"]["limits"]


def test_all_that_a_container_mounts_is_a_volume_of_its_pod(kubernetes: Path, pods: dict[str, Tree]) -> None:
    (stateful,) = loaded(kubernetes / "standalone/statefulset.yaml")
    claimed = [each["metadata"]["name"] for each in stateful["spec"]["volumeClaimTemplates"]]
    for pod in pods.values():
        volumes = {each["name"]: each for each in pod["volumes"]} | dict.fromkeys(claimed)
        for each in containers(pod):
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in each["volumeMounts"]}
            if "args" in each:
                config = Path(parse(each["args"])[1]["config"])
                own = "streampack-producers" if pod["containers"][0]["name"] == "producer" else "streampack"
                assert mounts[str(config.parent)]["configMap"] == {"name": own}
                cached = {each["name"]: each.get("value") for each in each.get("env", [])}.get("NUMBA_CACHE_DIR") or ""
                assert "/var/cache/streampack" in mounts or str(Path(cached).parent) in mounts


def test_brokers_listen_where_they_are_looked_for(kubernetes: Path, pods: dict[str, Tree]) -> None:
    for name, folder in (("StatefulSet/streampack", "standalone"), ("Job/train", "components/sidecar")):
        broker = next(each for each in containers(pods[name]) if each.get("args", [""])[0] == "broker")
        ports = {each["containerPort"]: each["name"] for each in broker["ports"]}
        listen = read_broker(kubernetes / folder / "broker.yaml").listen
        urls = [url for url in (listen.producers, listen.trainers, listen.http) if not url.startswith("ipc://")]
        assert sorted(ports) == sorted(int(url.rpartition(":")[2]) for url in urls)
        assert all("0.0.0.0" in url for url in urls)
        for probe in ("startupProbe", "livenessProbe"):
            assert broker[probe]["httpGet"]["port"] == ports[7400]
        (monitor,) = loaded(kubernetes / "components/monitoring/pod-monitor.yaml")
        assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == ports[7400]


def test_a_trainer_beside_the_broker_finds_its_sockets(kubernetes: Path, sidecar: Tree) -> None:
    (trainer,) = sidecar["spec"]["template"]["spec"]["containers"]
    listen = read_broker(kubernetes / "components/sidecar/broker.yaml").listen
    assert {"name": "STREAMPACK_ENDPOINT", "value": listen.trainers} in trainer["env"]
    folders = [mount["mountPath"] for mount in trainer["volumeMounts"]]
    assert any(listen.trainers.removeprefix("ipc://").startswith(folder + "/") for folder in folders)
    assert sidecar["spec"]["template"]["spec"]["shareProcessNamespace"] is True


@pytest.mark.parametrize("component", RELAYS)
def test_a_trainer_finds_its_relay_and_both_find_the_broker(kubernetes: Path, component: str) -> None:
    job = patched(kubernetes, "trainers", component)
    pod = job["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    if component == "relay":
        relays = pod
        (relay,) = pod["initContainers"]
        assert relay["restartPolicy"] == "Always", "native, so the Job can complete"
        assert pod["shareProcessNamespace"] is True
    else:
        (daemons,) = loaded(kubernetes / "relays/daemonset.yaml")
        relays = daemons["spec"]["template"]["spec"]
        (relay,) = relays["containers"]
        labels = daemons["spec"]["template"]["metadata"]["labels"]
        assert daemons["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert "streampack" in labels, "the broker's network policy lets it in"
        assert labels["streampack"] == job["spec"]["template"]["metadata"]["labels"]["streampack"]
    addressed = [[each for each in of["env"] if each["name"] != "STREAMPACK_KEY_FILE"] for of in (relay, trainer)]
    assert addressed[0] == addressed[1]
    (endpoint,) = (each["valueFrom"] for each in relay["env"] if each["name"] == "STREAMPACK_ENDPOINT")
    assert endpoint == {"configMapKeyRef": {"name": "streampack-addresses", "key": "trainers"}}
    where = {each["name"]: each.get("value") for each in relay["env"]}
    (service,) = loaded(kubernetes / "standalone/service.yaml")
    port = read_broker(kubernetes / "standalone/broker.yaml").listen.trainers.rpartition(":")[2]
    assert addresses(kubernetes, "standalone") == f"tcp://{service['metadata']['name']}:{port}"
    folder = str(Path(where["STREAMPACK_RELAY"].removeprefix("ipc://")).parent)
    volumes = []
    for of, each in ((relays, relay), (pod, trainer)):
        (name,) = (mount["name"] for mount in each["volumeMounts"] if mount["mountPath"] == folder)
        volumes += [{key: value for key, value in volume.items() if key != "name"}
                    for volume in of["volumes"] if volume["name"] == name]  # fmt: skip
        assert (of.get("securityContext", {}) | each["securityContext"])["runAsUser"] == 10001
    assert len(volumes) == 2
    assert volumes[0] == volumes[1]


def test_two_brokers_are_on_two_nodes_and_clients_have_both_addresses(kubernetes: Path) -> None:
    tree = two_brokers(kubernetes)
    pod = tree["spec"]["template"]["spec"]
    assert (tree["spec"]["replicas"], tree["spec"]["podManagementPolicy"]) == (2, "Parallel")
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = tree["spec"]["template"]["metadata"]["labels"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items()
    names = [f"{tree['metadata']['name']}-{number}.{tree['spec']['serviceName']}" for number in range(2)]
    assert addresses(kubernetes, "standby") == ",".join(f"tcp://{name}:7402" for name in names)
    producer = read_producer(kubernetes / "standby/producer.yaml")
    assert producer.broker == ",".join(f"tcp://{name}:7401" for name in names)
    config = read_broker(kubernetes / "standby/broker.yaml")
    assert config.standby is not None
    shipped = [advertised(structs.replace(config.standby, name=name.partition(".")[0])) for name in names]
    assert shipped == [f"tcp://{name}:7403" for name in names]
    (service,) = loaded(kubernetes / "standalone/service.yaml")
    assert service["spec"]["publishNotReadyAddresses"] is True, "a standby that copies the log has a name"
    (broker,) = pod["containers"]
    ports = {each["containerPort"]: each["name"] for each in broker["ports"]}
    listen = config.listen
    urls = [listen.producers, listen.trainers, listen.http, config.standby.listen]
    assert sorted(ports) == sorted(int(url.rpartition(":")[2]) for url in urls)


def test_a_standby_is_not_restarted_while_it_waits(kubernetes: Path) -> None:
    """Probes of a Pod that is a standby, maybe for weeks; one that may take over counts as ready."""
    (broker,) = two_brokers(kubernetes)["spec"]["template"]["spec"]["containers"]
    paths = {probe: broker[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/livez", "readinessProbe": "/readyz?standby=1", "livenessProbe": "/livez"}
    alive = broker["livenessProbe"]
    assert alive["failureThreshold"] * alive.get("periodSeconds", 10) >= 300, "it reads its log when it takes over"


def test_the_brokers_may_change_the_lease_of_their_arbiter_and_nothing_else(kubernetes: Path) -> None:
    trees = {tree["kind"]: tree for tree in loaded(kubernetes / "standby/account.yaml")}
    account = trees["ServiceAccount"]["metadata"]["name"]
    pod = two_brokers(kubernetes)["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (account, True)
    assert [each["name"] for each in trees["RoleBinding"]["subjects"]] == [account]
    config = read_broker(kubernetes / "standby/broker.yaml")
    assert config.standby is not None
    name = config.standby.arbiter.removeprefix("kubernetes:///")
    (tree,) = loaded(kubernetes / "standby/kustomization.yaml")
    made = [each["name"] for each in tree["configMapGenerator"]]
    assert name not in made, "kustomize would add a hash to the name in the Role"
    rules = [(rule["resources"], rule.get("resourceNames"), rule["verbs"]) for rule in trees["Role"]["rules"]]
    assert rules == [(["leases"], None, ["create"]), (["leases"], [name], ["get", "update"])]


def test_selectors_select_what_they_mean(kubernetes: Path, sidecar: Tree) -> None:
    """A sidecar's Pod, which is a trainer's, is neither in the Service nor under the broker's network policy."""
    trees = {each["kind"]: each for path in (kubernetes / "standalone").glob("*.yaml") for each in loaded(path)
             if "kind" in each}  # fmt: skip
    labels = trees["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    beside = sidecar["spec"]["template"]["metadata"]["labels"]
    for selector in (
        trees["Service"]["spec"]["selector"],
        trees["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert not selector.items() <= beside.items()
    producers = trees["NetworkPolicy"]["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert producers.items() <= trees["Job"]["spec"]["template"]["metadata"]["labels"].items()
    (monitor,) = loaded(kubernetes / "components/monitoring/pod-monitor.yaml")
    (wanted,) = monitor["spec"]["selector"]["matchExpressions"]
    assert {labels[wanted["key"]], beside[wanted["key"]]} == set(wanted["values"])


def test_the_rule_and_the_dashboards_are_the_ones_of_prometheus_and_grafana(kubernetes: Path) -> None:
    folder = kubernetes / "components/monitoring"
    (rule,), (alerts,) = loaded(folder / "prometheus-rule.yaml"), loaded(FILES / "prometheus/alerts.yaml")
    assert (rule["kind"], rule["spec"]) == ("PrometheusRule", alerts)
    dashboards = {path.name: path.read_text() for path in folder.glob("*.json")}
    assert dashboards == {path.name: path.read_text() for path in (FILES / "grafana/dashboards").glob("*.json")} != {}
    assert all(len(text) < 2**18 for text in dashboards.values()), "kubectl apply keeps a copy in an annotation"


# All places


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every ``streampack ...`` of deploy/, and where it stands; none of its words is a shell's."""
    for path in sorted(FILES.rglob("*")):
        if not path.is_file():
            continue
        text = path.read_text()
        name = str(path.relative_to(FILES))
        if path.suffix in (".service", ".sbatch"):
            joined = text.replace("\\\n", " ")
            for line in re.findall(r"^(?!#).*?\bstreampack ((?:broker|produce|run|relay) --.*)$", joined, re.M):
                yield name, shlex.split(line.rstrip("& ").replace("%i", RUN))
        if path.suffix == ".yaml":
            for found in re.findall(r"(?:args|command): \[((?:broker|produce|relay),.*)\]", text):
                yield name, yaml.safe_load(f"[{found}]")


def test_every_command_is_one_of_ours() -> None:
    found = list(commands())
    assert len(found) == 19, found
    for name, words in found:
        assert parse(words)[0] in ("broker", "produce", "run", "relay"), name


def brokers() -> Iterator[tuple[str, BrokerConfig, float, float]]:
    """Of each container and unit with a broker: its file, its configuration, its memory in GiB, its time to end."""
    (tree,) = loaded(FILES / "compose.yaml")
    broker = tree["services"]["broker"]
    grace = float(broker["stop_grace_period"].removesuffix("s"))
    yield "compose", read_broker(FILES / "compose/broker.yaml"), float(broker["mem_limit"].removesuffix("g")), grace
    for folder, name in (("standalone", "statefulset"), ("components/sidecar", "job")):
        (tree,) = loaded(FILES / f"kubernetes/{folder}/{name}.yaml")
        pod = tree["spec"]["template"]["spec"]
        own = next(each for each in containers(pod) if each.get("args", [""])[0] == "broker")
        memory = float(own["resources"]["limits"]["memory"].removesuffix("Gi"))
        config = read_broker(FILES / f"kubernetes/{folder}/broker.yaml")
        yield folder, config, memory, pod["terminationGracePeriodSeconds"]
    unit = (FILES / "systemd/streampack-broker@.service").read_text()
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert stop is not None
    yield "systemd", read_broker(FILES / "systemd/broker.yaml"), float("inf"), float(stop[1])


def test_a_broker_has_the_memory_that_it_takes_and_the_time_to_drain() -> None:
    for name, config, memory, grace in brokers():
        assert grace > config.drain_timeout_s + 5, name
        assert memory >= limit_gib(config), name


def test_every_place_waits_five_minutes_for_kernels_to_compile(pods: dict[str, Tree]) -> None:
    waits = [
        probe["periodSeconds"] * probe["failureThreshold"]
        for pod in pods.values()
        for each in containers(pod)
        if (probe := each.get("startupProbe"))
    ]
    assert len(waits) == 2, "a sidecar, a StatefulSet"
    units = [(FILES / f"systemd/streampack-{name}@.service").read_text() for name in ("broker", "producer")]
    waits += [int(found) for unit in units for found in re.findall(r"^TimeoutStartSec=(\d+)$", unit, re.M)]
    waits += map(int, re.findall(r"--start-period=(\d+)s", (FILES / "docker/Dockerfile").read_text()))
    assert len(waits) == 5
    assert min(waits) >= 300
    for name, words in commands():
        command, options = parse(words)
        assert command != "produce" or options["timeout"] >= 300 or name == "compose.yaml", name  # there it is healthy


def test_compose_is_what_its_schema_allows_and_mounts_what_is_there() -> None:
    import jsonschema

    spec = importlib.util.find_spec("check_jsonschema")
    assert spec is not None
    assert spec.origin is not None
    schema = json.loads((Path(spec.origin).parent / "builtin_schemas/vendor/compose-spec.json").read_text())
    (tree,) = loaded(FILES / "compose.yaml")
    jsonschema.validate(tree, schema)
    mounted = [volume.split(":")[0] for service in tree["services"].values() for volume in service["volumes"]]
    own = [name for name in mounted if name.startswith("./")]
    assert len(own) > 4
    assert [name for name in own if not (FILES / name).exists()] == []
    assert {name for name in mounted if name[0] not in "./$"} == set(tree["volumes"])
    (watched,) = loaded(FILES / "compose/prometheus.yaml")[0]["scrape_configs"][0]["static_configs"]
    http = read_broker(FILES / "compose/broker.yaml").listen.http.rpartition(":")[2]
    assert watched["targets"] == [f"broker:{http}"]
    (source,) = loaded(FILES / "grafana/provisioning/datasources/prometheus.yaml")[0]["datasources"]
    assert source["url"] == "$PROMETHEUS_URL"
    assert tree["services"]["grafana"]["environment"]["PROMETHEUS_URL"] == "http://prometheus:9090"
    (provider,) = loaded(FILES / "grafana/provisioning/dashboards/streampack.yaml")[0]["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in tree["services"]["grafana"]["volumes"]
    assert "./prometheus/alerts.yaml:/etc/prometheus/alerts.yaml:ro" in tree["services"]["prometheus"]["volumes"]


def test_a_dockerfile_copies_what_an_installation_needs() -> None:
    run_tool(program("hadolint"), FILES / "docker/Dockerfile")
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert [name for name in allowed if not (ROOT / name).exists()] == []
    project = (ROOT / "pyproject.toml").read_text()
    needed = {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "streampack", "services", "deploy"}
    assert needed | {"constraints.txt"} == set(allowed)
    assert all(f'"{name}"' in project for name in ("README.md", "LICENSE", "NOTICE"))


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    folder = exported("systemd", tmp_path, "--prefix", BIN.parent)
    units = sorted(folder.glob("*.service"))
    assert len(units) == 3
    analyze = program("systemd-analyze")
    run_tool(analyze, "verify", "--man=no", *units)
    for unit in units:
        words = [analyze, "security", "--offline=true", "--threshold=20", str(unit)]
        assert subprocess.run(words, capture_output=True).returncode == 0, "more exposed than 2.0 of 10"


def test_shellcheck_has_nothing_to_say_of_the_scripts() -> None:
    scripts = sorted((FILES / "slurm").glob("*.sbatch"))
    assert len(scripts) == 2
    run_tool(program("shellcheck"), *scripts)
