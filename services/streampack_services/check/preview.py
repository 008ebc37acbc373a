"""``streampack check producer.yaml --samples N``: show the first samples as tokens, and which tokens are learned.

Samples are read as a producer reads them, in the order of the files. The broker's policies are not applied.
"""

from __future__ import annotations

from itertools import groupby, islice
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from streampack.config.config_files import read_either
from streampack.config.daemon_settings import ProducerConfig
from streampack.core.model.fields import LOSS_MASK, Field
from streampack.errors import UserError
from streampack.sources import RawSample, Tokenizer, open_tokenizer
from streampack_services.daemons.producer import open_sources

Tree = dict[str, Any]
_MASK = (Field(name=LOSS_MASK, dtype="uint8", align="target", default=1),)


def preview(file: Path, samples: int) -> dict[str, list[Tree]]:
    """Return the first ``samples`` samples of each stream of a producer.yaml, as trees of ``_sample``.

    Raises UserError for a broker.yaml, ConfigError and SourceError as a producer does.
    """
    config = read_either(file)
    if not isinstance(config, ProducerConfig):
        raise UserError(f"{file} is a broker.yaml, but only producers read samples. Pass a producer.yaml.")
    streams = {}
    for name, stream in config.streams.items():  # only broker.yaml names the run's other fields
        mask = {LOSS_MASK: stream.fields[LOSS_MASK]} if LOSS_MASK in stream.fields else {}
        streams[name] = msgspec.structs.replace(stream, fields=mask)
    config = msgspec.structs.replace(config, streams=streams)
    found = {}
    for name, source in open_sources(config).items():
        tokenizer = open_tokenizer(config.streams[name].tokenizer or config.tokenizer)
        records = source.read(0, 1, seed=0, passes=1, fields=_MASK)
        found[name] = [_sample(record, tokenizer) for record in islice(records, samples)]
    return found


def _sample(record: RawSample, tokenizer: Tokenizer) -> Tree:
    """Return a sample as a tree: place, reason of a rejection (or None), tokens, learned tokens, and parts of its text.

    Each of ``parts`` has its ``text`` and whether it is ``learned``.
    """
    learned = record.fields.get(LOSS_MASK)
    mask = [1] * len(record.tokens) if learned is None else learned.tolist()
    parts, place = [], 0
    for value, run in groupby(mask):
        size = len(list(run))
        parts.append({"learned": bool(value), "text": tokenizer.decode(record.tokens[place : place + size])})
        place += size
    return {
        "where": record.place, "reason": record.reason, "num_tokens": len(mask), "num_learned": sum(map(bool, mask)),
        "parts": parts,
    }  # fmt: skip


def show_preview(found: dict[str, list[Tree]]) -> None:
    """Print the result of ``preview``: learned text green, or in ``[[ ]]`` without colors; the rest dim."""
    console = Console(highlight=False, markup=False, emoji=False)
    marks = ("", "") if console.color_system else ("[[", "]]")
    for name, samples in found.items():
        for sample in samples:
            console.print()
            counts = f"{sample['num_tokens']} tokens, {sample['num_learned']} learned"
            said = f"rejected: {sample['reason']}" if sample["reason"] else counts
            console.print(Text(f"{name}  {sample['where']}  {said}", style="bold"), soft_wrap=True)
            text = Text()
            for part in sample["parts"]:
                before, after = marks if part["learned"] else ("", "")
                text.append(before + part["text"] + after, style="green" if part["learned"] else "dim")
            console.print(text, soft_wrap=True)
