"""A broker without sockets, threads or a clock, for tests: one shell that performs its effects, and runs around it.

Files, from the inside out:

- ``disk``: a log in memory.
- ``chunks``: columns of chunks and of messages with samples, made from lengths.
- ``shell``: perform a broker's effects, with a log, an arena, or neither.
- ``planned``: the steps of a feed without a broker, which those of a run must equal.
- ``live``: a whole run with producers that read, and one rank.
- ``rollouts``: a run whose samples are pushed.
- ``marked_rollouts``, ``late_rollouts``, ``paced_rollouts``: the same in batches, with values that come later, and with
  tickets.
- ``made_up``: steps and snapshots that no broker planned.
"""
