"""Megatron-LM: its adapter in its core's schedules.

- ``megatron_ranks``: one rank of Megatron, and the arguments that the adapter reads.
"""
