"""Feed: one feed, from the merge to the readers.

Admitted samples pass the files in this order:

- ``feed``: owns the parts of a feed, and calls them in turn. Trainers connect to a feed.
- ``planner``: merges admitted samples into a window, and gets steps formed from it.
- ``merged_memory``: the limit of the memory for merged samples.
- ``pacing``: gives tickets to programs that generate samples, if the rules pace them.
- ``stream_waits``: the causes for which the merge waits for a partition.
- ``outbox``: holds formed steps until their records are safe (R2) and their payload has come; then readers get them.
- ``mixture``: the weights in force, and what was trained of each stream.

These files are used when trainers report results, change the rules, keep checkpoints or go back:

- ``result_requests``: published policies, reported values, and their subscribers.
- ``live_rules``: the rules, as they change while the feed runs.
- ``checkpoints``: the checkpoints that trainers keep, and the records that the log must keep for them.
- ``resume``: takes snapshots, and restores them.
- ``snapshot_check``: checks a snapshot that a trainer sends, before anything changes.

A feed does not touch another feed. To go to a step, a feed restores a snapshot at or before it, and forms the steps in
between again. The package relies on ``intake``, ``merge``, ``form``, ``serve`` and ``journal``.
"""
