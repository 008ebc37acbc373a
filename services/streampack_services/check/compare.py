"""Compare a producer.yaml with the broker.yaml of its run: stream names, fields, and the masks that rows bring.

The broker would reject the producer or its samples later, with the same advice. Here nothing is started yet.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from streampack.config.daemon_settings import BrokerConfig, ProducerConfig, ProducerStream
from streampack.core.model.fields import LABELS, LOSS_MASK, POSITION_IDS, Field
from streampack.core.model.rules import Rules
from streampack.errors import ConfigError
from streampack.producer.chunks import check_image_fields
from streampack.producer.first_rows import MASK, ROWS_AT_START
from streampack.sources import RawSample, open_source, open_tokenizer
from streampack.sources.settings import KEYS
from streampack.sources.walk import image_fields_of
from streampack_services.amounts import counted
from streampack_services.broker.memory_plan import plan

MOST_NAMES = 5
"""Missing streams that a warning names."""


class RunFiles(NamedTuple):
    """A broker.yaml and the producer.yaml files of its run, with their paths."""

    path: Path
    broker: BrokerConfig
    producers: list[tuple[Path, ProducerConfig]]


def compare(files: RunFiles) -> list[str]:
    """Return warnings about files of one run that do not fit together.

    Raises ConfigError if the broker would reject a stream, a field or all samples of a producer.
    """
    rules = plan(files.broker).rules
    warnings = []
    for path, producer in files.producers:
        for name, stream in producer.streams.items():
            _check_stream(files, path, name)
            _check_fields(files.path, rules.fields, f"{path}: streams.{name}", stream)
            if fault := _check_samples(files, rules, f"{path}: streams.{name}", stream, producer):
                if files.broker.streams[name].recorded(name, files.broker.rules).poison == "error":
                    raise ConfigError(fault)
                warnings.append(f"{fault}. Until then such samples are dropped, as `poison` says")
    sent = {name for _, producer in files.producers for name in producer.streams}
    missing = [name for name, stream in files.broker.streams.items() if name not in sent and not stream.pushed]
    if missing:
        names, them = ", ".join(missing[:MOST_NAMES]), "them" if len(missing) > 1 else "it"
        more = f" and {len(missing) - MOST_NAMES} more" if len(missing) > MOST_NAMES else ""
        warnings.append(
            f"no producer sends {counted(len(missing), 'stream')} of {files.path}: {names}{more}. The broker waits for "
            f"{them}. Add {them} to a producer.yaml, or remove {them} from {files.path.name}"
        )
    return warnings


def _check_stream(files: RunFiles, path: Path, name: str) -> None:
    """Raise ConfigError unless the broker knows the stream, and files may be read for it."""
    streams = files.broker.streams
    if name not in streams:
        close = difflib.get_close_matches(name, streams, 1)
        write = f"Write {close[0]!r} here, or {name!r} in {files.path.name}" if close else ""
        raise ConfigError(
            f"{path}: streams.{name}: got a stream that {files.path} does not have, expected one of "
            f"{', '.join(streams)}. {write or f'Add it to `streams` of {files.path.name}'}"
        )
    if streams[name].pushed:
        raise ConfigError(
            f"{path}: streams.{name}: got a source, but {files.path} says that programs push this stream. Remove "
            f"`pushed` there, or the stream here"
        )


def _check_fields(broker: Path, fields: Iterable[Field], where: str, stream: ProducerStream) -> None:
    """Raise ConfigError for the key of a field that broker.yaml does not declare."""
    declared = {field.name for field in fields}
    for name in stream.fields:
        if name not in declared:
            raise ConfigError(
                f"{where}.fields.{name}: got a field that {broker} does not declare. Add `fields: {{{name}: {{}}}}` to "
                f"{broker.name}, with its dtype, or remove the key here"
            )


def _check_samples(files: RunFiles, rules: Rules, where: str, stream: ProducerStream, producer: ProducerConfig) -> str:
    """Return the fault of the first rows if all of them lack a field that must be there; empty if there is none.

    Raises ConfigError if they bring a mask that is not declared.
    """
    fields, tokenizer = rules.fields, open_tokenizer(stream.tokenizer or producer.tokenizer)
    check_image_fields(where, image_fields_of(stream, tokenizer), (*fields, *rules.media_fields))
    if stream.source == "python":  # its first rows may take long
        return ""
    names = {field.name for field in fields}
    if not {LOSS_MASK, LABELS} & names and any(
        LOSS_MASK in record.fields and not np.asarray(record.fields[LOSS_MASK]).all()
        for record in _peek(replace(stream, fields={}), producer, (MASK,))
    ):
        raise ConfigError(
            f"{where}: rows say which tokens count in the loss, and {files.path} declares no field for it, so the "
            f"model would be trained on prompts. Add `fields: {{loss_mask: {{default: 1}}}}` to {files.path.name}"
        )
    needed = [
        field.name
        for field in fields
        if field.default is None and not field.of_media and not field.late
        and field.name not in (LOSS_MASK, LABELS, POSITION_IDS)
    ]  # fmt: skip
    records = [record for record in _peek(stream, producer, fields) if record.reason is None] if needed else []
    for name in needed:
        if records and not any(name in record.fields for record in records):
            return (
                f"{where}: none of the first {len(records)} rows has the field {name!r}, which {files.path} declares "
                f"without a default. Name its key here: `fields: {{{name}: KEY}}`, or set `default` there"
            )
    return ""


def _peek(stream: ProducerStream, producer: ProducerConfig, fields: tuple[Field, ...]) -> list[RawSample]:
    """Return the first rows of a stream as samples with these fields."""
    if "fields" not in KEYS[stream.source]:
        stream = replace(stream, fields={})
    source = open_source(stream, open_tokenizer(stream.tokenizer or producer.tokenizer))
    return list(source.peek(ROWS_AT_START, fields))
