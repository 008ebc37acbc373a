"""A look at the first rows of sources before a run.

Whether they have the keys that are asked for, and are no chats that nothing can write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from msgspec.structs import replace

from streampack.config.daemon_settings import ProducerConfig, ProducerStream
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
_DETECTED = "text, tokens, input_ids, messages, or prompt with completion or response"
_TO_SET_ELSEWHERE = "set text_key, tokens_key, messages_key, or prompt_key and completion_key, to what the rows have"
_TO_SET = {"webdataset": "set text_key or tokens_key to an extension, or to 'json/KEY' for a key of the .json members"}
_TORN = ("json", DAMAGED)
"""What cannot be read says nothing of its keys."""


def check_rows(config: ProducerConfig) -> None:
    """Raises ConfigError for a key that no row has, of each source's first ones; SourceError for files that fail."""
    for name, stream in config.streams.items():
        path = f"streams.{name}"
        bare = replace(stream, fields={})  # which of them a run declares is in broker.yaml
        if said := _lacking(_peek(path, bare, open_tokenizer(stream.tokenizer or config.tokenizer))):
            asked = ", ".join(f"{key} {value!r}" for key in _SAMPLE_KEYS if (value := getattr(stream, key)) is not None)
            got = f"got {asked}, but no row has it" if asked else f"got rows without {_DETECTED}"
            raise ConfigError(f"{path}: {got} ({said}): {_TO_SET.get(stream.source, _TO_SET_ELSEWHERE)}")
        for field, key in stream.fields.items():
            _check_field(f"{path}.fields.{field}", bare, key)


def refuse_chats(settings: SourceSettings, tokenizer: Tokenizer) -> None:
    """Raises ConfigError for chats in a source that no tokenizer is named for.

    Those that come later in it are refused when they are read, as are those of ``source: python``, whose first rows may
    take long to come.
    """
    no_chats = (
        settings.text_key is not None or settings.tokens_key is not None or "messages_key" not in KEYS[settings.source]
    )
    if isinstance(tokenizer, UnnamedTokenizer) and settings.source != "python" and not no_chats:
        _read(open_source(replace(settings, fields={}), tokenizer).peek(ROWS_AT_START))


def refuse_chats_in(rows: InMemory, tokenizer: Tokenizer) -> None:
    """The same for rows in memory."""
    if isinstance(tokenizer, UnnamedTokenizer):
        _read(rows.peek(ROWS_AT_START))


def _read(records: Iterable[RawSample]) -> None:
    """Other errors than of the configuration are raised where the producer meets them."""
    with contextlib.suppress(SourceError):
        for _ in records:
            pass


def _check_field(path: str, stream: ProducerStream, key: str) -> None:
    """The field's key is looked for as if it were that of a text, which any value but null answers."""
    keys = [f"{key}.npy", f"json/{key}"] if stream.source == "webdataset" else [key]
    others: dict[str, str | None] = dict.fromkeys(_SAMPLE_KEYS)
    lacking = [_lacking(_peek(path, replace(stream, **others | {"text_key": each}), BytesTokenizer())) for each in keys]
    if all(lacking):
        raise ConfigError(
            f"{path}: got {key!r}, but no row has it ({lacking[-1]}): set it to a key of the rows, or remove it"
        )


def _peek(path: str, stream: ProducerStream, tokenizer: Tokenizer) -> list[RawSample]:
    try:
        return list(open_source(stream, tokenizer).peek(ROWS))
    except StreampackError as error:
        raise type(error)(f"{path}: {error}") from None


def _lacking(records: list[RawSample]) -> str:
    """What the first of them has instead, where the sample is missing in all that can be read; else nothing."""
    read = [record for record in records if record.reason not in _TORN]
    if not read or any(record.reason != MISSING for record in read):
        return ""
    return f"rows read: {len(read)}; {read[0].where} {read[0].why or 'has other keys'}"
