"""``streampack export``: what ``deploy/`` has for a place to run in, written to a folder with names filled in.

The files are usable as they lie, with defaults that stand for what is to be filled in: filling in is to replace these
words. A user's broker.yaml takes the place of the example's but for the keys that say where things are (``_WHERE``),
which are the place's own. Knows the files by their names alone, but for two that are made from others: what
Prometheus' operator wants is the alerts in an envelope, and what kustomize mounts must lie below its folder.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import yaml

from streampack.config.config_files import read_broker, read_producer
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig
from streampack.config.typed_yaml import parse_tree, read_tree
from streampack.errors import UserError
from streampack.version import __version__
from streampack_services.broker.memory_peak import peak
from streampack_services.broker.memory_plan import plan

IMAGE, RUN, EXAMPLE_STREAM = "streampack:latest", "my-run", "web"
FILES = Path(__file__).parent / "deploy"
COMPILING_BYTES = 200 << 20
"""More than its peak a broker takes while it compiles its kernels: 350 MiB in all, measured, before anything else."""
_WHERE = {"broker.yaml": ("listen", "rendezvous", "state_dir"), "producer.yaml": ("broker",)}
_WORDS = {
    "image": (r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "letters, digits and . _ - / : @"),
    "run": (
        r"[A-Za-z0-9][A-Za-z0-9._-]*",
        "letters, digits and . _ -: units and jobs are named after it",
    ),
    "namespace": (r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", "small letters, digits and -"),
    "prefix": (r"(/[A-Za-z0-9._-]+)+/?", "a whole path of letters, digits and . _ - as /opt/streampack"),
}
"""What may be filled in: it comes to stand in YAML, in units and in scripts, and is quoted in none of them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere to run: which folders and files of ``deploy/`` it needs, and what to do with them then.

    What lies in ``top`` comes to the top of the folder. ``options``: those that mean something there.
    """

    parts: tuple[str, ...]
    then: str
    top: str
    options: tuple[str, ...] = ()


_RUN = ("run", "config", "produce")
PLACES: dict[str, Place] = {
    "docker": Place(
        ("docker",), "docker build -t {image} -f {dir}/Dockerfile {context}", "docker", ("image",)
    ),
    "compose": Place(
        ("compose.yaml", "compose", "docker", "prometheus", "grafana", "RUNBOOK.md"),
        "docker compose -f {dir}/compose.yaml up --build", "", ("image", *_RUN),
    ),
    "k8s": Place(
        ("kubernetes", "RUNBOOK.md"),
        "kubectl apply -k {dir}/standalone, or sidecar with your Job in its job.yaml",
        "kubernetes", ("image", "namespace", *_RUN),
    ),
    "systemd": Place(
        ("systemd",),
        "copy *.service to /etc/systemd/system, *.yaml to /etc/streampack/{run}, and systemctl enable --now "
        "streampack-broker@{run}", "systemd", ("prefix", *_RUN),
    ),
    "slurm": Place(
        ("slurm",), "cd {dir} && sbatch run.sbatch torchrun train.py", "slurm", ("prefix", *_RUN),
    ),
    "dashboards": Place(
        ("grafana",),
        "mount provisioning at /etc/grafana/provisioning and dashboards at /var/lib/grafana/dashboards, with "
        "PROMETHEUS_URL; or import one by hand", "grafana",
    ),
    "alerts": Place(
        ("prometheus", "RUNBOOK.md"),
        "name {dir}/alerts.yaml in rule_files of prometheus.yml", "prometheus",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """What is filled in; None for what deploy/ has. ``prefix``: the virtual environment that streampack is in."""

    image: str | None = None
    run: str | None = None
    namespace: str | None = None
    prefix: str | None = None
    config: Path | None = None
    produce: Path | None = None


class Exported(NamedTuple):
    """The files written, what to do next, and what of them will not work there: a line each."""

    files: list[Path]
    next: str
    warnings: list[str]


def export(name: str, folder: Path, options: Options, *, force: bool = False) -> Exported:
    """Write the files of a place. Raises UserError, having written none; ConfigError for a configuration that cannot
    be.
    """
    place = PLACES.get(name)
    if place is None:
        raise UserError(f"got {name!r}, expected one of {', '.join(PLACES)}")
    if options.config is not None and options.run is None and "run" in place.options:
        options = replace(options, run=read_broker(options.config).run)
    _check(name, place, options)
    image = _image_of(folder / ("docker" if name == "compose" else ""))
    words = _words(options) | image.words
    files = {folder / path: text for path, text in _files(place, options, words)}
    there = [str(path) for path in files if path.exists()]
    if there and not force:
        raise UserError(f"{there[0]}: got a file that is there already, expected none: another folder, or --force")
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}: choose another folder") from None
    said = {"dir": folder, "context": image.context, "run": options.run or RUN, "image": options.image or IMAGE}
    return Exported(list(files), place.then.format(**said), list(_warnings(place, options)))


def _check(name: str, place: Place, options: Options) -> None:
    for key, value in asdict(options).items():
        if value is not None and key not in place.options:
            known = ", ".join(f"--{each}" for each in place.options) or "no option"
            raise UserError(f"--{key}: means nothing to {name}, expected {known}")
        pattern, expected = _WORDS.get(key, ("", ""))
        if isinstance(value, str) and not re.fullmatch(pattern, value):
            raise UserError(f"--{key}: got {value!r}, expected {expected}")
    if options.produce is not None:
        for key, path in _paths(read_producer(options.produce)):
            if not path.startswith("/") and "://" not in path:
                raise UserError(
                    f"{options.produce}: {key}: got the relative path {path}, expected an absolute one: producers run "
                    "in another folder there"
                )


def _warnings(place: Place, options: Options) -> Iterator[str]:
    """Streams that the broker does not know."""
    streams = set(read_broker(options.config).streams) if options.config is not None else {EXAMPLE_STREAM}
    producer = read_producer(options.produce) if options.produce is not None else None
    sent = {EXAMPLE_STREAM} if producer is None else set(producer.streams)
    if "produce" in place.options and not sent <= streams:
        whose = "that of an example" if producer is None else str(options.produce)
        names = ", ".join(sorted(streams))
        yield f"producer.yaml is {whose}: its streams are {', '.join(sorted(sent))}, and broker.yaml's are {names}"


def _paths(config: ProducerConfig) -> Iterator[tuple[str, str]]:
    """What producers read, by the key that names it."""
    tokenizers = {"tokenizer": config.tokenizer}
    for name, stream in config.streams.items():
        if stream.tokenizer is not None:
            tokenizers[f"streams.{name}.tokenizer"] = stream.tokenizer
        if stream.source != "python":
            shards = [stream.shards] if isinstance(stream.shards, str) else stream.shards or []
            yield from ((f"streams.{name}.shards", path) for path in shards)
            yield from ((f"streams.{name}.path", path) for path in (stream.path,) if path)
    yield from ((f"{key}.file", each.file) for key, each in tokenizers.items() if each.file)


def _files(place: Place, options: Options, words: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    for part in place.parts:
        found = FILES / part
        for path in sorted(found.rglob("*")) if found.is_dir() else [found]:
            if path.is_file():
                base = FILES / place.top
                yield path.relative_to(base if path.is_relative_to(base) else FILES), _configured(path, options, words)
    if place.top == "kubernetes":
        monitoring = Path("components/monitoring")
        yield monitoring / "prometheus-rule.yaml", _rule((FILES / "prometheus/alerts.yaml").read_text())
        for path in sorted((FILES / "grafana/dashboards").glob("*.json")):
            yield monitoring / path.name, path.read_text()


def _rule(alerts: str) -> str:
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule"}
    name = {"metadata": {"name": "streampack", "labels": {"app.kubernetes.io/name": "streampack"}}}
    return yaml.safe_dump(head | name, sort_keys=False) + "spec:\n" + textwrap.indent(alerts, "  ")


def _configured(path: Path, options: Options, words: Mapping[str, str]) -> str:
    """The text of a file, filled in; of a configuration the user's own, of which no word is replaced, at this place."""
    text = _filled(path.read_text(), words)
    read, given = {
        "broker.yaml": (read_broker, options.config), "producer.yaml": (read_producer, options.produce),
    }.get(path.name, (None, None))  # fmt: skip
    if read is None or given is None:
        return text
    read(given)
    own = {key: value for key, value in parse_tree(text, path).items() if key in _WHERE[path.name]}
    tree = {key: value for key, value in read_tree(given).items() if key == "listen" or key not in _WHERE[path.name]}
    tree |= own | ({"listen": tree.get("listen", {}) | own["listen"]} if "listen" in own else {})  # its token, its keys
    if path.name == "broker.yaml" and options.run is not None:
        tree["run"] = options.run
    said = f"# {given.name}, but for what says where things are here: {', '.join(own)}.\n"
    return said + yaml.safe_dump(tree, sort_keys=False, width=110)


def _words(options: Options) -> dict[str, str]:
    """What is to be filled in, by the words that stand for it in deploy/."""
    found = {IMAGE: options.image, RUN: options.run, "/opt/streampack": options.prefix and options.prefix.rstrip("/")}
    if options.namespace is not None:
        found["namespace: default"] = f"namespace: {options.namespace}"
    if options.config is not None:
        limit = limit_gib(read_broker(options.config))
        found |= {"memory: 3Gi": f"memory: {limit}Gi", "mem_limit: 3g": f"mem_limit: {limit}g"}
    return {word: text for word, text in found.items() if text is not None}


def _filled(text: str, words: Mapping[str, str]) -> str:
    """``text`` with each of the words replaced, once: what was filled in is not looked at again."""
    return re.sub("|".join(map(re.escape, words)), lambda word: words[word[0]], text) if words else text


class _Image(NamedTuple):
    context: Path
    words: dict[str, str]


def _image_of(folder: Path) -> _Image:
    """How an image is built of what is installed here, with the Dockerfile that is to lie in ``folder``: of the
    checkout or the wheel that it was installed from (PEP 610), else of this version from the package index.
    """
    installed = next(iter(metadata.distributions(name="streampack")), None)
    url = json.loads((installed and installed.read_text("direct_url.json")) or "{}").get("url", "")
    file = Path(unquote(urlsplit(url).path)) if url.startswith("file://") else None
    context = folder if file is None else file if file.is_dir() else file.parent
    words = {"context: .., dockerfile: deploy/docker/Dockerfile":
             f"context: {context.absolute()}, dockerfile: {folder.absolute() / 'Dockerfile'}"}  # fmt: skip
    if file is None:
        words["streampack[service] @ file:///src"] = f"streampack[service]=={__version__}"
    elif not file.is_dir():
        words["streampack[service] @ file:///src"] = f"streampack[service] @ file:///src/{file.name}"
    return _Image(context, words)


def limit_gib(config: BrokerConfig) -> int:
    """What a broker's container must be allowed, in GiB: its peak at the longest samples, and what compiling takes."""
    most = peak(config, plan(config), mean_tokens=None).total + COMPILING_BYTES
    return -(-most // (1 << 30))
