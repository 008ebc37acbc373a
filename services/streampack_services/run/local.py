"""``streampack.local``: a broker and a producer in threads, and the client that reads from them.

The classes are those of the daemons, joined by Unix sockets in a temporary folder. This module does not change the
program's signals, logging or working folder. The threads hold no reference to the loader, so they end when the loader
is deleted or the interpreter exits. The copy of the loader in a forked child ends nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import fields, replace

from streampack.client.connect import Client, connect
from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.service_settings import Limits
from streampack.config.stream_settings import StreamSettings
from streampack.config.typed_yaml import convert
from streampack.core.model.fields import LABELS, LOSS_MASK
from streampack.core.model.keys.keyword_arguments import arguments_of, defaults_of, unexpected
from streampack.core.model.keys.planning_keys import BatchKeys, PlanningKeys, RunKeys
from streampack.core.model.keys.stream_keys import SamplePolicies
from streampack.core.model.mesh import Mesh
from streampack.errors import InternalError, StreampackError, UserError
from streampack.kernels import background
from streampack.local import LocalArguments, LocalLoader, LocalOptions
from streampack.media.media import Media
from streampack.producer.first_rows import NOT_APPLIED, ROWS_AT_START, bring_mask, passed_on
from streampack.producer.loop import ProducerLoop
from streampack.sources import Source, SourceSettings, TokenizerSettings, open_source, open_tokenizer
from streampack.sources.in_memory import InMemory
from streampack.sources.settings import KEYS, check_settings
from streampack.sources.tables import refuse_columns, refuse_columns_as_streams, refuse_tables
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.callable_tokenizer import CallableTokenizer
from streampack.tokenizers.transformers_tokenizer import from_transformers
from streampack.views.formats import load_format
from streampack_services.broker.memory_plan import with_enough_memory
from streampack_services.broker.service import BrokerService
from streampack_services.http.http_guard import find_token
from streampack_services.http.server import HttpServer

log = logging.getLogger("streampack.local")

STOP_S = 10.0
"""Seconds that a thread has to end."""
_LONGEST_PATH = 100
"""Bytes of the longest path of a Unix socket."""
_BROKER_KEYS = {field.name for field in fields(StreamSettings)}
"""Settings of a stream that belong in broker.yaml; all others belong in producer.yaml."""
FORMAT_OF_EXTENSION = {
    ".tar": "webdataset", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".txt": "text",
    ".bin": "megatron", ".idx": "megatron",
}  # fmt: skip
"""Name of the source format, by the extension of a file."""


def open_local(source: Any, options: dict[str, Any]) -> LocalLoader[Any]:
    """Start a broker, a producer and a client for ``source``, and return the loader.

    ``options``: keyword arguments of ``local``. Raises UserError or ConfigError for wrong arguments, and SourceError
    for data that cannot be read.
    """
    defaults = defaults_of(LocalArguments)
    chosen = defaults | {name: value for name, value in options.items() if name in defaults}
    client = {name: value for name, value in options.items() if name not in defaults}
    for name in ("endpoint", "feed", "mesh", "key_file"):
        if name in client:
            raise UserError(
                f"Got {name}, but local() loads data for one rank only. Use 'streampack run' for several ranks."
            )
    http, weights = chosen["http"], chosen["weights"] or {}
    if not (http is None or isinstance(http, str)):
        raise UserError(f"http: got {http!r}, expected a string such as '127.0.0.1:7400', or None")
    _check_names(client)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        log.warning(
            "WORLD_SIZE is above 1, but each local loader reads all data; use 'streampack run' to divide the data"
        )
    by_stream = source if isinstance(source, Mapping) else {"data": source}
    refuse_columns_as_streams(by_stream, _is_files)
    if unknown := set(weights) - set(by_stream):
        raise UserError(f"weights: got {', '.join(sorted(unknown))}, expected streams: {', '.join(by_stream)}")
    of_streams = _keys(chosen, StreamSettings) | {key: chosen[key] for key in ("shuffle", "text_key", "tokens_key")}
    run = _settings_of_run(chosen)
    sources: dict[str, Source] = {}
    streams: dict[str, dict[str, Any]] = {}
    masked = list[bool]()
    for name, data in by_stream.items():
        sources[name], streams[name], has_mask = open_stream(name, data, of_streams, chosen["tokenizer"])
        masked.append(has_mask)
        if name in weights:
            streams[name]["weight"] = weights[name]
    if any(masked) and not {LOSS_MASK, LABELS} & set(run["fields"]):
        log.info("the rows say which tokens count in the loss; streampack.local declares the field loss_mask")
        run = {**run, "fields": {**run["fields"], LOSS_MASK: {"default": 1}}}
    for opened in sources.values():
        for name, keys in getattr(opened, "image_fields", {}).items():
            run = {**run, "fields": {name: dict(keys), **run["fields"]}}
    if "media" not in client and (folder := _processor(chosen["tokenizer"], by_stream.values())):
        client["media"] = Media(processor=folder)
    config = with_enough_memory(checked(convert({"run": "local", **run, "streams": streams}, BrokerConfig, "local")))
    with contextlib.ExitStack() as stack:
        reader, url = _start(stack, config, sources, http, client)
        return LocalLoader(reader, stack.pop_all(), url)


def _processor(tokenizer: Any, streams: Iterable[Any]) -> str | None:
    """Return the folder of the processor in the settings of tokenizers; None if there is none."""
    of_streams = [stream.get("tokenizer") for stream in streams if isinstance(stream, Mapping)]
    settings = [value for value in (tokenizer, *of_streams) if isinstance(value, Mapping)]
    return next((value["processor"] for value in settings if value.get("processor")), None)


def _settings_of_run(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of broker.yaml for arguments of ``local``, without the streams."""
    rules = _keys(chosen, PlanningKeys) | _keys(chosen, SamplePolicies)
    return {
        **_keys(chosen, RunKeys),
        "memory": chosen["memory"],
        "limits": _keys(chosen, Limits),
        "fields": chosen["fields"] or {},
        "stages": [dict(stage) for stage in chosen["stages"] or ()],
        "rules": rules | {
            "in_turn": chosen["in_turn"],
            "window": "auto" if chosen["window"] == "auto" else {"samples": chosen["window"]},
            "limits": dict(rules["limits"]) if rules["limits"] else None,
            "step": _keys(chosen, BatchKeys) | ({"packs": chosen["packs"]} if chosen["samples"] is None else {}),
            "align": {"sample": chosen["align"], "pack": chosen["align"]},
        },
    }  # fmt: skip


def _keys(chosen: Mapping[str, Any], struct: type[Struct]) -> dict[str, Any]:
    """Return the values of the arguments of ``local`` that are keys of ``struct``."""
    return {name: chosen[name] for name, argument in arguments_of(LocalArguments).items() if argument.struct is struct}


_MEANT = {
    **dict.fromkeys(("max_length", "max_seq_length", "max_seq_len", "seq_len"), ". Did you mean 'budget'?"),
    "batch_size": ". Did you mean 'samples', the number of samples in a step, or 'packs', the number of packs?",
    **dict.fromkeys(("epochs", "num_epochs"), ". Did you mean 'passes'?"),
    "drop_last": ". Did you mean tail='drop'?",
    "pin_memory": ". Did you mean 'device'?",
    **dict.fromkeys(("num_workers", "prefetch_factor"), ". Leave it out: threads read and pack ahead"),
    "collate_fn": ". Leave it out: a pack is a whole batch",
    **{
        key: f". Set it for a stream: {{'data': {{'source': rows, '{key}': '...'}}}}"
        for key in ("messages_key", "prompt_key", "completion_key")
    },
}
"""Advice for an argument that other loaders have, or that belongs to a stream, by its name."""


def _check_names(client: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that neither ``local`` nor ``connect`` has, before anything starts."""
    keys = ["source", "format", *defaults_of(LocalOptions)]
    for name in client:
        if name not in keys:
            meant = _MEANT.get(name)
            wrong = "local() got an unexpected keyword argument"
            raise TypeError(f"{wrong} {name!r}{meant}" if meant else unexpected(name, keys, "local"))


def open_stream(
    name: str, stream: Any, defaults: dict[str, Any], tokenizer: Any
) -> tuple[Source, dict[str, Any], bool]:
    """Open a stream's source; return it with the stream's settings for broker.yaml.

    Also return whether the first rows bring a loss mask; True for an iterator, whose first rows are not read.

    ``stream``: files, rows, or a dict of settings with its ``source``. ``defaults``: settings of every stream.
    """
    settings = {key: value for key, value in defaults.items() if value is not None}
    rows = stream
    if isinstance(stream, Mapping):
        settings |= stream
        rows = settings.pop("source", None)
    of_broker = {key: settings.pop(key) for key in list(settings) if key in _BROKER_KEYS}
    if settings.get("shuffle") is False:  # partitions take turns, so only one keeps the order of the files
        of_broker.setdefault("partitions", 1)
    if of_broker.get("passes", 1) != 1 and of_broker.get("repeat"):
        of_broker.pop("passes")
    try:
        if isinstance(stream, Mapping) and "source" not in stream:
            refuse_columns(stream)
        source, masked = _source(rows, settings, _tokenizer(settings.pop("tokenizer", tokenizer)))
        if isinstance(source, InMemory):
            of_broker["partitions"] = 1
            if of_broker.get("repeat") or of_broker.get("passes", 1) > 1:
                source.check_passes()
    except StreampackError as error:
        raise type(error)(f"{name}: {error}") from None
    return source, of_broker, masked


def _source(value: Any, settings: dict[str, Any], tokenizer: Tokenizer) -> tuple[Source, bool]:
    """Open a source, and return whether its first rows bring a loss mask.

    ``value``: a format's name (``settings`` then name the files), files, or rows in memory.
    """
    refuse_tables(value)
    if isinstance(value, str) and ("shards" in settings or "path" in settings):
        return _open(settings | {"source": value}, tokenizer)
    if isinstance(value, list | tuple) and not value:
        raise UserError(f"got an empty {type(value).__name__}, expected at least one file or row")
    if _is_files(value):
        listed = value if isinstance(value, list | tuple) else [value]
        files = [os.path.expanduser(os.fspath(file)) for file in listed]
        formats = {_format(file) for file in files}
        if len(formats) > 1:
            raise UserError(
                f"got files of the formats {', '.join(sorted(formats))}, expected one format. Make a stream of each "
                f"format"
            )
        return _open(settings | {"source": formats.pop(), "shards": files}, tokenizer)
    if isinstance(value, bytes) or (not isinstance(value, Iterable) and not hasattr(value, "__getitem__")):
        raise UserError(
            f"got a {type(value).__name__}, expected files or rows. A row is a text, a list of ids, or a dict of these"
        )
    rows = InMemory(value, _settings(settings | {"source": "python", "path": "rows in memory"}), tokenizer)
    names, fields = passed_on(NOT_APPLIED)
    return rows, rows.is_once or bring_mask(rows.peek(ROWS_AT_START, names, fields))


def _open(settings: dict[str, Any], tokenizer: Tokenizer) -> tuple[Source, bool]:
    """Open a source of files, and return whether its first rows bring a loss mask.

    Raises ConfigError if the rows are chats and no tokenizer is named. The first rows of ``source: python`` may take
    long, so they are not read.
    """
    checked = _settings(settings)
    source = open_source(checked, tokenizer)
    if checked.source == "python" or "messages_key" not in KEYS[checked.source]:
        return source, False
    names, fields = passed_on(NOT_APPLIED)
    return source, bring_mask(open_source(replace(checked, fields=names), tokenizer).peek(ROWS_AT_START, fields))


def _settings(keys: dict[str, Any]) -> SourceSettings:
    """Convert and check the settings of a source. Raises ConfigError."""
    settings = convert(keys, SourceSettings, "source")
    check_settings(settings)
    return settings


def _is_files(value: Any) -> bool:
    """Return whether ``value`` is a path, or a list of paths only; other strings in a list are texts.

    A string in a list is a path if it has the extension of a known format.
    """
    if isinstance(value, str | os.PathLike):
        return True
    listed = isinstance(value, list | tuple) and len(value) > 0
    return listed and all(
        isinstance(item, os.PathLike) or (isinstance(item, str) and _extension(item) in FORMAT_OF_EXTENSION)
        for item in value
    )


def _extension(path: str | os.PathLike[str]) -> str:
    """Return the extension of a file without its compression, in lower case: ``.jsonl`` for ``a.jsonl.gz?key=1``."""
    name = os.fspath(path).lower()
    name = (name.partition("?")[0] if name.startswith(("http://", "https://")) else name).rstrip("}")
    name = f"{name[:-4]}.tar" if name.endswith(".tgz") else name.removesuffix(".gz").removesuffix(".zst")
    return os.path.splitext(name)[1]


def _format(path: str) -> str:
    """Return the name of a file's format by its extension. Raises UserError for an unknown one."""
    name = "huggingface" if os.path.isdir(path) else FORMAT_OF_EXTENSION.get(_extension(path))
    if name is None:
        raise UserError(
            f"got {path[:200]!r}, expected a file that ends in {', '.join(FORMAT_OF_EXTENSION)}, or the folder of a "
            f"saved dataset. Name the format of other files in the stream's settings. Put a single text into a list."
        )
    return name


def _tokenizer(value: Any) -> Tokenizer:
    """Return the tokenizer for ``value``: None, a name, path, settings, callable, or tokenizer of transformers."""
    if value is None:
        return open_tokenizer(TokenizerSettings())
    if isinstance(value, str | os.PathLike):
        path = os.path.expanduser(os.fspath(value))
        is_file = isinstance(value, os.PathLike) or path.endswith(".json") or os.path.isdir(path)
        return open_tokenizer(TokenizerSettings(file=path) if is_file else TokenizerSettings(name=path))
    if isinstance(value, Mapping):
        return open_tokenizer(convert(dict(value), TokenizerSettings, "tokenizer"))
    if all(hasattr(value, name) for name in ("apply_chat_template", "chat_template", "save_pretrained")):
        return from_transformers(value)
    encode = getattr(value, "encode", value)
    if not callable(encode):
        raise UserError(f"tokenizer: got a {type(value).__name__}, expected a name, settings or a callable")

    def ids_of(text: str) -> object:
        """Return the token ids of a text; unwrap an encoding that has ``ids``."""
        encoding = encode(text)
        return getattr(encoding, "ids", encoding)

    if callable(chat := getattr(value, "encode_chat", None)):
        ids_of.encode_chat = chat  # type: ignore[attr-defined]
    return CallableTokenizer(getattr(value, "__qualname__", type(value).__qualname__), ids_of)


def _start(
    stack: contextlib.ExitStack, config: BrokerConfig, sources: dict[str, Source], http: str | None,
    client: dict[str, Any],
) -> tuple[Client, str | None]:  # fmt: skip
    """Start all threads; closing ``stack`` ends them, the last one first."""
    load_format(client.get("format"))
    background.start()
    folder = tempfile.mkdtemp(prefix="streampack-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    service = BrokerService(replace(config, listen=replace(config.listen, **endpoints_in(folder))))
    stack.callback(service.close)
    service.warm_up()
    clients: list[Client] = []

    def serve() -> None:
        """Run the broker; make the clients raise its error."""
        try:
            service.run()
        except Exception as error:
            _fail_clients(clients, error)

    def stop_broker() -> None:
        """Drain the broker twice, which stops it at once."""
        service.drain()
        service.drain()

    start_thread(stack, serve, stop_broker, "streampack-broker")
    url = None
    if http is not None:
        server = HttpServer(http, lambda: service.snapshot, token=find_token(), rank_page=service.rank_page)
        stack.callback(server.close)
        server.start()
        url = server.url
    reader = connect(service.endpoints["trainers"], feed=next(iter(config.feeds)), mesh=Mesh(), key_file="", **client)
    stack.callback(reader.close)
    clients.append(reader)
    loop = ProducerLoop(service.endpoints["producers"], sources)

    def produce() -> None:
        """Run the producer; make the clients raise its error."""
        try:
            loop.run()
        except Exception as error:
            _fail_clients(clients, error)

    start_thread(stack, produce, loop.stop, "streampack-producer")
    return reader, url


def endpoints_in(folder: str) -> dict[str, str]:
    """Return the endpoints of this process's broker: sockets in ``folder``, or TCP ports if its path is too long."""
    short = len(os.fsencode(folder)) + len("/producers.lock") <= _LONGEST_PATH
    return {side: f"ipc://{folder}/{side}" if short else "tcp://127.0.0.1:*" for side in ("producers", "trainers")}


def start_thread(stack: contextlib.ExitStack, body: Callable[[], None], stop: Callable[[], None], name: str) -> None:
    """Run ``body`` in a thread; closing ``stack`` calls ``stop`` to end it."""
    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()

    def end() -> None:
        """Stop the thread, and wait up to ``STOP_S`` seconds for its end."""
        stop()
        thread.join(STOP_S)

    stack.callback(end)


def _fail_clients(clients: list[Client], error: Exception) -> None:
    """Make all clients raise a thread's ``error`` where they wait for packs."""
    if not isinstance(error, StreampackError):
        bug = InternalError(f"a thread of the local loader failed: {error!r}")
        bug.__cause__ = error
        error = bug
    for client in clients:
        client.fail(error)
