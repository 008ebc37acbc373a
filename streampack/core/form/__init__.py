"""FORM, the first stage of planning: it decides which samples are in each step, and in which packs.

- ``former``: holds admitted samples in merge order, asks a packer for packs, and makes steps of the packs.
- ``auto_window``: the window of each step under ``window: auto``.
- ``form_kernels``: compiled loops over all samples in the ``Former``; each runs once per step.
- ``waits``: statistics of how long samples wait in the window, and the packer's bound on that wait.
- ``form_stats``: statistics of the steps formed.

Samples enter with ``Former.admit``. ``request`` gives the arrays for the packer, the packer chooses, and ``apply``
moves the chosen samples into packs. ``apply`` returns the completed steps. A step is a function of the admitted
order and the rules, never of the mesh, the clock or the number of processes. The package relies on ``packers``. It does
not know producers, trainers or the log.
"""
