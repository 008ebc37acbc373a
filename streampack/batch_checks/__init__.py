"""Batch checks: does a batch hold what it promises? Behind ``streampack.verify``.

- ``view_check``: reads a batch of any view back into the canonical pack's names.
- ``pack_check``: checks one pack or shard: boundaries, slices, tokens, labels and fields.
- ``view_keys``: checks what only the keys of a framework promise.
- ``step_check``: checks what packs, shards and ranks make up together.
- ``expectations``: the text of a check that fails.

Everything is computed a second time, token by token, by another way than ``packs`` builds it. It costs about ten times
what building costs, and is meant for the first steps of a run, for tests, and for a user's own changes to a batch.
"""
