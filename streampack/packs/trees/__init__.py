"""Packs whose samples share tokens: the values of tokens, paths and segments.

- ``tree_tokens``: derives the arrays of such packs from the tokens of a message.
- ``pack_paths``: the segments of a pack.
- ``forward_paths``: the paths of packs that are joined for a pass without gradients.

A pack of a run with ``share: prefix`` has two numbers of values. ``T`` counts tokens as the model computes them, each
shared one once. ``P`` counts the tokens of all samples, as if nothing were shared. The folder relies on ``core.trees``.
"""
