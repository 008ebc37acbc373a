"""What a configuration says of a source, and which keys mean something to which format."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from streampack.errors import ConfigError
from streampack.tokenizers.base import Tokenizer

_ROW_KEYS = ("text_key", "tokens_key", "messages_key", "prompt_key", "completion_key", "fields")
_OF_ROWS = (*_ROW_KEYS, "missing_mask")
_FILES = ("shards", "path", "shuffle")
KEYS: dict[str, tuple[str, ...]] = {
    "jsonl": (*_FILES, *_OF_ROWS),
    "webdataset": (*_FILES, *_OF_ROWS),
    "parquet": (*_FILES, *_OF_ROWS),
    "huggingface": (*_FILES, *_OF_ROWS),
    "text": (*_FILES, "unit"),
    "megatron": (*_FILES, "modes"),
    "python": ("path", "shuffle", *_OF_ROWS),
}
"""The keys of each format; any other is refused."""


class SourceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which data, and what in it is a sample.

    ``source``: the format.

    ============= ===================================================== ==================================
    source        ``shards`` or ``path``                                a sample
    ============= ===================================================== ==================================
    jsonl         files of JSON lines                                   a line: a row
    webdataset    tar files                                             the members of one name
    parquet       Parquet files                                         a row
    huggingface   folders that ``Dataset.save_to_disk`` wrote           a row
    text          plain text, UTF-8                                     a line, paragraph or file (``unit``)
    megatron      ``data/code`` for data/code.bin and data/code.idx     a sequence of the index
    python        ``path: package.module:thing``, an iterable           an item: text, row or ids
    ============= ===================================================== ==================================

    ``shards``: a path or URL (``s3://``, ``hf://``, ``https://``: all that fsspec knows), a brace pattern
    (``web-{000..511}.tar``), a glob, or a list of these; their order is that of the expansion, a glob's matches
    sorted. ``path``: one, taken as it is written. Exactly one of the two.

    In a row, at most one of ``text_key``, ``tokens_key``, ``messages_key`` and ``prompt_key`` (with
    ``completion_key``) says what is the sample; see ``rows`` for what is looked for without. In tar files
    ``text_key`` and ``tokens_key`` are the extension of a member, ``json/key`` for a key of a .json member; the
    others are keys of the .json member. ``fields``: a declared field's name to the key that holds it, where they
    differ; in tar files it is the member KEY.npy, else a key of the .json member.
    ``missing_mask``: a sample without the ``loss_mask`` that the run declares is trained on as a whole and counted
    (``train``), or rejected (``reject``). Tar files reject by default, since a member may be lost; others train, and so
    do tar files with ``train_on: all``.
    ``unit``: of text; ``line`` by default. Empty lines separate paragraphs, and are no samples.
    ``modes``: of multimodal Megatron data, which sequences to read by their mode; 0 is text.
    ``shuffle``: false reads files and samples as they lie, in every pass. A stream's partitions take turns, so that
    several files come in their order only with ``partitions: 1`` in broker.yaml, and one file always does.
    """

    source: Annotated[
        Literal["webdataset", "jsonl", "parquet", "huggingface", "text", "megatron", "python"],
        Meta(description="format of the files"),
    ]
    shards: Annotated[
        str | list[str] | None, Meta(description="files: a path, URL, brace pattern or glob, or a list of these")
    ] = None
    path: Annotated[str | None, Meta(description="one file, folder, prefix or import path, as it is written")] = None
    text_key: Annotated[str | None, Meta(description="key of the text")] = None
    tokens_key: Annotated[str | None, Meta(description="key of the token ids")] = None
    messages_key: Annotated[str | None, Meta(description="key of the chat's messages")] = None
    prompt_key: Annotated[str | None, Meta(description="key of the prompt")] = None
    completion_key: Annotated[str | None, Meta(description="key of the answer to the prompt")] = None
    fields: Annotated[dict[str, str], Meta(description="a declared field's name to its key, where they differ")] = {}
    missing_mask: Annotated[
        Literal["train", "reject"] | None,
        Meta(description="samples without their declared loss_mask: train on all their tokens, or reject them"),
    ] = None
    unit: Annotated[
        Literal["line", "paragraph", "file"] | None, Meta(description="part of a text that is a sample")
    ] = None
    modes: Annotated[list[int] | None, Meta(description="modes of multimodal Megatron data to read")] = None
    shuffle: Annotated[bool, Meta(description="each pass has shards and samples in another order")] = True


def check_settings(settings: SourceSettings) -> None:
    """Raises ConfigError for keys that mean nothing to the format, that exclude each other, or that are missing."""
    known, defaults = KEYS[settings.source], SourceSettings("jsonl")
    for key in SourceSettings.__struct_fields__:
        if key not in ("source", *known) and getattr(settings, key) != getattr(defaults, key):
            raise ConfigError(
                f"{key}: means nothing to source: {settings.source}, expected of {', '.join(known)}: remove it"
            )
    if (settings.shards is None) == (settings.path is None):
        both = "neither" if settings.path is None else "both"
        what = "path" if "shards" not in known else "shards (patterns) or path (one, as it is)"
        raise ConfigError(f"shards, path: got {both}, expected {what}")
    if settings.modes is not None and not (settings.modes and all(-128 <= mode <= 127 for mode in settings.modes)):
        raise ConfigError(f"modes: got {settings.modes}, expected a list of modes between -128 and 127, for text [0]")
    named = [key for key in _ROW_KEYS[:4] if getattr(settings, key) is not None]
    if len(named) > 1:
        raise ConfigError(f"{', '.join(named)}: got {'both' if len(named) == 2 else 'all'}, expected at most one")
    if settings.completion_key is not None and named not in ([], ["prompt_key"]):
        raise ConfigError(f"completion_key: got it beside {named[0]}, expected prompt_key or neither")


def as_words(settings: SourceSettings) -> dict[str, Any]:
    """What a digest must hold of the settings: all but where the files lie."""
    words: dict[str, Any] = msgspec.to_builtins(settings)
    found = {key: words[key] for key in (*_ROW_KEYS, "unit", "shuffle")}
    if settings.modes is not None:  # left out otherwise: digests of sources without it stay what they were
        found["modes"] = sorted(set(settings.modes))
    return found


def rejects_unmasked(settings: SourceSettings, tokenizer: Tokenizer) -> bool:
    """Return whether samples without a declared ``loss_mask`` are rejected: see ``SourceSettings.missing_mask``."""
    if settings.missing_mask is not None:
        return settings.missing_mask == "reject"
    return settings.source == "webdataset" and tokenizer.train_on != "all"
