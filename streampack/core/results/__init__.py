"""Results: what trainers tell back: values of samples, and the versions of published policies.

- ``step_values``: the values of one feed's steps: it records parts of ranks, and answers once they are safe.
- ``pending_steps``: the steps of which some parts have come.
- ``step_ranges``: the steps that are complete, also those whose values the broker no longer has.
- ``subscribers``: the complete steps, and those who read them.
- ``merge_parts``: merges the parts of all ranks.

A trainer's rank reports values of its samples. Once every rank has, subscribers get the step's values. Values are
records of the log, and no step depends on them.
"""
