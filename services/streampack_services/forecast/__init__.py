"""Forecast: predict the steps that a broker forms from some lengths, by the broker's own planning.

- ``lengths``: sample lengths of each stream, in the broker's order (``Workload``); read from a file of numbers.
- ``media_sizes``: sizes of samples' media, and their cost.
- ``sampling``: lengths from sources, by tokenizing some samples of each stream.
- ``run_lengths``: lengths that a run has served, from its log or from its broker's status (``Served``).
- ``run_order``: the order of a run's samples: shares of streams, lengths and displacement, by tenths of its steps.
- ``sharing``: the tokens that groups in a run's log share.
- ``forecast``: merges the lengths, forms steps and computes the figures (``Forecast``).
- ``rank_loads``: deals the steps to the ranks of a mesh, and sums up padding, cost and useful time.
- ``pass_size``: estimates the steps of a pass from a sample of it.

FORM and DEAL are those of ``streampack.core``, so the forecast of a whole pass is exact. The folder needs lengths only,
except ``sharing``, which reads recorded tokens. ``plan`` uses it before a run, ``report`` after it.
"""
