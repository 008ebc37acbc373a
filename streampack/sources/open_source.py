"""Opens the source that settings describe: imports the module of its format, and gives it to a ShardedSource.

``streampack.sources.formats`` says how to add a format.
"""

import importlib

from streampack.sources.records import OpenedSource
from streampack.sources.settings import SourceSettings, check_settings
from streampack.sources.walk import ShardedSource
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.bytes_tokenizer import UnnamedTokenizer


def open_source(settings: SourceSettings, tokenizer: Tokenizer | None = None) -> OpenedSource:
    """Open the source that ``settings`` describe.

    Opening lists the files with their sizes, and reads a few bytes where shards are pieces of files. A file is indexed
    when its samples are first read.

    Args:
        settings: Format, files and keys.
        tokenizer: Turns texts into token ids. None: UTF-8 bytes and an end-of-text id, without support for chats.

    Returns:
        The source, ready to ``read``.

    Raises:
        ConfigError: Settings are invalid or contradict each other, or a package is missing.
        SourceError: A file is missing or cannot be read.

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
