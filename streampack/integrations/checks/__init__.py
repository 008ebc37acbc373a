"""Checks of adapters before they attach to a framework, and the state that they save.

- ``tried_versions``: the version of each framework that was tried, and a check of the internals that adapters use.
- ``fixed_steps``: stages that end training in a framework which cannot change its own settings.
- ``hf_checks``: settings of transformers and TRL that are unsuitable.
- ``megatron_checks``: arguments of Megatron-LM that are unsuitable.
- ``chunk_packs``: the packs that model chunks of a virtual pipeline share, and whether the chunks agree.
- ``rank_copies``: the ranks that read the same packs.
- ``checkpointed``: the state of a loader in a framework's checkpoints, and when a checkpoint is committed.
"""
