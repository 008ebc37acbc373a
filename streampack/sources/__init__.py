"""Sources: files of samples, read in a recorded order from any place on.

A source is a list of shards: files, or pieces of files. Shard i belongs to partition i mod P. A pass over a partition
reads its shards, and the samples of each shard, in the order that ``order`` gives for (seed, pass). A format finds its
files, indexes one shard, and loads sample number i of it, or many samples at once where they are arrays of ids.
Passes, cursors, skipping and resuming are the same for all formats. A cursor is a place in the order of a pass, so to
go on from one costs the index of one shard. The format ``python`` is the exception: an iterable that can only be read
from its start is read from its start.

Files, in the order in which data passes them:

- ``settings``: what a configuration says of a source, and which keys each format takes.
- ``open_source``: from settings to an opened source.
- ``files/``: the bytes of a shard, on this machine or at a URL.
- ``formats/``: one module for each file format.
- ``order``: the order of samples, a pure function of (seed, pass, shard).
- ``walk``: passes, partitions, cursors and skipping over a format's shards.
- ``records``, ``arrays``: what comes out: one sample, or many at once.
- ``in_memory``: rows of this process as a source.

A file that is missing, cut or changed stops the reader with a SourceError, because no later sample could be numbered.
A bad sample is a ``RawSample`` with a reason and no tokens. It keeps its place: other samples keep their numbers.

Memory holds one shard's index (about 100 bytes a sample) and one sample, one chunk or one block. Files must keep the
size that they had when they were opened.

The package relies on ``tokenizers``. It does not know streams, chunks, sockets or policies. It does not import torch,
numba, webdataset or datasets; it imports pyarrow and fsspec only where a format or a URL needs them.
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
