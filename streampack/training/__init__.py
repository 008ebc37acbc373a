"""Training on packs: a loss written for one sample, and attention that keeps samples apart.

- ``attention``: one call for the attention kernels that are installed, and the same on the CPU.
- ``masks``: which tokens of a pack see which, for attention that takes a mask and no boundaries.
- ``loss``: cuts a model's output for a pack back into its samples.

The modules need torch, and only the canonical keys of a batch. They do not know how a batch came.
"""
