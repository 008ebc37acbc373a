"""From settings to an opened source: imports the format that a configuration names, and walks its shards."""

import importlib

from streampack.sources.records import OpenedSource
from streampack.sources.settings import SourceSettings, check_settings
from streampack.sources.walk import ShardedSource
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.bytes_tokenizer import UnnamedTokenizer


def open_source(settings: SourceSettings, tokenizer: Tokenizer | None = None) -> OpenedSource:
    """The source that ``settings`` name; texts go through ``tokenizer`` (None: bytes, with an end-of-text id, and
    no chats).

    Looks at names and sizes, and at a few bytes where shards are pieces of files; a file is indexed when its turn
    comes. Raises ConfigError for settings that cannot be, SourceError for files that are not there.

    >>> source = open_source(SourceSettings("jsonl", "data/*.jsonl"))                        # doctest: +SKIP
    >>> for record in source.read(partition=0, partitions=4, seed=17, passes=1): ...         # doctest: +SKIP
    """
    check_settings(settings)
    tokenizer = tokenizer or UnnamedTokenizer()
    if settings.source == "python":
        from streampack.sources.formats.python import open_python

        return open_python(settings, tokenizer)
    format_ = importlib.import_module(f"streampack.sources.formats.{settings.source}").open_format(settings, tokenizer)
    return ShardedSource(settings, format_, tokenizer)
