"""The broker's shell: it gives the pure broker its sockets, memory, threads and clock. Nothing is decided here.

- ``service``: the loop: from frames to events, from effects to sockets, arena and log.
- ``authorization``: who may connect: a folder of keys, watched while the broker runs.
- ``arena``, ``arena_kernels``: the tokens and fields of every sample held, in memory of a fixed size.
- ``machine_memory``, ``memory_plan``, ``memory_peak``: the memory there is, how it is shared out, and what the process
  takes at its peak.
- ``log_keeper``: the broker's log: records in and out, what is safe, and when old records may go.
- ``status``: the types of the broker's snapshot: every field, its unit and its meaning.
- ``reporter``, ``steps_left``: the snapshot, taken twice a second, and log lines about long waits.
- ``report_limit``: how many log lines peers can cause.

The package relies on ``streampack.core.broker``, which decides. HTTP and metrics read the snapshot; the broker's thread
never waits for them.
"""
