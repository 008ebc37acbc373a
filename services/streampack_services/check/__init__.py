"""Check: a configuration, explained.

- ``check``: every value, where it came from, and what follows from it.
- ``preview``: the first samples of a source as tokens, and which of them are learned.

The package starts nothing. It relies on ``streampack.config`` and on the broker's own planning.
"""
