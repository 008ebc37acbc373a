"""``streampack export``: copy the files of ``deploy/`` for one place to run, with the user's names filled in.

The files work unchanged, with default names such as ``my-run``; these words are replaced by the user's. A user's
broker.yaml replaces the example's, except for the keys with addresses and folders (``_WHERE``), which stay the place's.
Numbers follow from the user's files (``export_limits``); settings that will not work there are reported
(``export_warnings``). Most files are copied by name. Two kinds are made from others: alerts as a PrometheusRule for
Prometheus' operator, and copies of the dashboards. Kustomize needs the copies, because it mounts only files below its
folder.
"""

from __future__ import annotations

import itertools
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
from streampack.config.typed_yaml import parse_tree, read_tree
from streampack.errors import UserError
from streampack.version import __version__
from streampack_services.amounts import counted
from streampack_services.export_limits import numbers
from streampack_services.export_warnings import CONTAINERS, Files, extras, key_file, named_files, warnings

IMAGE, RUN = "streampack:latest", "my-run"
FILES = Path(__file__).parent / "deploy"
_WHERE = {"broker.yaml": ("listen", "rendezvous", "state_dir", "standby"), "producer.yaml": ("broker",)}
_KEPT = {"listen": ("token_file", "keys"), "standby": ("on_loss", "takeover_s")}
"""Keys of ``_WHERE``'s sections that stay the user's."""
_WORDS = {
    "image": (r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "letters, digits and . _ - / : @"),
    "run": (
        r"[A-Za-z0-9][A-Za-z0-9._-]*",
        "letters, digits and . _ - because units and jobs are named after the run",
    ),
    "namespace": (r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", "lowercase letters, digits and -"),
    "prefix": (r"(/[A-Za-z0-9._-]+)+/?", "an absolute path of letters, digits and . _ - such as /opt/streampack"),
}
"""By option, the pattern that its value must match, and its description for an error.

Values are put into YAML, systemd units and scripts without quotes, so only safe characters are allowed.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A place to run streampack in.

    ``parts``: folders and files of ``deploy/`` to write. ``then``: what the user must do with them. ``top``: folder of
    ``deploy/`` whose files go to the top of the target folder. ``options``: the options that this place has.
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
        "docker compose -f {dir}/compose.yaml up --build; with DATA=FOLDER in front, producers read FOLDER at /data",
        "", ("image", *_RUN),
    ),
    "k8s": Place(
        ("kubernetes", "RUNBOOK.md"),
        "kubectl apply -k {dir}/standalone, or {dir}/standby for two brokers. For a sidecar, put your Job into "
        "{dir}/sidecar/job.yaml "
        "and apply {dir}/sidecar. Trainers in several Pods: put your Job into {dir}/trainers/job.yaml. To apply a "
        "changed Job or producer.yaml, first run kubectl delete job NAME, such as streampack-producers",
        "kubernetes", ("image", "namespace", *_RUN),
    ),
    "systemd": Place(
        ("systemd",),
        "copy *.service to /etc/systemd/system and *.yaml to /etc/streampack/{run}, then run "
        "systemctl enable --now streampack-broker@{run} streampack-producer@{run}", "systemd", ("prefix", *_RUN),
    ),
    "slurm": Place(
        ("slurm",),
        "copy train.py to {dir}, set the #SBATCH lines for your cluster, then cd {dir} && sbatch run.sbatch torchrun "
        "train.py", "slurm", ("prefix", *_RUN),
    ),
    "dashboards": Place(
        ("grafana",),
        "mount provisioning at /etc/grafana/provisioning and dashboards at /var/lib/grafana/dashboards and set "
        "PROMETHEUS_URL; or import a dashboard by hand", "grafana",
    ),
    "alerts": Place(
        ("prometheus", "RUNBOOK.md"),
        "add {dir}/alerts.yaml to rule_files in prometheus.yml", "prometheus",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """The user's values to fill in; None keeps the default of deploy/.

    ``prefix``: the virtual environment of streampack on the hosts. ``config``, ``produce``: the user's broker.yaml and
    producer.yaml.
    """

    image: str | None = None
    run: str | None = None
    namespace: str | None = None
    prefix: str | None = None
    config: Path | None = None
    produce: Path | None = None


class Exported(NamedTuple):
    """The written ``files``, what to do ``next``, and ``warnings`` about settings that will not work."""

    files: list[Path]
    next: str
    warnings: list[str]


def export(name: str, folder: Path, options: Options, *, force: bool = False) -> Exported:
    """Write the files of the place ``name`` to ``folder``; ``force``: overwrite other files, and keep each as NAME.old.

    Raises UserError for wrong options or files with other contents, ConfigError for a wrong configuration; both before
    anything is written. Raises UserError if a file cannot be written.
    """
    place = PLACES.get(name)
    if place is None:
        raise UserError(f"got {name!r}, expected one of {', '.join(PLACES)}")
    read = Files.read(options.config, options.produce) if "config" in place.options else Files()
    if read.broker is not None and options.run is None:
        options = replace(options, run=read.broker.run)
    _check_names(name, place, options)
    _check_paths(name, read)
    more = extras(read.producer) if read.producer is not None else []
    image = _image_of(folder / ("docker" if name == "compose" else ""), more)
    words = _words(options, read) | image.words
    files = {folder / path: text for path, text in _files(place, options, words, read)}
    others = [path for path, text in files.items() if path.exists() and not _has(path, text)]
    if others and not force:
        exist = "exist" if others[1:] else "exists"
        raise UserError(
            f"{_first(others)} {exist} already. Choose another folder, or overwrite with --force, which keeps what is "
            "there as NAME.old."
        )
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path in others:
                path.rename(_old(path))
            path.write_text(text)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}. Choose another folder.") from None
    run = options.run or RUN
    names = {"dir": folder, "context": image.context, "run": run, "image": options.image or IMAGE}
    faults = warnings(name, read, run) if "config" in place.options else ()
    kept = [f"{_first(others)} had other contents, kept as NAME.old: copy your changes from there"] if others else []
    return Exported(list(files), place.then.format(**names), [*kept, *faults])


def _first(paths: list[Path]) -> str:
    """Return the first path, and the number of the others."""
    return f"{paths[0]}" + (f" and {counted(len(paths) - 1, 'more file')}" if paths[1:] else "")


def _has(path: Path, text: str) -> bool:
    """Return whether a file that exists has this text."""
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False


def _old(path: Path) -> Path:
    """Return a path beside ``path`` for its old contents, at which no file exists."""
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def _check_names(name: str, place: Place, options: Options) -> None:
    """Raise UserError for an option that the place does not have, or a wrong value."""
    for key, value in asdict(options).items():
        if value is not None and key not in place.options:
            options_text = ", ".join(f"--{option}" for option in place.options) or "no option"
            raise UserError(f"The export {name} does not have the option --{key}. Its options are: {options_text}.")
        pattern, expected = _WORDS.get(key, ("", ""))
        if isinstance(value, str) and not re.fullmatch(pattern, value):
            raise UserError(f"--{key}: got {value!r}, expected {expected}")


def _check_paths(name: str, read: Files) -> None:
    """Raise UserError for a relative path in the user's files, if the exported process runs in another folder."""
    if read.producer is not None:
        for key, path in (*named_files(read.producer), *key_file(read.producer)):
            if not path.startswith("/") and "://" not in path:
                raise UserError(
                    f"{read.produce}: {key} is the relative path {path}, but exported producers run elsewhere. "
                    "Use an absolute path."
                )
    if read.broker is not None and name in CONTAINERS:
        listen = read.broker.listen
        for key, named in (("listen.keys", listen.keys), ("listen.token_file", listen.token_file)):
            if named is not None and not named.startswith("/"):
                raise UserError(
                    f"{read.config}: {key} is the relative path {named}, but the exported broker runs in a "
                    "container. Use an absolute path, and mount it there."
                )


def _files(place: Place, options: Options, words: dict[str, str], read: Files) -> Iterator[tuple[Path, str]]:
    """Yield (path in the target folder, text) of every file of a place, with names filled in."""
    filled = [numbers(read.broker, read.producer, in_trainers_pod=in_pod) | words for in_pod in (False, True)]
    for part in place.parts:
        source = FILES / part
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file():
                base = FILES / place.top
                text = _configured(path, options, filled[path.parent.name == "sidecar"])
                yield path.relative_to(base if path.is_relative_to(base) else FILES), text
    if place.top == "kubernetes":
        monitoring = Path("components/monitoring")
        yield monitoring / "prometheus-rule.yaml", _rule((FILES / "prometheus/alerts.yaml").read_text())
        for path in sorted((FILES / "grafana/dashboards").glob("*.json")):
            yield monitoring / path.name, path.read_text()


def _rule(alerts: str) -> str:
    """Return the alerts, YAML, as a PrometheusRule for Prometheus' operator."""
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule"}
    name = {"metadata": {"name": "streampack", "labels": {"app.kubernetes.io/name": "streampack"}}}
    return yaml.safe_dump(head | name, sort_keys=False) + "spec:\n" + textwrap.indent(alerts, "  ")


def _configured(path: Path, options: Options, words: Mapping[str, str]) -> str:
    """Return the text of a file with names filled in; in place of a configuration, the user's own if there is one.

    A user's configuration keeps the addresses and folders of this place, and none of its words are replaced.
    """
    text = _filled(path.read_text(), words)
    read, config = {
        "broker.yaml": (read_broker, options.config), "producer.yaml": (read_producer, options.produce),
    }.get(path.name, (None, None))  # fmt: skip
    if read is None or config is None:
        return text
    read(config)
    whole = read_tree(config)
    own = {key: value for key, value in parse_tree(text, path).items() if key in _WHERE[path.name]}
    values = {key: value for key, value in whole.items() if key not in _WHERE[path.name]}
    for key, value in own.items():
        kept = whole.get(key)
        users = {name: kept[name] for name in _KEPT.get(key, ()) if name in kept} if isinstance(kept, dict) else {}
        values[key] = users | value if users else value
    if path.parent.name == "systemd" and "standby" in whole:
        values["standby"] = whole["standby"]
    if path.name == "broker.yaml" and options.run is not None:
        values["run"] = options.run
    head = f"# This is a copy of {config.name} with other values for: {', '.join(own)}.\n"
    return head + yaml.safe_dump(values, sort_keys=False, width=110)


def _words(options: Options, read: Files) -> dict[str, str]:
    """Return the texts to fill in, by the words of deploy/ that they replace."""
    texts = {IMAGE: options.image, RUN: options.run, "/opt/streampack": options.prefix and options.prefix.rstrip("/")}
    if options.namespace is not None:
        texts["namespace: default"] = f"namespace: {options.namespace}"
    if read.broker is not None and read.broker.listen.keys is not None:
        texts["# - ../components/keys"] = "- ../components/keys"
    return {word: text for word, text in texts.items() if text is not None}


def _filled(text: str, words: Mapping[str, str]) -> str:
    """Return ``text`` with all ``words`` replaced in one pass, so that no inserted text is replaced again."""
    return re.sub("|".join(map(re.escape, words)), lambda word: words[word[0]], text) if words else text


class _Image(NamedTuple):
    """The folder in which to build the container image, and the texts to fill in for it, by the words they replace."""

    context: Path
    words: dict[str, str]


def _image_of(folder: Path, more: list[str]) -> _Image:
    """Return the folder and texts to build an image of the installed streampack, with a Dockerfile in ``folder``.

    ``more`` are the package's extras that the image needs beside ``service``.

    The image gets the checkout or wheel that streampack was installed from (PEP 610), else the package of this version
    from the package index.
    """
    installed = next(iter(metadata.distributions(name="streampack")), None)
    url = json.loads((installed and installed.read_text("direct_url.json")) or "{}").get("url", "")
    file = Path(unquote(urlsplit(url).path)) if url.startswith("file://") else None
    context = folder if file is None else file if file.is_dir() else file.parent
    words = {"context: .., dockerfile: deploy/docker/Dockerfile":
             f"context: {context.absolute()}, dockerfile: {folder.absolute() / 'Dockerfile'}"}  # fmt: skip
    package = f"streampack[{','.join(['service', *more])}]"
    source = f"{package} @ file:///src"
    if file is None:
        source = f"{package}=={__version__}"
    elif not file.is_dir():
        source += f"/{file.name}"
    words["streampack[service] @ file:///src"] = source
    return _Image(context, words)
