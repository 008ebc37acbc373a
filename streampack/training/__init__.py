"""Training on packs: a loss written for one sample, and attention that keeps samples apart.

- ``attention``: one call for whichever attention kernel is installed, and the same result on the CPU.
- ``masks``: attention masks of a pack, for attention that takes a mask instead of boundaries.
- ``process_groups``: the process groups of dynamic context parallelism.
- ``loss``: divides a model's output for a pack into its samples, and sums their losses.

The modules need torch, and only the canonical keys of a batch. They do not know how a batch was built or received.
"""
