"""The ranks of a feed in a snapshot: read a part at a time, and shown in bounded bytes, by node and worst first.

Its files, in the order in which data passes them:

- ``rank_table``: reads the figures of all ranks into columns, at most 1,024 ranks a turn.
- ``recent_waits``: data waits of the last seconds, and their sums since the start.
- ``slow_ranks``: the ranks for which all others wait.
- ``rank_status``: the types of that part of the snapshot.
- ``rank_figures``: what a snapshot and pages on request show of one pass over all ranks.

The package reads the core's rank registry. It knows neither HTTP nor the rest of the snapshot.
"""
