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
from streampack.core.stats.sample_warnings import NO_LOSS_TOKENS, advice
from streampack.errors import ConfigError, SourceError, StreampackError
from streampack.producer.sorted_rows import PLACES, kind_fields, sorted_advice
from streampack.producer.sorted_rows import ROWS as ROWS_AT_A_PLACE
from streampack.sources.formats.rows import MISSING
from streampack.sources.open_source import open_source
from streampack.sources.reasons import advice_on, describe
from streampack.sources.records import DAMAGED, RawSample
from streampack.sources.row_keys import BY_TOKEN, KNOWN
from streampack.sources.settings import KEYS, SourceSettings
from streampack.sources.walk import ShardedSource
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.bytes_tokenizer import BytesTokenizer, UnnamedTokenizer
from streampack.tokenizers.open_tokenizer import open_tokenizer

ROWS, ROWS_AT_START = 100, 16
_SAMPLE_KEYS = ("text_key", "tokens_key", "messages_key", "prompt_key", "completion_key")
_DETECTED = "tokens, input_ids, text or messages, and without a pair of prompt and completion or response"
_TO_SET_ELSEWHERE = "Set text_key, tokens_key or messages_key, or prompt_key and completion_key, to keys of the rows"
_TO_SET = {"webdataset": "Set text_key or tokens_key to an extension, or to 'json/KEY' for a key of the .json members"}
KEY = "key_"
"""Begin of the names of fields that ``passed_on`` declares."""
MASK = Field(name=LOSS_MASK, dtype="uint8", align="target", default=1)
NOT_APPLIED = tuple(key for key in KNOWN if KNOWN[key] not in BY_TOKEN)
"""Known keys that are not applied to the sample. A row is rejected for them, unless the run declares them as fields."""
SORTED = "sorted"
"""Word of the warning about a stream whose files are sorted."""
_TORN = ("json", DAMAGED)
"""Reasons of rows that cannot be read, so their keys are unknown."""


class FirstWarning(NamedTuple):
    """A warning about the first rows of a stream: ``samples`` of ``rows`` rows have it, the first at ``where``.

    ``word`` is a word of ``core.stats.sample_warnings``, the reason of rejected rows, or ``SORTED``. ``meaning`` is its
    sentence.
    """

    stream: str
    word: str
    samples: int
    rows: int
    where: str
    meaning: str


def check_rows(config: ProducerConfig, *, order: bool = True) -> list[FirstWarning]:
    """Return the warnings about the first rows of each source; without ``order``, none about sorted files.

    Raises ConfigError if no first row has a configured key or can be used, and SourceError for broken files.
    """
    warnings: list[FirstWarning] = []
    for name, stream in config.streams.items():
        path = f"streams.{name}"
        bare = replace(stream, fields={})  # broker.yaml, not producer.yaml, declares the fields of a run
        tokenizer = open_tokenizer(stream.tokenizer or config.tokenizer)
        lone = [  # the fields whose keys do not stand for members of tar files
            (f"{path}.fields.{field}", key)
            for field, key in stream.fields.items()
            if not _has_members(f"{path}.fields.{field}", bare, tokenizer, key)
        ]
        records = _peek_with(path, stream, tokenizer, NOT_APPLIED)
        if problem := _lacking(records):
            keys = ", ".join(f"{key} {value!r}" for key in _SAMPLE_KEYS if (value := getattr(stream, key)) is not None)
            text = f"got {keys}, but no row has such a key" if keys else f"got rows without any of the keys {_DETECTED}"
            to_set = advice_on(problem, _TO_SET.get(stream.source, _TO_SET_ELSEWHERE))
            raise ConfigError(f"{path}: {text} ({problem}). {to_set}")
        read = [record for record in records if record.reason not in _TORN]
        if read and all(record.reason and not of_known_key(record) for record in read):
            raise ConfigError(f"{path}: none of the first {len(read)} rows can be used. {_rejected(read[0])}")
        if any(KEY in name for record in records for name in record.fields):
            records = _peek_with(path, stream, tokenizer, ())
        warnings += _warnings(name, records)
        warnings += _sorted(name, stream, tokenizer) if order else []
        for field_path, key in lone:
            _check_field(field_path, bare, key)
    return warnings


def _sorted(name: str, stream: ProducerStream, tokenizer: Tokenizer) -> list[FirstWarning]:
    """Return a warning about a stream whose files are sorted and hardly mixed, or nothing."""
    names, fields = kind_fields() if "fields" in KEYS[stream.source] else ({}, ())
    source = open_source(replace(stream, fields=names), tokenizer)
    if not stream.shuffle or stream.source == "python" or not isinstance(source, ShardedSource):
        return []
    places = source.places(PLACES, ROWS_AT_A_PLACE, fields)
    rows = sum(map(len, places.samples))
    advice = sorted_advice(places)
    return [FirstWarning(name, SORTED, rows, rows, places.samples[0][0].where, advice)] if advice else []


def passed_on(keys: Iterable[str]) -> tuple[dict[str, str], tuple[Field, ...]]:
    """Return the setting ``fields`` and the declarations with which the values of ``keys`` are passed on as they are.

    Fields of references are passed on, so any value may be read as one, and known keys among them are not applied. The
    names of the fields begin with ``KEY``.
    """
    names = {f"{KEY}{number}": key for number, key in enumerate(keys)}
    return names, tuple(Field(name=name, dtype="reference", axis="item") for name in names)


def _peek_with(path: str, stream: ProducerStream, tokenizer: Tokenizer, keys: Sequence[str]) -> list[RawSample]:
    """Return the first rows; ``keys`` and the keys of fields, except the loss mask, are passed on as they are."""
    names, fields = passed_on([*keys, *(key for name, key in stream.fields.items() if name != LOSS_MASK)])
    if LOSS_MASK in stream.fields:
        names, fields = names | {LOSS_MASK: stream.fields[LOSS_MASK]}, (*fields, MASK)
    if "fields" not in KEYS[stream.source]:
        names, fields = {}, ()
    return _peek(path, replace(stream, fields=names), tokenizer, fields)


def warnings_of(record: RawSample) -> tuple[str, ...]:
    """Return the words of the warnings about a sample, whose loss tokens are those of its mask."""
    mask = record.fields.get(LOSS_MASK)
    no_loss = record.reason is None and not (len(record.tokens) > 1 if mask is None else np.any(mask[1:]))
    return (*record.warnings, NO_LOSS_TOKENS) if no_loss else record.warnings


def _warnings(stream: str, records: list[RawSample]) -> list[FirstWarning]:
    """Return each warning about the first rows of a stream, and each reason why some of them are rejected."""
    places: dict[str, list[RawSample]] = {}
    for record in records:
        for word in warnings_of(record) if record.reason is None else (record.reason,):
            places.setdefault(word, []).append(record)
    return [
        FirstWarning(stream, word, len(warned), len(records), warned[0].where, meaning_of(word, warned[0]))
        for word, warned in places.items()
    ]


def meaning_of(word: str, record: RawSample) -> str:
    """Return the sentence of a warning about a sample, or of the reason why it is rejected."""
    if not record.reason:
        return advice(word)
    undeclared = f"unless broker.yaml declares the field {word.partition(':')[0]}, rows are rejected. "
    return undeclared + _rejected(record) if of_known_key(record) else _rejected(record)


def of_known_key(record: RawSample) -> bool:
    """Return whether a known key rejects the sample. A declared field may read the key instead."""
    return (record.reason or "").partition(":")[0] in KNOWN


def _rejected(record: RawSample) -> str:
    """Return why a sample is rejected, and what to do."""
    return describe(record, record.reason or "", "int32")


def refuse_chats(settings: SourceSettings, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a source without a named tokenizer begins with chats.

    Chats in later rows raise when they are read, as do chats of ``source: python``, whose first rows may take long.
    """
    no_chats = (
        settings.text_key is not None or settings.tokens_key is not None or "messages_key" not in KEYS[settings.source]
    )
    if isinstance(tokenizer, UnnamedTokenizer) and settings.source != "python" and not no_chats:
        bring_mask(open_source(replace(settings, fields={}), tokenizer).peek(ROWS_AT_START))


def bring_mask(records: Iterable[RawSample]) -> bool:
    """Return whether a sample, read without declared fields, brings a loss mask: some of its tokens are not learned.

    Raises ConfigError for chats without a tokenizer. Other errors are ignored, because the producer will raise them.
    """
    masked = False
    with contextlib.suppress(SourceError):
        for record in records:
            masked = masked or LOSS_MASK in record.fields
    return masked


def known_keys(settings: SourceSettings) -> list[str]:
    """Return the known keys (``row_keys``) that the first rows of a source have. Raises SourceError for bad files."""
    if "fields" not in KEYS[settings.source]:
        return []
    names, fields = passed_on(KNOWN)
    records = open_source(replace(settings, fields=names), BytesTokenizer()).peek(ROWS_AT_START, fields)
    present = {names[name] for record in records for name in record.fields if name in names}
    return [key for key in KNOWN if key in present]


def _has_members(path: str, stream: ProducerStream, tokenizer: Tokenizer, key: str) -> bool:
    """Return whether the key of a field stands for members of tar files, which are the media of some first row.

    Raises SourceError, which names file and member, if the members have no place in the file: it is compressed.
    """
    if stream.source != "webdataset":
        return False
    field = (Field(name="media", dtype="reference", axis="item"),)
    records = _peek(path, replace(stream, fields={"media": key}), tokenizer, field)
    values: list[Any] = [record.fields["media"] for record in records if "media" in record.fields]
    return any(isinstance(value, list) and any(isinstance(item, Reference) for item in value) for value in values)


def _check_field(path: str, stream: ProducerStream, key: str) -> None:
    """Raise ConfigError if no first row has the key of a field. A row has the key if its value is not null."""
    keys = [f"{key}.npy", f"json/{key}"] if stream.source == "webdataset" else [key]
    others: dict[str, str | None] = dict.fromkeys(_SAMPLE_KEYS)
    lacking = [_lacking(_peek(path, replace(stream, **others | {"text_key": key}), BytesTokenizer())) for key in keys]
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
