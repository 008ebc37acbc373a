"""Megatron-LM and Megatron-Bridge.

- ``megatron_lm``: the provider of datasets for Megatron-LM's ``pretrain``.
- ``bridge``: the dataset of a recipe of Megatron-Bridge.
- ``hybrid_cp``: plans of groups of ranks for Megatron's schedule of hybrid context parallelism.
"""

from __future__ import annotations

from streampack.integrations.megatron.megatron_lm import TrainIterator, datasets_provider

__all__ = ["TrainIterator", "datasets_provider"]
