"""Sources: files of samples, read in a fixed order from any cursor.

A source is a list of shards: files, or pieces of files. With P partitions, shard i belongs to partition i mod P. A pass
over a partition reads its shards in groups, and the samples of each group, in the order that ``order`` computes from
(seed, pass). A format finds its files, indexes one shard, and loads sample number i of it. Where samples are arrays
of ids, it loads many samples at once. Passes, cursors, skipping and resuming work the same way for all formats. A
cursor is a place in the order of a pass, so resuming from a cursor indexes one group. The format ``python`` is the
exception: some iterables can only be read from their start, so resuming reads them from the start.

Files, in the order in which data passes them:

- ``settings``: the keys of a source in a configuration, and which of them each format takes.
- ``open_source``: from settings to an opened source.
- ``files/``: the bytes of a shard, on this machine or at a URL.
- ``formats/``: one module for each file format.
- ``order``: the order of samples, a pure function of (seed, pass, shard).
- ``joining``: several shards as one.
- ``walk``: passes, partitions, cursors and skipping over a format's shards.
- ``records``, ``arrays``: the results: one sample, or many samples at once.
- ``row_keys``: keys of a row that say which tokens are learned or real, or where packed samples begin.
- ``images``: the images of chats, and their sizes.
- ``reasons``: sentences for the reasons why samples are rejected.
- ``in_memory``: rows in this process's memory as a source.
- ``tables``: refuses tables and dicts of columns where rows are expected.

A missing or changed file stops the reader with a SourceError, because later samples could not be numbered. A damaged
shard becomes one rejected sample. A bad sample is a ``RawSample`` with a reason and no tokens; it keeps its place, so
other samples keep their numbers.

Memory holds the indices of one group (about 100 bytes per sample), and one sample, one chunk or one window of blocks.
Files must keep the size that they had when the source was opened.

The package relies on ``tokenizers``. It does not know streams, chunks, sockets or policies. It does not import torch,
numba, webdataset or datasets. It imports pyarrow and fsspec only where a format or a URL needs them.
"""

from streampack.sources.arrays import ManySource, Records, Room
from streampack.sources.open_source import open_source
from streampack.sources.order import Cursor
from streampack.sources.records import OpenedSource, RawSample, Sample, Source
from streampack.sources.settings import SourceSettings
from streampack.tokenizers.base import Tokenizer, TokenizerSettings
from streampack.tokenizers.open_tokenizer import open_tokenizer
from streampack.tokenizers.token_ids import as_tokens

__all__ = [
    "Cursor",
    "ManySource",
    "OpenedSource",
    "RawSample",
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
