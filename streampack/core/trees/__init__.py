"""Trees: the samples of a group whose tokens begin alike, with each shared run of tokens once.

- ``prefix_tree``: builds the tree of a group, and says what it costs.
- ``shared_prefixes``: a tree as one number for each sample: its order, the runs that fit a pack, paths and segments.

The folder is pure. It relies on ``model`` and knows no packs.
"""
