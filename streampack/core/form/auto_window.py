"""The automatic window: the number of samples that a packer chooses from, for each step.

A large window gives full packs, but it lets a sample leave long before or after its turn. A packer chooses by length.
So the mixture of streams follows their lengths for about as many steps as the window is deep. The automatic window is a
few steps deep: the number of samples in the last ``STEPS`` steps, rounded up to a power of two. A window below
``LEAST`` samples leaves gaps in packs, and one above ``MAX_WINDOW`` gains nothing.

The window depends on the steps alone, so it is the same wherever and whenever they are formed.
"""

from __future__ import annotations

from collections.abc import Sequence

from streampack.core.model.keys.planning_keys import MAX_WINDOW

STEPS = 4
"""Steps whose samples the window holds."""
LEAST = 128
FIRST = 256
"""Window of the first step."""


def auto_window(recent: Sequence[int]) -> int:
    """Return the window of the next step, in samples.

    ``recent``: the number of samples in each of the last steps, at most ``STEPS``. With fewer steps, their mean counts
    for the missing ones.

    >>> auto_window([]), auto_window([20] * 4), auto_window([100] * 4)
    (256, 128, 512)
    """
    if not recent:
        return FIRST
    samples = -(-sum(recent) * STEPS // len(recent))
    return min(max(1 << (samples - 1).bit_length(), LEAST), MAX_WINDOW)
