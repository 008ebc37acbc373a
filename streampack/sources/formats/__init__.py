"""Formats: one module for each kind of file, and the modules that several formats share.

A format module has ``open_format(settings, tokenizer)``. The format that it returns finds its files, indexes one shard
and loads samples by their number in the shard. ``open_source`` imports the module that has the name of the source, so
the name of a format's module is the value of the key ``source``. A new format is a module here, its name in the
``Literal`` of ``sources/settings.py``, and its keys in ``KEYS`` there.

- ``jsonl``, ``text``: lines, paragraphs or whole files of text.
- ``webdataset``: tar shards. ``tar`` finds the members, ``npy`` reads arrays, ``npy_shard`` reads many arrays at once.
- ``parquet``, ``huggingface``: columns. ``arrow`` makes rows of them, ``list_columns`` reads many rows of ids at once.
- ``megatron``: indexed datasets of token ids.
- ``python``: any iterable, by its import path.
- ``rows``: from a row (a mapping from keys to values) to a sample; every format of rows uses it.

Formats rely on ``files`` and on ``tokenizers``. They do not know passes, partitions or cursors: ``walk`` does.
"""
