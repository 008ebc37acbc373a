"""Merge: which stream gives the next sample.

- ``entries``: memory for what waits, in blocks that all partitions share.
- ``queues``: one queue for each partition; how passes and partitions end.
- ``schedule``: the merge by weights: a function of seed, weights and position.
- ``arrival``: the merge in the order in which samples came, as the log has it.
- ``feed_merge``: the one owner of a feed's merge, which begins anew wherever the feed goes.
- ``merge_kernels``: the hot loops of both.

The order never depends on which producer was faster. The merge knows handles, lengths and positions. It does not know
tokens, packs or peers.
"""
