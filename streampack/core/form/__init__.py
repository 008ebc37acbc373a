"""FORM: which samples make step k, in which packs, with which denominators.

- ``former``: holds admitted samples in merge order, asks a packer for packs, and makes steps of them.
- ``form_kernels``: the loops over all samples held, once for each step.
- ``waits``: how many steps samples wait in the window, and the bound that their packer promises.
- ``form_stats``: what is counted of the steps formed.

A step is a function of the admitted order and the rules, never of the mesh, the clock or the number of processes. The
package relies on ``packers``. It does not know producers, trainers or the log.
"""
