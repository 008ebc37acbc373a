"""Feed: one feed, from the merge to the readers.

- ``feed``: joins the parts of a feed; trainers connect to a feed.
- ``planner``: merges admitted samples, and has steps formed of them.
- ``merged_memory``: how much merged samples may take.
- ``live_rules``: the rules, as they change while the feed runs.
- ``outbox``: holds formed steps until their records are safe and their payload is there.
- ``checkpoints``: the checkpoints that trainers keep, and what the log must keep for them.
- ``resume``: takes snapshots, and goes on from one.
- ``brought``: checks a snapshot that a trainer brings, before anything is changed.

A feed touches no other feed. The package relies on ``intake``, ``merge``, ``form``, ``serve`` and ``journal``. It does
not know sockets, files or time, beyond the events that it is told of.
"""
