"""Check the first rows of sources before a run.

The rows must have the configured keys, and a source with chats needs a tokenizer that can format chats.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from streampack.config.daemon_settings import ProducerConfig, ProducerStream
from streampack.core.media.references import Reference
from streampack.core.model.fields import LOSS_MASK, Field
from streampack.core.stats.sample_warnings import NO_LOSS_TOKENS
from streampack.errors import ConfigError, SourceError, StreampackError
from streampack.sources.formats.rows import MISSING
from streampack.sources.in_memory import InMemory
from streampack.sources.open_source import open_source
from streampack.sources.records import DAMAGED, RawSample
from streampack.sources.settings import KEYS, SourceSettings
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.bytes_tokenizer import BytesTokenizer, UnnamedTokenizer
from streampack.tokenizers.open_tokenizer import open_tokenizer

ROWS, ROWS_AT_START = 100, 16
_SAMPLE_KEYS = ("text_key", "tokens_key", "messages_key", "prompt_key", "completion_key")
_DETECTED = "text, tokens, input_ids or messages, and without a pair of prompt and completion or response"
_TO_SET_ELSEWHERE = "Set text_key, tokens_key or messages_key, or prompt_key and completion_key, to keys of the rows"
_TO_SET = {"webdataset": "Set text_key or tokens_key to an extension, or to 'json/KEY' for a key of the .json members"}
_TORN = ("json", DAMAGED)
"""Reasons of rows that cannot be read, so their keys are unknown."""


class FirstWarning(NamedTuple):
    """A warning about the first rows of a stream: ``samples`` of ``rows`` rows have it, the first at ``where``."""

    stream: str
    word: str
    samples: int
    rows: int
    where: str


def check_rows(config: ProducerConfig) -> list[FirstWarning]:
    """Return the warnings about the first rows of each source.

    Raises ConfigError if no first row has a configured key, and SourceError for broken files.
    """
    warnings: list[FirstWarning] = []
    for name, stream in config.streams.items():
        path = f"streams.{name}"
        bare = replace(stream, fields={})  # broker.yaml, not producer.yaml, declares the fields of a run
        tokenizer = open_tokenizer(stream.tokenizer or config.tokenizer)
        records = _peek(path, bare, tokenizer)
        warnings += _warnings(name, records)
        if said := _lacking(records):
            asked = ", ".join(f"{key} {value!r}" for key in _SAMPLE_KEYS if (value := getattr(stream, key)) is not None)
            got = (
                f"got {asked}, but no row has such a key" if asked else f"got rows without any of the keys {_DETECTED}"
            )
            raise ConfigError(f"{path}: {got} ({said}). {_TO_SET.get(stream.source, _TO_SET_ELSEWHERE)}")
        for field, key in stream.fields.items():
            if not _has_members(f"{path}.fields.{field}", bare, tokenizer, key):
                _check_field(f"{path}.fields.{field}", bare, key)
    return warnings


def warnings_of(record: RawSample) -> tuple[str, ...]:
    """Return the words of the warnings about a sample, whose loss tokens are those of its mask."""
    mask = record.fields.get(LOSS_MASK)
    no_loss = record.reason is None and not (len(record.tokens) > 1 if mask is None else np.any(mask[1:]))
    return (*record.warnings, NO_LOSS_TOKENS) if no_loss else record.warnings


def _warnings(stream: str, records: list[RawSample]) -> list[FirstWarning]:
    """Return each warning about the first rows of a stream."""
    places: dict[str, list[str]] = {}
    for record in records:
        for word in warnings_of(record):
            places.setdefault(word, []).append(record.where)
    return [FirstWarning(stream, word, len(where), len(records), where[0]) for word, where in places.items()]


def refuse_chats(settings: SourceSettings, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a source without a named tokenizer begins with chats.

    Chats in later rows raise when they are read, as do chats of ``source: python``, whose first rows may take long.
    """
    no_chats = (
        settings.text_key is not None or settings.tokens_key is not None or "messages_key" not in KEYS[settings.source]
    )
    if isinstance(tokenizer, UnnamedTokenizer) and settings.source != "python" and not no_chats:
        _read_all(open_source(replace(settings, fields={}), tokenizer).peek(ROWS_AT_START))


def refuse_chats_in(rows: InMemory, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if rows in memory without a named tokenizer begin with chats."""
    if isinstance(tokenizer, UnnamedTokenizer):
        _read_all(rows.peek(ROWS_AT_START))


def _read_all(records: Iterable[RawSample]) -> None:
    """Read all records, for the ConfigError that some raise; ignore SourceError, which the producer will raise."""
    with contextlib.suppress(SourceError):
        for _ in records:
            pass


def _has_members(path: str, stream: ProducerStream, tokenizer: Tokenizer, key: str) -> bool:
    """Return whether the key of a field stands for members of tar files, which are the media of some first row.

    Raises SourceError, which names file and member, if the members have no place in the file: it is compressed.
    """
    if stream.source != "webdataset":
        return False
    field = (Field(name="media", dtype="reference", axis="item"),)
    records = _peek(path, replace(stream, fields={"media": key}), tokenizer, field)
    values: list[Any] = [record.fields["media"] for record in records if "media" in record.fields]
    return any(isinstance(value, list) and any(isinstance(each, Reference) for each in value) for value in values)


def _check_field(path: str, stream: ProducerStream, key: str) -> None:
    """Raise ConfigError if no first row has the key of a field. A row has the key if its value is not null."""
    keys = [f"{key}.npy", f"json/{key}"] if stream.source == "webdataset" else [key]
    others: dict[str, str | None] = dict.fromkeys(_SAMPLE_KEYS)
    lacking = [_lacking(_peek(path, replace(stream, **others | {"text_key": each}), BytesTokenizer())) for each in keys]
    if all(lacking):
        raise ConfigError(
            f"{path}: got the key {key!r}, but no row has this key ({lacking[-1]}). Set a key that the rows have, or "
            "remove the field"
        )


def _peek(path: str, stream: ProducerStream, tokenizer: Tokenizer, fields: Sequence[Field] = ()) -> list[RawSample]:
    """Return the first rows of a source as samples; errors name the stream's ``path`` in the configuration."""
    try:
        return list(open_source(stream, tokenizer).peek(ROWS, fields))
    except StreampackError as error:
        raise type(error)(f"{path}: {error}") from None


def _lacking(records: list[RawSample]) -> str:
    """Return a text about the keys of the first record if no readable record has a sample; else an empty text."""
    read = [record for record in records if record.reason not in _TORN]
    if not read or any(record.reason != MISSING for record in read):
        return ""
    return f"{len(read)} rows were read; the first, {read[0].where}, {read[0].why or 'has other keys'}"
