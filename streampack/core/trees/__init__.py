"""Trees: the samples of a group whose tokens begin alike, with each shared run of tokens once.

- ``prefix_tree``: builds the tree of a group.
- ``shared_prefixes``: a tree as one number for each sample: its order, the runs that fit a pack, paths and segments.
- ``chunk_trees``: the tree of a chunk as the broker admits it.
- ``table_trees``: trees in the table of samples, in snapshots and in steps.

Stages call these modules, and do not read the column of shared tokens themselves. Outside, ``depths`` are the tokens
that each sample shares with the sample before it.

The folder is pure. It relies on ``model`` and knows no packs.
"""
