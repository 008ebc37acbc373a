"""Sizes of samples' media: all that a forecast needs to know of images.

A row of sizes, int64 [4], has a sample's items, its patches, the sum of their squares over the items, and its bytes.
The first three give the cost of the media for any factors of ``Balance``, and what counts against ``rules.limits``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.intake.overlong import Pieces, apply_overlong, drop_unfit_media
from streampack.core.media.media_counts import MediaOfChunk, over_limits
from streampack.core.media.media_format import patches_of
from streampack.core.model.fields import MEDIA, Field
from streampack.core.model.keys.planning_keys import Balance, MediaLimits
from streampack.core.model.lease_terms import StreamTerms
from streampack.core.model.samples import I64, MEDIA_ROW
from streampack.producer.media_values import ITEMS as NUM_ITEMS
from streampack.producer.media_values import media_of

ITEMS, PATCHES, SQUARES, BYTES = range(4)
"""Columns of the sizes."""
NO_MEDIA = (0, 0, 0, 0)


def sizes_of(
    fields: Mapping[str, Any], declared: Sequence[Field], tokens: NDArray[Any]
) -> tuple[int, int, int, int] | str:
    """Return the row of sizes of a sample as a source has read it, or the reason why its media are invalid.

    Args:
        fields: The values of the sample, by name.
        declared: The run's fields of axis item and patch.
        tokens: Its token ids.
    """
    values = media_of(fields, declared, tokens)
    if isinstance(values, str):
        return values
    if not values or not len(values[MEDIA]):
        return NO_MEDIA
    items = int(values[NUM_ITEMS][0])
    patches = patches_of(values[MEDIA].data, items)
    return items, int(patches.sum()), int(patches @ patches), len(values[MEDIA])


def sizes_of_recorded(media: NDArray[np.void], balance: Balance) -> I64:
    """Return the sizes of samples as a log has them, int64 [n, 4].

    A log has no squares. They follow from the recorded cost if a pair of patches costs something. Otherwise all items
    of a sample count as equally large.

    Args:
        media: Columns of the samples, with those of ``samples.MEDIA_ROW``, [n].
        balance: The balance whose factors gave the recorded cost.
    """
    items, patches, sizes, cost = (media[name].astype(np.int64) for name in MEDIA_ROW.names or ())
    a, b, c = balance.media_factors
    squares = -(-patches * patches // np.maximum(items, 1))
    if b:
        squares = np.maximum((cost - a * patches - c * items) // b, squares)
    return np.stack([items, patches, squares, sizes], axis=1)


def media_costs(sizes: I64, balance: Balance) -> I64:
    """Return the cost of each sample's media, int64 [n], of ``sizes`` int64 [n, 4]."""
    a, b, c = balance.media_factors
    costs: I64 = a * sizes[:, PATCHES] + b * sizes[:, SQUARES] + c * sizes[:, ITEMS]
    return costs


def pieces_of(lengths: I64, sizes: I64 | None, terms: StreamTerms) -> Pieces:
    """Apply a stream's policy to samples, as a broker does.

    Args:
        lengths: int64 [n], tokens of each sample; 0 for a rejected one.
        sizes: int64 [n, 4], sizes of their media; None without media.
        terms: Terms of the stream.
    """
    pieces = apply_overlong(lengths, terms.limit, terms.overlong)
    return pieces if sizes is None else drop_unfit_media(pieces, lengths, _as_chunk(sizes), terms)


def unfit(lengths: I64, sizes: I64 | None, limits: MediaLimits) -> NDArray[np.bool_]:
    """Return the samples whose media alone exceed the ``limits`` of a pack, bool [n]; see ``pieces_of``."""
    if sizes is None:
        return np.zeros(len(lengths), np.bool_)
    too_large: NDArray[np.bool_] = (lengths > 0) & over_limits(_as_chunk(sizes), limits)
    return too_large


def _as_chunk(sizes: I64) -> MediaOfChunk:
    """Return ``sizes``, int64 [n, 4], as the media of a chunk."""
    return MediaOfChunk(sizes[:, ITEMS], np.zeros(len(sizes) + 1, np.int64), sizes[:, PATCHES], sizes[:, SQUARES])
