"""A dataset of Ray Data as a source of our own: the same files, read by file and row in a recorded order.

Rows that Ray Data computes come in an order that no one can repeat. Rows of files need no Ray Data. A producer
reads the files in an order that follows from the seed, and a restart goes on at any row. Steps are then the same in
every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from streampack.errors import UserError

FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".tar": "webdataset", ".txt": "text"}
"""Format of a source by the ending of its files, without that of a compression."""
COMPRESSED = (".gz", ".zst")


def source_of(dataset: Any, **keys: Any) -> Mapping[str, Any]:
    """Return the settings of a source with the files of a dataset of Ray Data, for ``streams`` of producer.yaml.

    The dataset must be as it was read: transformations are not applied. Give the tokenizer to producer.yaml instead.

    Args:
        dataset: A dataset of ``ray.data``, such as ``ray.data.read_parquet`` returns it.
        keys: Other keys of the source, such as ``text_key="text"``.

    Returns:
        A dict with ``source``, ``shards`` (the files, sorted) and the other keys.

    Raises:
        UserError: The dataset has no files, or files of several formats or of one that no source reads.

    Example:
        >>> producers = {"streams": {"web": source_of(ray.data.read_parquet("/data/web"))}}  # doctest: +SKIP
        >>> start("sft-8b", "broker.yaml", producers)  # doctest: +SKIP
    """
    files = sorted(set(dataset.input_files()))
    if not files:
        raise UserError(
            "got a dataset without files, expected one that Ray Data reads from files. Write other datasets with "
            "write_datasink(Datasink(...))"
        )
    formats = {_format_of(file) for file in files}
    if len(formats) > 1 or None in formats:
        endings = ", ".join(sorted({PurePosixPath(file).suffix or file for file in files}))
        raise UserError(f"got files that end in {endings}, expected one of {', '.join(FORMATS)} for all files")
    return {"source": formats.pop(), "shards": files, **keys}


def _format_of(file: str) -> str | None:
    """Return the format of a file by its name; None if no source reads it."""
    path = PurePosixPath(file)
    path = path.with_suffix("") if path.suffix in COMPRESSED else path
    return FORMATS.get(path.suffix)
