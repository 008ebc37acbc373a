"""Settings of a source in a configuration, and the keys that each format takes."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from streampack.errors import ConfigError
from streampack.tokenizers.base import Tokenizer

_ROW_KEYS = ("text_key", "tokens_key", "messages_key", "prompt_key", "completion_key", "fields")
_OF_ROWS = (*_ROW_KEYS, "missing_mask", "images_key", "image_folder")
_FILES = ("shards", "path", "shuffle", "open_shards")
KEYS: dict[str, tuple[str, ...]] = {
    "jsonl": (*_FILES, *_OF_ROWS),
    "webdataset": (*_FILES, *_OF_ROWS),
    "parquet": (*_FILES, *_OF_ROWS),
    "huggingface": (*_FILES, *_OF_ROWS),
    "text": (*_FILES, "unit"),
    "megatron": (*_FILES, "modes"),
    "python": ("path", "shuffle", *_OF_ROWS),
}
"""Keys that each format takes; any other key is an error."""


class SourceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a source: the format, the files, and the part of them that is a sample.

    ``source`` names the format:

    - ``jsonl``: files of JSON lines. A sample is a line, which holds a row.
    - ``webdataset``: tar files. A sample is the members that share a name.
    - ``parquet``: Parquet files. A sample is a row.
    - ``huggingface``: folders that ``Dataset.save_to_disk`` wrote. A sample is a row.
    - ``text``: plain text in UTF-8. A sample is a line, a paragraph or a file (``unit``).
    - ``megatron``: ``data/code`` names data/code.bin and data/code.idx. A sample is a sequence of the index.
    - ``python``: ``path: package.module:thing`` names an iterable. A sample is an item: a text, a row or ids.

    Files keep the order of the list ``shards``; a glob's matches are sorted. URLs are those that fsspec can open.

    In a row, at most one of ``text_key``, ``tokens_key``, ``messages_key`` and ``prompt_key`` names the sample; without
    any, see ``formats.rows``. In tar files, the last two are keys of the .json member. A field is the member KEY.npy
    there, else a key of the .json member. With ``train_on: all``, tar files default to ``missing_mask: train``, too.
    """

    source: Annotated[
        Literal["webdataset", "jsonl", "parquet", "huggingface", "text", "megatron", "python"],
        Meta(
            description="Format of the data, which determines the other keys that are allowed. With `python`, the "
            "data is not in files but in the iterable that `path` names"
        ),
    ]
    shards: Annotated[
        str | list[str] | None,
        Meta(
            description="Files to read: a path, a URL, a brace pattern (`web-{000..511}.tar`) or a glob, or a list "
            "of these. Set either `shards` or `path`"
        ),
    ] = None
    path: Annotated[
        str | None,
        Meta(
            description="Path of one file, folder or prefix, or an import path (`package.module:thing`). Patterns "
            "are not expanded. Set either `shards` or `path`"
        ),
    ] = None
    text_key: Annotated[
        str | None,
        Meta(
            description="Key that holds a sample's text. In tar files, this is an extension (`txt`) or `json/key`. "
            "Default: the usual keys are tried, such as `text`, `input_ids` and `messages`"
        ),
    ] = None
    tokens_key: Annotated[
        str | None,
        Meta(
            description="Key that holds a sample's token ids, if the data is already tokenized. In tar files, this "
            "is `npy` or `json/key`. Default: as for `text_key`"
        ),
    ] = None
    messages_key: Annotated[
        str | None,
        Meta(
            description="Key that holds a chat's list of messages. The tokenizer's chat template turns the messages "
            "into text. Default: as for `text_key`"
        ),
    ] = None
    prompt_key: Annotated[
        str | None,
        Meta(
            description="Key that holds the prompt of a prompt and completion pair. Default: `prompt` if "
            "`completion_key` is set, else as for `text_key`"
        ),
    ] = None
    completion_key: Annotated[
        str | None,
        Meta(
            description="Key that holds the completion of a prompt and completion pair. Default: `completion`, or "
            "`response` if there is no `completion`"
        ),
    ] = None
    fields: Annotated[
        dict[str, str],
        Meta(
            description="Keys of fields in this data, as `field: key`. Required only for fields that have another "
            "name in this data than in broker.yaml. For a field of references in tar files, the extensions of its "
            "members, such as `jpg;png`"
        ),
    ] = {}
    missing_mask: Annotated[
        Literal["train", "reject"] | None,
        Meta(
            description="Treatment of samples without the `loss_mask` that the run declares: train on all their "
            "tokens (`train`), or reject them (`reject`). Default: `reject` for tar files, because a member may be "
            "missing, else `train`"
        ),
    ] = None
    images_key: Annotated[
        str | None,
        Meta(
            description="Key that holds the images of a chat: a path, a URL or bytes, or a list of them. In tar files, "
            "the extensions of its members, such as `jpg;png`. Default: `images`, else `image`; in tar files, "
            "`jpg;jpeg;png;webp`. For a tokenizer with a `processor`"
        ),
    ] = None
    image_folder: Annotated[
        str | None,
        Meta(
            description="Folder or URL that relative paths of images begin with, for a tokenizer with a `processor`. "
            "Trainers read the images there, too. Default: paths are as in the data"
        ),
    ] = None
    unit: Annotated[
        Literal["line", "paragraph", "file"] | None,
        Meta(
            description="Part of a plain text file that becomes a sample. Empty lines separate paragraphs. Default: "
            "`line`"
        ),
    ] = None
    modes: Annotated[
        list[int] | None,
        Meta(description="Modes of the sequences to read from multimodal Megatron data. `[0]` reads only text"),
    ] = None
    shuffle: Annotated[
        bool,
        Meta(
            description="Read shards and samples in a new random order in each pass. Set `false` to keep the order "
            "of the files; with several files, also set `partitions: 1` in broker.yaml"
        ),
    ] = True
    open_shards: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Number of shards that are read at a time, over all partitions, so that sorted data is mixed. "
            "In Parquet and Hugging Face files, it is also the number of row groups. Default: 32, or fewer whose "
            "files have 1 GiB together, and row groups 128 MiB",
        ),
    ] = None


def check_settings(settings: SourceSettings) -> None:
    """Raise ConfigError for keys that the format does not take, that exclude each other, or that are missing."""
    keys, defaults = KEYS[settings.source], SourceSettings("jsonl")
    for key in SourceSettings.__struct_fields__:
        if key not in ("source", *keys) and getattr(settings, key) != getattr(defaults, key):
            raise ConfigError(
                f"{key}: got a key that `source: {settings.source}` does not support, expected one of "
                f"{', '.join(keys)}. Remove the key"
            )
    if (settings.shards is None) == (settings.path is None):
        both = "neither" if settings.path is None else "both"
        expected = "path" if "shards" not in keys else "either shards (patterns) or path (one path without patterns)"
        raise ConfigError(f"shards, path: got {both}, expected {expected}")
    if settings.modes is not None and not (settings.modes and all(-128 <= mode <= 127 for mode in settings.modes)):
        raise ConfigError(
            f"modes: got {settings.modes}, expected a list of modes between -128 and 127. For text, set `modes: [0]`"
        )
    if settings.open_shards is not None and not settings.shuffle:
        raise ConfigError(
            f"open_shards: got {settings.open_shards} together with `shuffle: false`, which keeps the order of the "
            "files. Remove one of the two keys"
        )
    named = [key for key in _ROW_KEYS[:4] if getattr(settings, key) is not None]
    if len(named) > 1:
        named_text = "both" if len(named) == 2 else "all"
        raise ConfigError(
            f"{', '.join(named)}: got {named_text}, expected at most one. Keep only the key that holds the sample"
        )
    if settings.completion_key is not None and named not in ([], ["prompt_key"]):
        raise ConfigError(
            f"completion_key: got this key together with {named[0]}, expected it only with prompt_key. Remove one of "
            "the two keys"
        )


def digest_keys(settings: SourceSettings) -> dict[str, Any]:
    """Return the settings that a source's digest covers: all but the format and the files."""
    values: dict[str, Any] = msgspec.to_builtins(settings)
    keys = {key: values[key] for key in (*_ROW_KEYS, "unit", "shuffle")}
    if settings.modes is not None:  # only then: digests of sources without modes must not change
        keys["modes"] = sorted(set(settings.modes))
    for key in ("images_key", "image_folder"):  # only then: digests of sources without images must not change
        if values[key] is not None:
            keys[key] = values[key]
    if settings.open_shards is not None:  # a run records its default beside the digest: see ``ShardedSource.begin``
        keys["open_shards"] = settings.open_shards
    return keys


def rejects_unmasked(settings: SourceSettings, tokenizer: Tokenizer) -> bool:
    """Return whether samples without a declared ``loss_mask`` are rejected: see ``SourceSettings.missing_mask``."""
    if settings.missing_mask is not None:
        return settings.missing_mask == "reject"
    return settings.source == "webdataset" and tokenizer.train_on != "all"
