"""Padding tokens of delivered packs, by cause; the causes add up to all padding.

- ``alignment``: from the end of a sample to the next multiple of ``align.sample``;
- ``pack_tail``: behind a pack's last sample, to the budget where packs are ``fixed``, else to ``align.pack``;
- ``shape``: from there to the multiple or the bucket of other shapes, or to the end of a padded row;
- ``pipeline``: from there to the longest pack of the step, where stages exchange one shape;
- ``empty_pack``: packs without a sample, and padded rows without one.

A step counts once, so the counts only grow. If the padding depends on the mesh (``depends_on_mesh``), a step's padding
is that of its first deal. So it is with groups of ranks. Else it is that of FORM's packs.
"""

from __future__ import annotations

import numpy as np

from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.model.steps import PlannedPacks

CAUSES = ("alignment", "pack_tail", "shape", "pipeline", "empty_pack")


def depends_on_mesh(rules: Rules) -> bool:
    """Return True if a mesh may split packs of these rules, or make them longer."""
    return rules.batch is not None or rules.shape != "fixed"


def padding_of(tokens: I64, slots: I64, widths: I64, rules: Rules) -> I64:
    """Return the padding tokens of packs by cause, int64 [CAUSES].

    ``tokens``, ``slots`` and ``widths``, int64 [packs], are the packs' real tokens, aligned tokens and lengths T.
    """
    own, has_samples = rules.own_widths(slots), slots > 0
    laid = own if rules.shape == "fixed" else -(-slots // rules.align.pack) * rules.align.pack
    parts = np.stack([slots - tokens, laid - slots, own - laid, widths - own])
    padding: I64 = np.append(parts[:, has_samples].sum(axis=1), widths[~has_samples].sum())
    return padding


def padding_of_rows(tokens: I64, slots: I64, held: I64, rows: I64, widths: I64) -> I64:
    """Return the padding tokens of padded micro-batches by cause, int64 [CAUSES].

    A micro-batch has ``rows`` rows of ``widths`` tokens, of which ``held`` hold a sample; ``tokens`` and ``slots`` are
    real and aligned tokens. All int64 [packs].
    """
    sums = [(slots - tokens).sum(), 0, (held * widths - slots).sum(), 0, ((rows - held) * widths).sum()]
    return np.array(sums, np.int64)


def padding_of_groups(tokens: I64, slots: I64, widths: I64, laid: I64) -> I64:
    """Return the padding tokens of the packs of groups of ranks by cause, int64 [CAUSES].

    ``tokens``, ``slots`` and ``widths``, int64 [packs], are real tokens, tokens aligned for the group, and lengths T.
    ``laid`` int64 [packs] are the lengths by ``align.pack`` alone.
    """
    has_samples = slots > 0
    parts = np.stack([slots - tokens, laid - slots, widths - laid])[:, has_samples].sum(axis=1)
    return np.array([*parts, 0, widths[~has_samples].sum()], np.int64)


def padding_of_packs(packs: PlannedPacks, rules: Rules) -> I64:
    """Return the padding tokens of FORM's packs by cause, int64 [CAUSES], for rules whose padding needs no mesh."""
    return padding_of(packs.tokens, packs.slots, rules.own_widths(packs.slots), rules)
