"""Checks a pack whose samples share tokens: what is shared, paths, and each sample as if nothing were shared.

The paths are computed here sample by sample: the first tokens of the path of the sample before, then its own tokens.
With them each sample is written out, and ``pack_check`` checks the result as a pack without trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec.structs import replace

from streampack.batch_checks.expectations import equal, expect
from streampack.core.model.rules import Align, Rules
from streampack.core.model.samples import I64


def has_trees(pack: Mapping[str, Any]) -> bool:
    """Return whether the samples of a pack, by the canonical names, may share tokens."""
    return pack.get("shared") is not None


def check_paths(pack: Mapping[str, Any], subject: str, padded: I64, own: I64) -> None:
    """Check the tokens that samples share and the paths of a pack; raise InvariantError for the first that is wrong.

    Args:
        pack: The pack, by the canonical names.
        subject: Its step and pack, for messages.
        padded: Boundaries of the segments, int64 [segments + 1].
        own: Tokens of each segment without padding, int64 [segments].
    """
    count = int(pack["num_samples"])
    depths, cu_paths = (np.asarray(pack[name], np.int64) for name in ("shared", "cu_paths"))
    equal("shared", f"{subject}, its shape", depths.shape, (count,))
    equal("cu_paths", subject, cu_paths, np.append(0, np.cumsum(own[:count] + depths)).astype(np.int64))
    before = 0
    for i, (share, length) in enumerate(zip(depths.tolist(), own.tolist(), strict=False)):
        most = before  # a sample shares at most all of the one before it
        expect(0 <= share <= most, "shared", f"{subject}, sample {i}: got {share} tokens, expected at most {most}")
        before = share + length
    expected = np.concatenate([*_paths(depths, padded, own), np.zeros(0, np.int64)])
    extra = int(len(expected) == padded[-1])  # so that P is never T
    equal("path_index", subject, np.asarray(pack["path_index"], np.int64), np.append(expected, [0] * extra))


def _paths(depths: I64, padded: I64, own: I64) -> Iterator[I64]:
    """Yield the places of each sample's tokens in the pack, int64 [tokens]."""
    path = np.zeros(0, np.int64)
    for share, begin, length in zip(depths.tolist(), padded.tolist(), own.tolist(), strict=False):
        path = np.concatenate([path[:share], np.arange(begin, begin + length)])
        yield path


def written_out(pack: Mapping[str, Any], rules: Rules | None) -> tuple[dict[str, Any], Rules | None]:
    """Return a pack of the same samples that share nothing, in the canonical names, and rules that allow it.

    Positions of a tail are left out with the tail.
    """
    bounds = np.asarray(pack["cu_paths"], np.int32)
    size = int(bounds[-1])
    at = np.asarray(pack["path_index"], np.int64)[:size]
    written: dict[str, Any] = dict(pack)
    fields = rules.fields if rules is not None else ()
    of_tokens = ["input_ids", "position_ids", "padding_mask"]
    of_tokens += [field.name for field in fields if field.axis == "token" and field.align == "token"]
    of_paths = ["labels", *(field.name for field in fields if field.align == "target")]
    for name in dict.fromkeys(of_tokens):
        if name in written:
            values = np.asarray(written[name])
            written[name] = values[..., at] if name == "position_ids" else values[at]
    written |= {name: written[name][:size] for name in of_paths if name in written}
    spans = np.array(list(pairwise(bounds.tolist())), np.int64).reshape(-1, 2)
    written |= {
        "cu_seqlens": bounds, "cu_seqlens_padded": bounds, "num_segments": len(spans), "slices": spans,
        "max_seqlen": int(np.diff(bounds).max(initial=0)),
    }  # fmt: skip
    for name in ("shared", "cu_paths", "path_index"):
        del written[name]
    plain = (
        None if rules is None else replace(rules, share=None, budget=size, shape="fixed", align=Align(), warmup=None)
    )
    return written, plain
