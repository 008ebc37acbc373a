"""The hot loops of FORM, compiled by numba if it is installed; each passes once over all samples in the ``Former``.

Each kernel is plain Python over numpy arrays, so tests compare the kernel with its ``py_func``.
"""

from __future__ import annotations

import numpy as np

from streampack.core.jit import kernel
from streampack.core.model.samples import I32, I64, U32


@kernel
def describe(
    handles: I64,
    bounds: I64,
    stream: I32,
    index: I64,
    part: I32,
    length: I32,
    loss_tokens: I32,
    crc: U32,
    depths: I64,
    costs: I64,
    align: int,
    a: int,
    b: int,
    window: int,
    c: int,
    sums: I64,
    identities: U32,
) -> None:
    """Compute the sums of packs, and the identities that their digests cover.

    Pack i is ``handles[bounds[i]:bounds[i + 1]]``. The kernel fills in ``sums`` int64 [4, packs], see
    ``steps.PlannedPacks``, and ``identities`` uint32 [samples, 6], which are ``steps.IDENTITY`` in little endian. The
    columns from ``stream`` to ``crc`` are those of a ``SampleTable``. ``depths`` and ``costs``, int64 [samples], are
    those of ``Balance.extras_of``; they are empty if 0 for all. A sample of s padded tokens of its own, after d others,
    costs ``a * s + b * s * (2 * d + s)``, and its value of ``costs`` more. ``window`` and ``c`` are
    ``Balance.window_factors``, for a further cost.
    """
    for pack in range(len(bounds) - 1):
        tokens, slots, loss, cost = 0, 0, 0, 0
        for k in range(bounds[pack], bounds[pack + 1]):
            h = handles[k]
            depth = depths[k] if len(depths) else 0
            real = int(length[h]) - depth  # 64 bits also without numba
            slot = (real + align - 1) // align * align
            tokens += real
            slots += slot
            loss += int(loss_tokens[h])
            cost += slot * (a + b * (2 * depth + slot))
            if c:
                near, before = min(depth + slot, window), min(depth, window)
                cost += c * (near * (2 * (depth + slot) - near) - before * (2 * depth - before))
            cost += costs[k] if len(costs) else 0
            identities[k, 0] = stream[h]
            identities[k, 1] = part[h]
            identities[k, 2] = index[h] & 0xFFFFFFFF
            identities[k, 3] = index[h] >> 32
            identities[k, 4] = length[h]
            identities[k, 5] = crc[h]
        sums[0, pack] = tokens
        sums[1, pack] = slots
        sums[2, pack] = loss
        sums[3, pack] = cost


@kernel
def take_out(
    indices: I64,
    bounds: I64,
    new_ages: I64,
    step: int,
    handles: I64,
    sizes: I64,
    lengths: I64,
    ages: I64,
    since: I64,
    taken: I64,
    taken_bounds: I64,
    waited: I64,
) -> tuple[int, int, int]:
    """Remove the items that a packer chose for ``step`` from the items held. Items that stay move up, in place.

    ``indices``, ``bounds`` and ``new_ages`` are those of a ``Choice``. The items held have ``sizes``, ``lengths``,
    ``ages`` and ``since``, the step at which a packer first saw the item, or -1. ``handles`` are those of their
    samples, one item after another.

    The kernel fills in ``taken`` with the handles of the samples removed, pack after pack. It fills in ``taken_bounds``
    int64 [packs + 1] with the beginning of each pack in ``taken``, and ``waited`` int64 [indices] with the steps that
    each item waited.

    Returns three numbers: the items that stay, their samples, and the items that the packer has seen. If the choice has
    an index twice or an index without an item, the first number is -1 and nothing is moved.
    """
    begins = np.empty(len(sizes) + 1, np.int64)
    begins[0] = 0
    for i in range(len(sizes)):
        begins[i + 1] = begins[i] + sizes[i]
    goes = np.zeros(len(sizes), np.bool_)
    count = 0
    taken_bounds[0] = 0
    for pack in range(len(bounds) - 1):
        for place in range(bounds[pack], bounds[pack + 1]):
            i = indices[place]
            if not 0 <= i < len(sizes) or goes[i]:
                return -1, 0, 0
            goes[i] = True
            waited[place] = step - since[i] if since[i] >= 0 else 0
            for k in range(begins[i], begins[i + 1]):
                taken[count] = handles[k]
                count += 1
        taken_bounds[pack + 1] = count
    items, samples, seen = 0, 0, 0
    for i in range(len(sizes)):
        age = new_ages[i] if i < len(new_ages) else ages[i]
        is_seen = goes[i] or (age >= 0 and i < len(new_ages))
        seen += is_seen
        if goes[i]:
            continue
        for k in range(begins[i], begins[i + 1]):
            handles[samples] = handles[k]
            samples += 1
        sizes[items], lengths[items], ages[items] = sizes[i], lengths[i], age
        since[items] = step if is_seen and since[i] < 0 else since[i]
        items += 1
    return items, samples, seen
