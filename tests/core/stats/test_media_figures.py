"""The counts of media equal those of a plain loop over packs and samples."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.form.form_stats import FormedFigures
from streampack.core.model.keys.planning_keys import MediaLimits, Warmup
from streampack.core.model.rules import Align, Rules
from streampack.core.model.samples import MEDIA_ROW
from streampack.core.stats.media_figures import AXES
from tests.core.media.media_cases import GRID
from tests.core.model.shape_cases import formed

BUDGET = 32
LIMITS = [None, MediaLimits(), MediaLimits(patches=12), MediaLimits(items=3), MediaLimits(patches=9, items=4)]
SAMPLES = st.tuples(st.integers(1, BUDGET), st.integers(0, 3), st.integers(0, 9), st.integers(1, 50))
"""Tokens, items, patches and bytes of a sample."""


@given(
    st.lists(SAMPLES, min_size=1, max_size=40), st.sampled_from(LIMITS), st.sampled_from([1, 4]),
    st.sampled_from([None, Warmup(8, 4)]),
)  # fmt: skip
def test_media_are_counted_as_a_loop_counts_them(
    samples: list[tuple[int, int, int, int]], limits: MediaLimits | None, align: int, warmup: Warmup | None
) -> None:
    rules = Rules(
        budget=BUDGET, packs=3, window=8, align=Align(sample=align, pack=align), warmup=warmup, media_fields=(GRID,),
        limits=limits,
    )  # fmt: skip
    media = np.zeros(len(samples), MEDIA_ROW)
    for row, (_, items, patches, size) in zip(media, samples, strict=True):
        row["items"], row["patches"], row["extra_bytes"] = items, patches * (items > 0), size * (items > 0)
    has_media = media["items"].any()
    table, steps = formed(rules, [each[0] for each in samples], *([media.tobytes()] if has_media else []))
    whole = FormedFigures(rules)
    items_of, patches_of = media["items"].tolist(), media["patches"].tolist()
    most_items = most_patches = 0
    caps = {"patches": limits and limits.patches, "items": limits and limits.items}
    bound = {axis: 0 for axis in AXES if axis == "tokens" or caps[axis]}
    for step in steps:
        whole.add(step, table)
        for pack in step.packs:
            held = [int(table.index[handle]) for handle in pack.handles]
            sums = {"tokens": pack.num_slot_tokens}
            sums |= {"items": sum(items_of[i] for i in held), "patches": sum(patches_of[i] for i in held)}
            most_items, most_patches = max(most_items, sums["items"]), max(most_patches, sums["patches"])
            fills = {axis: Fraction(sums[axis], caps.get(axis) or rules.budget_at(step.number)) for axis in bound}
            if held:
                bound[max(bound, key=fills.__getitem__)] += 1
    found = whole.media
    assert found is not None
    assert (found.items, found.patches, found.bytes) == (sum(items_of), sum(patches_of), media["extra_bytes"].sum())
    assert (found.most_items, found.most_patches) == (most_items, most_patches)
    assert found.bound_by == bound
    assert sum(bound.values()) == whole.totals.packs - whole.totals.empty_packs


def test_runs_without_fields_of_media_count_none() -> None:
    assert FormedFigures(Rules()).media is None
