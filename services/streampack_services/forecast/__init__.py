"""Forecast: what rules make of lengths, by the broker's own planning.

- ``lengths``: the lengths of samples of each stream, in the order of the broker.
- ``sampling``: lengths out of sources: some samples of each stream, tokenized.
- ``run_lengths``: lengths of what a run has served, out of its log or its status.
- ``forecast``: forms and deals the lengths under some rules, and counts.
- ``rank_loads``: what a mesh makes of the steps: useful time, padding, waiting.
- ``pass_size``: how many steps a pass has of which only a sample is known.

FORM and DEAL are those of ``streampack.core``. The package knows lengths, never tokens.
"""
