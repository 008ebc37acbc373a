"""Trees: the samples of a group whose tokens begin alike, with each shared run of tokens once.

- ``prefix_tree``: builds the tree of a group, and says what it costs.
- ``tree_split``: cuts a tree that is over a budget into runs of members whose trees fit.

The folder is pure. It relies on ``model`` and knows no packs.
"""
