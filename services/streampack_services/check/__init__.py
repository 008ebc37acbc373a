"""Check: explain a configuration before a run.

- ``check``: every value of broker.yaml or producer.yaml, where it came from, what it means, and what follows from it.
- ``compare``: whether the files of one run fit together.
- ``stage_columns``: the stages of a run side by side.
- ``summary``: the short answer.
- ``preview``: the first samples of each stream as tokens, and which tokens are learned.

Nothing is started. The values that follow come from the same planning that a broker uses (``broker.memory_plan``).
"""
