"""Packers: which samples share one token budget.

``make_packer(name, **parameters)`` makes a packer for a stream; ``pack_lengths`` packs a closed list of lengths.

- ``window``: what a packer is and returns, and the sliding window of the packers that stream.
- ``arguments``: checks what a caller gives.
- ``registry``: every packer by name.
- ``closed``: ``pack_lengths``, how many packs a closed set makes, and the way back to its samples.
- ``sliding/``: packers over a sliding window.
- ``blocks/``: packers that need all lengths first, and pack a stream block by block.
- ``exact_fill/``: packs that are full to the token. The default.
- ``joint/``: packs that are full and cost the same.
- ``packer_kernels``: compiled loops that several packers share.

Packers know lengths, never tokens or samples. They keep nothing between calls, so packs are a function of the order of
lengths alone. No packer imports numba until it forms a pack, and all work without numba.

A new packer is one file, and one entry in ``registry``: configuration, validation and ``--help`` follow from it.

>>> pack_lengths([4, 1, 3, 2, 1, 3, 4, 5], 5, "concatenative")
[[0, 1], [2, 3], [4, 5], [6], [7]]
"""

from streampack.core.packers.closed import pack_lengths, way_back
from streampack.core.packers.registry import PACKERS, make_packer, parameters_of
from streampack.core.packers.window import Choice, Packer

__all__ = ["PACKERS", "Choice", "Packer", "make_packer", "pack_lengths", "parameters_of", "way_back"]
