"""Packers: the choice of samples that share one token budget.

``make_packer(name, **parameters)`` makes a packer for a stream; ``pack_lengths`` packs a closed list of lengths.

- ``packer``: the ``Packer`` protocol, the ``Choice`` that a packer returns, and small helpers.
- ``registry``: every packer by name.
- ``window``: the sliding window of the packers in plain Python, and the bound on waiting.
- ``arguments``: checks of a caller's lengths and numbers.
- ``closed``: ``pack_lengths``, the number of packs of a closed set, and the order back to its samples.
- ``sliding/``: packers over a sliding window.
- ``blocks/``: packers that need all lengths first, and pack a stream block by block.
- ``exact_fill/``: packs that are full to the token. The default.
- ``joint/``: packs that are full and cost the same.
- ``packer_kernels``: compiled loops that several packers share.

``core.form`` calls a packer with the remaining lengths and removes the packs that the packer returns. Packers know
lengths, never tokens or samples. They keep no state between calls, so packs depend only on the order of lengths. No
packer imports numba until it forms a pack, and all work without numba.

To add a packer, write one file that follows the protocol in ``packer``, and add one entry to ``registry``.
Configuration, validation and ``--help`` follow from the entry.

>>> pack_lengths([4, 1, 3, 2, 1, 3, 4, 5], 5, "concatenative")
[[0, 1], [2, 3], [4, 5], [6], [7]]
"""

from streampack.core.packers.closed import pack_lengths, way_back
from streampack.core.packers.packer import Choice, Packer
from streampack.core.packers.registry import PACKERS, make_packer, parameters_of

__all__ = ["PACKERS", "Choice", "Packer", "make_packer", "pack_lengths", "parameters_of", "way_back"]
