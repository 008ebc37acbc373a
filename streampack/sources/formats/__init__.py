"""Formats: one module for each kind of file, and the modules that several formats share.

A format module defines ``open_format(settings, tokenizer)``, which returns a ``Format``. The Format lists its files,
indexes one shard, and loads samples by their number in the shard. The key ``source`` names the module, which
``open_source`` imports. To add a format, add a module here, its name in the ``Literal`` of ``sources/settings.py``, and
its keys in ``KEYS`` there.

- ``jsonl``, ``text``: lines, paragraphs or whole files of text.
- ``webdataset``: tar shards. ``tar`` finds the members, ``npy`` reads arrays, ``npy_shard`` reads many arrays at once.
- ``parquet``, ``huggingface``: columns. ``arrow`` converts them to rows, ``list_columns`` reads many rows of ids at
  once.
- ``megatron``: indexed datasets of token ids.
- ``python``: any iterable, by its import path.
- ``rows``: converts a row (a mapping from keys to values) to a sample; every format of rows uses it.

Formats rely on ``files`` and ``tokenizers``. Passes, partitions and cursors are left to ``walk``.
"""
