"""Results: what trainers tell back: values of samples, and the versions of published policies.

- ``step_values``: the values of one feed's steps: parts of ranks, complete steps, and subscribers that wait for them.
- ``step_ranges``: the steps that are complete, also those whose values the broker no longer has.
- ``merge_parts``: merges the parts of all ranks.

A trainer's rank reports values of its samples. Once every rank has, subscribers get the step's values. Values are
records of the log, and no step depends on them.
"""
