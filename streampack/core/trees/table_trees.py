"""Trees in the ``SampleTable``, in snapshots and in steps: what the samples of a group share there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, PACK, SampleTable
from streampack.core.trees.shared_prefixes import check_shared


def depths_of(rules: Rules, table: SampleTable, handles: I64) -> I64 | None:
    """Return the tokens that each sample shares with the sample before it, int64 [n]; None if the run has no trees."""
    return None if rules.share is None else table.column("shared", handles)


def cut_off(table: SampleTable, handles: I64) -> I64:
    """Let samples share nothing with those before them; return the tokens that they shared, int64 [n]."""
    shared = table.column("shared", handles)
    if shared.any():
        table.shared[handles] = 0
    return shared


def wrong_trees(rows: NDArray[np.void], extras: NDArray[np.void], firsts: I64, rules: Rules) -> str:
    """Return an error text if samples share tokens with samples from which they may be apart; empty if none does.

    Args:
        rows: The samples, ``samples.ROW`` [n].
        extras: Their other columns, ``samples.EXTRA_ROW`` [n].
        firsts: Samples that begin a part of the rows which packs hold apart from the part before, int64 [k].
        rules: The rules.
    """
    shared = extras["shared"].astype(np.int64)
    if not shared.any():
        return ""
    if rules.share is None:
        return "got samples that share tokens, expected none without `share: prefix`"
    apart = np.append(True, extras["keep"][:-1] != PACK)
    apart[firsts[firsts < len(rows)]] = True
    try:
        check_shared(shared, rows["length"].astype(np.int64), np.flatnonzero(apart))
    except ValueError as error:
        return str(error)
    return ""


def own_lengths(rows: NDArray[np.void], extras: NDArray[np.void]) -> I64:
    """Return the tokens that each sample adds to its pack, int64 [n]; arguments as for ``wrong_trees``."""
    lengths: I64 = rows["length"].astype(np.int64) - extras["shared"]
    return lengths
