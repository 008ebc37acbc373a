"""Packs that are full and cost the same, so that ranks that run at the same moment end together.

- ``joint``: the packer and its theory.
- ``joint_bounds``: how many tokens it holds, and how long a sample waits.
- ``joint_kernels``: how packs are chosen, compiled where numba is installed.

The modules know lengths, costs and a budget. They do not know ranks: a caller says how many packs go together.
"""
