"""The packer ``exact_fill``: packs that are full to the token, nearly in the order of the stream. The default.

- ``exact_fill``: the packer and its theory.
- ``exact_fill_kernels``: the window, and packs filled by age; compiled where numba is installed.
- ``exact_fill_cases``: pairs of a long and a short sample, packs of few samples, and the end of a stream.

``ExactFill.choose`` calls the kernel ``exact_fill`` once. The kernel refills the window, forms a pack and removes it,
until there are enough packs. The modules know lengths and ages alone.
"""
