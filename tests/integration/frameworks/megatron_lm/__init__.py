"""Megatron-LM: its adapter in ``pretrain`` and in its core's schedules.

``pretrain`` is that of a checkout that STREAMPACK_MEGATRON names, or of the wheel in ``.venv/megatron``.

- ``megatron_ranks``: one rank of Megatron, and the arguments that the adapter reads.
- ``stand_ins``: what runs Megatron on a processor without a GPU.
- ``pretrain_run``: ``pretrain`` with a tiny model, a forward step and a line for each step.
- ``pretrain_ranks``: the program whose ranks run it.
- ``hybrid_run``: a loop over its schedule of hybrid context parallelism.
- ``hybrid_ranks``: the program whose ranks run it.
"""
