"""The packer ``exact_fill``: packs that are full to the token, nearly in the order of the stream. The default.

- ``exact_fill``: the packer and its theory.
- ``exact_fill_kernels``: the search for a fill, compiled where numba is installed.
- ``exact_fill_cases``: packs of few samples, the end of a stream, and the other cases, compiled in the same way.

The modules know lengths and ages alone.
"""
