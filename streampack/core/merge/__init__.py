"""Merge: which stream gives the next sample.

- ``entries``: memory for waiting entries, in blocks that all partitions share.
- ``queues``: one queue for each partition, and the ends of passes and partitions.
- ``schedule``: the merge by weights: a function of seed, weights and position.
- ``arrival``: the merge in the order in which samples came, as the log records it.
- ``feed_merge``: the owner of a feed's merge, which replaces the merge when the feed restarts.
- ``merge_kernels``: the hot loops of both merges.

The intake pushes admitted samples to the queue of their partition. ``take`` then removes samples in merge order, until
one is missing, and returns them for FORM. The order never depends on which producer was faster. The merge knows
handles, lengths and positions. It does not know tokens, packs or peers.
"""
