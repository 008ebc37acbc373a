"""``streampack why --step K -p producer.yaml``: add the file and row of each sample to steps, and on request its text.

With texts, each sample is read again as a producer reads it, with the policies of the run. Its checksum is compared
with the recorded one, because a file may have changed since the run. A sample that is no text in its file has only
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from streampack.config.daemon_settings import ProducerConfig
from streampack.core.intake.credits import lease_of
from streampack.core.intake.overlong import apply_terms
from streampack.core.model.lease_terms import terms_of
from streampack.errors import SampleError
from streampack.producer.chunks import batches_of, chunk_of
from streampack.sources import OpenedSource, RawSample, Tokenizer, open_tokenizer
from streampack.tokenizers.token_ids import Tokens
from streampack_services.audit.origins import places_of
from streampack_services.audit.why import Tree
from streampack_services.daemons.producer import open_sources
from streampack_services.ledger.run_history import FeedHistory

_MANY = 1 << 40
"""Above every number of tokens and bytes."""


class NotingTokenizer:
    """A tokenizer that notes in ``was_text`` whether it has encoded a text since this was last reset."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner, self.was_text = inner, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, *args: Any) -> Any:
        """Encode a text as ``Tokenizer.encode`` does."""
        self.was_text = True
        return self._inner.encode(*args)

    def encode_chat(self, *args: Any) -> Any:
        """Encode a chat as ``Tokenizer.encode_chat`` does."""
        self.was_text = True
        return self._inner.encode_chat(*args)

    def encode_pair(self, *args: Any) -> Any:
        """Encode a prompt and its completion as ``Tokenizer.encode_pair`` does."""
        self.was_text = True
        return self._inner.encode_pair(*args)


@dataclass(frozen=True, slots=True)
class RunSources:
    """The sources of a run by stream, and the tokenizer of each."""

    sources: Mapping[str, OpenedSource]
    tokenizers: Mapping[str, NotingTokenizer]

    @classmethod
    def of(cls, configs: Iterable[ProducerConfig]) -> RunSources:
        """Open the sources of producer.yaml files. Raises ConfigError or SourceError."""
        sources, tokenizers = dict[str, OpenedSource](), dict[str, NotingTokenizer]()
        for config in configs:
            for name, stream in config.streams.items():
                tokenizers[name] = NotingTokenizer(open_tokenizer(stream.tokenizer or config.tokenizer))
            sources |= open_sources(config, cast("Mapping[str, Tokenizer]", tokenizers))
        return cls(sources, tokenizers)


def add_places(feed: FeedHistory, steps: Iterable[Tree], run: RunSources, *, texts: bool = False) -> None:
    """Add ``origin`` and ``pass`` to the samples of steps, the results of ``why.why_step``; both None if not known.

    ``pass`` counts from 1. With ``texts``, each sample gets its ``tokens``, and its ``text`` if its source has texts.
    ``same`` says whether tokens and fields still have the recorded checksum; None if this cannot be known.
    """
    by_sample: dict[str, dict[int, list[tuple[int, Tree]]]] = {}
    unknown = ("origin", "pass", *(("tokens", "text", "same") if texts else ()))
    for step in steps:
        for sample in (sample for pack in step["packs"] for sample in pack["samples"]):
            sample.update(dict.fromkeys(unknown))
            by_sample.setdefault(sample["stream"], {}).setdefault(sample["index"], []).append((step["step"], sample))
    for stream, samples in by_sample.items():
        if stream not in feed.streams or stream not in run.sources:
            continue
        tokenizer = run.tokenizers[stream]
        for index, place in places_of(feed, stream, samples, run.sources, reads=texts):
            was_text, tokenizer.was_text = tokenizer.was_text, False
            for number, sample in samples[index]:
                sample |= {"origin": place.where, "pass": place.pass_ + 1}
                if place.sample is not None:
                    tokens, sample["same"] = _read_again(feed, number, sample, place.sample)
                    if tokens is not None:
                        sample |= {"tokens": tokens.tolist(), "text": tokenizer.decode(tokens) if was_text else None}


def _read_again(feed: FeedHistory, step: int, sample: Tree, read: RawSample) -> tuple[Tokens | None, bool | None]:
    """Return the tokens of a sample that was read again, None if it is rejected now, and whether it is the same.

    The second value is None if this cannot be known.
    """
    rules = feed.rules_of_sample(sample["stream"], sample["index"])
    terms = next(terms for terms in terms_of(rules) if terms.name == sample["stream"])
    lease = lease_of(terms, rules, sample["index"] % terms.partitions, _MANY, _MANY)
    try:
        batch = next(batches_of([read], lease))
    except SampleError:
        return None, False
    if not len(batch.tokens):
        return None, False
    crc = int(np.frombuffer(chunk_of(batch, lease, (0, 0)).crcs_u32, "<u4")[0])
    pieces = apply_terms(terms, np.array([len(batch.tokens)]))
    part = np.flatnonzero(pieces.part == sample["part"])
    begin = int(pieces.offset[part[0]]) if len(part) else 0
    tokens = batch.tokens[begin : begin + sample["length"]].astype(np.int32)
    if crc != sample["crc"] and terms.overlong == "truncate" and len(batch.tokens) > terms.limit:
        return tokens, None  # the producer had cut the sample at limits.sample_tokens, which no log has
    return tokens, crc == sample["crc"]
