"""Settings of broker.yaml and producer.yaml that do not work in an exported place, each with the line to write there.

A Pod, container or unit sees only the folders that its manifest names, and an image has only the packages that it was
built with. Nothing in the user's files tells; without a warning, the first start would fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from streampack.config.config_files import read_broker, read_producer
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig
from streampack.tokenizers.base import TokenizerSettings
from streampack_services.amounts import size_text
from streampack_services.export_limits import RELAY_BYTES, largest_step

CONTAINERS = ("k8s", "compose")
"""Places where the broker does not see the user's folders."""
EXAMPLE_STREAM = "web"
KEYS = "/etc/streampack-keys"
"""Folder of the keys in the exported Pods."""
_HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")
"""Folders that a unit does not see: ProtectHome=, PrivateTmp=."""
_PATTERN = frozenset("*?[{")


class Files(NamedTuple):
    """The paths of the user's files for an export, and their contents; None for the example's."""

    config: Path | None = None
    produce: Path | None = None
    broker: BrokerConfig | None = None
    producer: ProducerConfig | None = None

    @classmethod
    def read(cls, config: Path | None, produce: Path | None) -> Files:
        """Read both files. Raises ConfigError."""
        broker = None if config is None else read_broker(config)
        return cls(config, produce, broker, None if produce is None else read_producer(produce))


def warnings(place: str, files: Files, run: str) -> Iterator[str]:
    """Yield what will not work in ``place``, with what to write; ``run`` is the exported run's name."""
    if files.broker is not None and files.broker.standby is not None and place != "systemd":
        with_one = {"k8s": "only the folder standby has one", "slurm": "the folder standby has its own"}
        yield (
            f"{files.config} has a standby, whose addresses and arbiter are left out: "
            f"{with_one.get(place, 'this place has one host')}"
        )
    yield from _streams(place, files)
    if files.producer is not None:
        for key, path in (*named_files(files.producer), *key_file(files.producer)):
            if lines := _unseen(place, key, path, run):
                yield f"{files.produce}: {key} is {path}, which {lines}"
        if place in CONTAINERS:
            for key, module in _modules(files.producer):
                yield (
                    f"{files.produce}: {key} is in the Python module {module}, which the image does not have. Write at "
                    f"the end of its Dockerfile: COPY {module.partition('.')[0]}* /var/lib/streampack/"
                )
        if place == "k8s" and (more := extras(files.producer)):
            yield (
                f"{files.produce} needs {', '.join(more)}, which the default image does not have. Build it with "
                f"--build-arg STREAMPACK='streampack[service,{','.join(more)}] @ file:///src'"
            )
    if files.broker is not None:
        listen = files.broker.listen
        for key, named in (("listen.keys", listen.keys), ("listen.token_file", listen.token_file)):
            if named is not None and (lines := _unseen(place, key, named, run)):
                yield f"{files.config}: {key} is {named}, which {lines}"
        if place != "slurm" and (step := largest_step(files.broker)) > RELAY_BYTES:
            yield (
                f"a step of {files.config} has up to {size_text(step)}, but relays have --memory 2GiB. If the ranks of "
                "one host read more of a step than that, raise --memory, and the limit to 1 GiB more"
            )


def _streams(place: str, files: Files) -> Iterator[str]:
    """Yield a warning about streams that only one of both files has, and one about the producers of the example."""
    file = files.produce or "the producer.yaml of the example"
    sent = [EXAMPLE_STREAM] if files.producer is None else list(files.producer.streams)
    config = files.config or "the broker.yaml of the example"
    pushed = {EXAMPLE_STREAM: False}
    if files.broker is not None:
        pushed = {name: stream.pushed for name, stream in files.broker.streams.items()}
        if all(pushed.values()) and files.producer is None:
            stop = {
                "k8s": "Remove producers.yaml from resources in standalone/kustomization.yaml, and give the Pods that "
                       "push the label streampack: producer",
                "compose": "Run docker compose up --scale producer=0",
                "systemd": "Do not enable streampack-producer@",
            }.get(place, "Remove the producers from the scripts")  # fmt: skip
            yield f"programs push every stream of {config}, so the exported producers have nothing to send. {stop}"
            return
        if files.producer is None and EXAMPLE_STREAM in pushed:
            yield (
                f"the producer.yaml of the example sends the stream {EXAMPLE_STREAM}, since --produce names no file. "
                "Pass your own with -p"
            )
    for name in sent:
        if pushed.get(name):
            yield f"{file} has a source for the stream {name}, which programs push ({config}). Remove one of both"
        elif name not in pushed:
            yield (
                f"{file} sends the stream {name}, which {config} does not have. Write there, under streams: "
                f"{name}: {{}}"
            )
    for name, is_pushed in pushed.items():
        if name not in sent and not is_pushed:
            yield (
                f"no producer sends the stream {name} of {config}, so the broker waits for it. Write in producer.yaml, "
                f'under streams: {name}: {{source: jsonl, shards: "/data/{name}/*.jsonl"}}'
            )


def named_files(config: ProducerConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of every file of data or a tokenizer that a producer.yaml names."""
    for name, stream in config.streams.items():
        if stream.source != "python":
            shards = [stream.shards] if isinstance(stream.shards, str) else stream.shards or []
            yield from ((f"streams.{name}.shards", path) for path in shards)
            yield from ((f"streams.{name}.path", path) for path in (stream.path,) if path)
    for key, tokenizer in _tokenizers(config):
        if tokenizer.file:
            yield f"{key}.file", tokenizer.file


def key_file(config: ProducerConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of the key file that a producer.yaml names, if it does."""
    if config.key_file:
        yield "key_file", config.key_file


def extras(config: ProducerConfig) -> list[str]:
    """Return the extras of the package that a producer.yaml needs beyond those of the service."""
    paths = [path for _, path in named_files(config)]
    needed = {
        "tokenizers": any(tokenizer.file for _, tokenizer in _tokenizers(config)),
        "parquet": any(stream.source in ("parquet", "huggingface") for stream in config.streams.values()),
        "remote": any("://" in path and not path.startswith("file://") for path in paths),
        "zstd": any(path.endswith(".zst") for path in paths),
    }
    return [name for name, is_needed in needed.items() if is_needed]


def _tokenizers(config: ProducerConfig) -> Iterator[tuple[str, TokenizerSettings]]:
    """Yield (key, settings) of every tokenizer that a producer.yaml names."""
    yield "tokenizer", config.tokenizer
    for name, stream in config.streams.items():
        if stream.tokenizer is not None:
            yield f"streams.{name}.tokenizer", stream.tokenizer


def _modules(config: ProducerConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, module) of every Python module of the user that a producer.yaml names."""
    for name, stream in config.streams.items():
        if stream.source == "python" and stream.path:
            yield f"streams.{name}.path", stream.path.partition(":")[0]
    for key, tokenizer in _tokenizers(config):
        if tokenizer.name and ":" in tokenizer.name:
            yield f"{key}.name", tokenizer.name.partition(":")[0]


def _unseen(place: str, key: str, path: str, run: str) -> str:
    """Return why the process of ``place`` that reads ``path`` does not see it, and what to write; empty if it does."""
    path = path.removeprefix("file://")
    folder = _folder(path)
    if place == "k8s" and key == "listen.keys":
        write = "" if path == KEYS else f"Write keys: {KEYS}. "
        return f"must be the Secrets of components/keys. {write}Create them as its kustomization.yaml says, then apply"
    if place == "k8s" and key == "listen.token_file":
        token = f"{KEYS}/http.token"
        run_this = f"kubectl create secret generic streampack-http --from-file=http.token={path}"
        return "" if path == token else f"the Pods do not have. Write token_file: {token}, and run {run_this}"
    if place == "k8s" and key == "key_file":
        return (
            "" if path.startswith(f"{KEYS}/") else "the Pods do not have. Remove the line: they take the Secret's key"
        )
    if place == "compose" and key in ("listen.keys", "listen.token_file", "key_file"):
        service = "producer" if key == "key_file" else "broker"
        return (
            f"the container does not have. Write in compose.yaml, under volumes of {service}: - {path}:{path}:ro. Its "
            "user is 10001: let the files belong to root and group 10001, with mode 0440"
        )
    if place == "systemd" and key in ("listen.keys", "listen.token_file", "key_file"):
        return _credentials(key, path, run)
    if "://" in path:
        return ""
    if place == "k8s" and not f"{path}/".startswith(("/data/", "/usr/")):
        return (
            "is outside /data, where the Pods have your claim. Write a path below /data, or under volumeMounts of the "
            f"producers: - {{name: data, mountPath: {folder}, readOnly: true}}"
        )
    if place == "compose" and not f"{path}/".startswith(("/data/", "/usr/")):
        return (
            "is outside /data, where the container has the folder DATA. Write a path below /data, or in compose.yaml, "
            f"under volumes of producer: - {folder}:{folder}:ro"
        )
    if place == "systemd" and path.startswith(_HIDDEN):
        home = "" if path.startswith(("/tmp/", "/var/tmp/")) else "ProtectHome=tmpfs and "
        return (
            f"the unit hides. Write into systemctl edit streampack-producer@{run}, under [Service]: {home}"
            f"BindReadOnlyPaths={folder}"
        )
    return ""


def _credentials(key: str, path: str, run: str) -> str:
    """Return why a unit cannot read a secret, and the lines that pass it as a credential; empty if they are there."""
    unit = f"streampack-{'producer' if key == 'key_file' else 'broker'}@{run}"
    folder = f"/run/credentials/{unit}.service"
    if path.startswith(folder):
        return ""
    own, files = {
        "listen.keys": (f"keys: {folder}", [f"{name}:{path}/{name}" for name in ("broker.key", "allowed.yaml")]),
        "listen.token_file": (f"token_file: {folder}/http.token", [f"http.token:{path}"]),
        "key_file": (f"key_file: {folder}/producers.key", [f"producers.key:{path}"]),
    }[key]
    lines = " and ".join(f"LoadCredential={file}" for file in files)
    return f"the unit's user cannot read. Write {own}, and into systemctl edit {unit}, under [Service]: {lines}"


def _folder(path: str) -> str:
    """Return the folder of a path or pattern: the part before its first pattern, without a file's name."""
    parts = PurePosixPath(path).parts
    plain = parts[: next((at for at, part in enumerate(parts) if _PATTERN & set(part)), len(parts))]
    whole = PurePosixPath(*plain)
    return str(whole.parent if len(plain) == len(parts) and whole.suffix else whole)
