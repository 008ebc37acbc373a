"""Cut a tree that is over a budget into runs of members whose trees fit.

Members are taken in depth-first order of their paths. A member adds the tokens that it does not share with the
member before it. In this order it shares no more with any other. So runs are filled greedily, from left to right.
The prefix repeats in each run. The result depends on the tree and the budget alone.
"""

from __future__ import annotations

import numpy as np

from streampack.core.trees.prefix_tree import PrefixTree


def split_tree(tree: PrefixTree, budget: int) -> tuple[list[list[int]], list[int]]:
    """Return the runs of members whose trees have at most ``budget`` tokens, and the members that are too long alone.

    Returns:
        Runs in depth-first order of paths, each a list of members; and the members with more than ``budget`` tokens.
        Empty rows are in the first run.

    Example:
        >>> import numpy as np
        >>> from streampack.core.trees.prefix_tree import build_tree
        >>> split_tree(build_tree([np.array([1, 1, 2]), np.array([1, 1, 3]), np.array([1, 1, 4])]), 4)
        ([[0, 1], [2]], [])
    """
    runs, too_long, used, before = list[list[int]](), list[int](), 0, list[int]()
    for member in np.argsort(tree.leaves, kind="stable").tolist():
        path = tree.path(member)
        total = int(tree.lengths[path].sum())
        if total > budget:
            too_long.append(member)
            continue
        shared = sum(int(tree.lengths[one]) for one, other in zip(path, before, strict=False) if one == other)
        if not runs or used + total - shared > budget:
            runs.append([])
            used, shared = 0, 0
        runs[-1].append(member)
        used, before = used + total - shared, path
    return runs, too_long
