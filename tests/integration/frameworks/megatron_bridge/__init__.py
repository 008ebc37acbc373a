"""Megatron-Bridge, from a Python 3.12 that STREAMPACK_BRIDGE names; without one, its recorded losses and batches.

- ``bridge_samples``: the samples of 50 steps, the rules, and a number that identifies a micro-batch.
- ``bridge_ranks``: the program whose ranks train with Bridge's ``finetune``, on a processor without a GPU.
"""
