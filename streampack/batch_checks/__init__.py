"""Batch checks: verify that a batch satisfies every invariant of its format, for ``streampack.verify``.

In the order in which data passes them:

- ``step_check``: checks a step, the shards of a pack, or the same step of all ranks.
- ``view_check``: converts a batch of any view to the names of the canonical pack.
- ``pack_check``: checks one pack or shard: boundaries, slices, tokens, labels and fields.
- ``tree_check``: checks what samples share, and each sample as if nothing were shared.
- ``view_keys``: checks the keys that a framework's view adds.
- ``expectations``: raises InvariantError with the text of a failed check.

Everything is computed again, token by token, in another way than ``packs`` builds it. A check takes about ten times as
long as building the batch. Use it for the first steps of a run, in tests, and after a user's own changes to a batch.
"""
