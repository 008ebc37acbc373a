"""Sources: files of samples, read in a recorded order from any place on.

Theory of operation. A source is a list of shards: files, or pieces of them. Shard i belongs to partition i mod P;
a pass over a partition walks its shards, and the samples of each, in the order that ``order`` gives for (seed,
pass). A format only has to find its files, to index one shard and to load its sample number i, or to gather many where
they are arrays of ids (``arrays``); passes, cursors, skipping, resuming are ``sharded``'s and the same for all. A
cursor is a place in that order, so going on from one costs the index of one shard, not a second reading of what came
before. (An iterable of Python's that can only be read from its start is the one exception: see ``python``.)

Two kinds of bad data. A *file* that is missing, cut or changed stops the reader with a SourceError, since
nothing after it can be numbered. A *sample* that is bad is a Record with a reason and no tokens: it keeps its
place, so that the numbers of all others stay what they are whatever the policy does with it.

Held in memory: one shard's index (about 100 bytes a sample) and one sample, a chunk of them where they are gathered,
or one block where the format is read by blocks. Samples are read at their offsets, in files that must keep the size
they had when opened.

    settings ─▶ files, remote, compressed
                                 ─▶ jsonl webdataset parquet huggingface text megatron python ─▶ rows ─▶ tokenizers
                                 └──────────── sharded: order, cursors ─▶ Record, Record, ...

This package does not know streams, chunks, sockets or policies, and imports neither torch, numba, webdataset nor
datasets; pyarrow and fsspec only where a format or URL needs them.
"""

import importlib

from streampack.sources.arrays import ManySource, Records, Room
from streampack.sources.bytes_tokenizer import UnnamedTokenizer
from streampack.sources.order import Cursor
from streampack.sources.records import OpenedSource, Record, Sample, Source
from streampack.sources.settings import SourceSettings, check_settings
from streampack.sources.sharded import ShardedSource
from streampack.sources.token_ids import as_tokens
from streampack.sources.tokenizers import Tokenizer, TokenizerSettings, open_tokenizer

__all__ = [
    "Cursor",
    "ManySource",
    "OpenedSource",
    "Record",
    "Records",
    "Room",
    "Sample",
    "Source",
    "SourceSettings",
    "Tokenizer",
    "TokenizerSettings",
    "as_tokens",
    "open_source",
    "open_tokenizer",
]


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
        from streampack.sources.python import open_python

        return open_python(settings, tokenizer)
    format_ = importlib.import_module(f"streampack.sources.{settings.source}").open_format(settings, tokenizer)
    return ShardedSource(settings, format_, tokenizer)
