"""Packs that are full and cost the same, so that ranks that run at the same moment end together.

- ``joint``: the packer and its theory.
- ``joint_bounds``: bounds on the tokens held and on a sample's wait.
- ``joint_kernels``: the choice of packs, compiled where numba is installed.

``Joint.choose`` calls the kernel ``joint`` once. The kernel refills the window and forms whole groups of packs, until
there are enough. The modules know lengths, costs and a budget. They do not know ranks: the caller sets the number of
packs in a group.
"""
