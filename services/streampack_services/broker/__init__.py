"""The broker daemon around the pure broker of ``streampack.core``: sockets, memory, threads and clock.

The core decides; this package performs. Its files:

- ``service``: start, recovery and main loop: hands events to the core, and performs the effects that it returns.
- ``serving``: a folder: the parts of the loop: sockets, messages, log lines, the end.
- ``turns``: messages that wait, and fair turns of keys and connections.
- ``authorization``: the folder of keys that may connect: reading and changing it.
- ``arena``, ``arena_kernels``: the tokens and fields of all samples that the broker holds, in memory of a fixed size.
- ``machine_memory``: the memory of the machine or its container.
- ``memory_plan``: how ``memory`` is divided among feeds and partitions; gives freed memory back.
- ``memory_peak``: an estimate of the memory of the whole process, for a container's limit.
- ``log_keeper``: the broker's log: appends and reads records, tells the core which are safe, deletes old ones.
- ``status``: the types of the broker's snapshot: every field with its unit.
- ``reporter``, ``steps_left``: take the snapshot twice a second.
- ``ranks``: a folder: the part of the snapshot about ranks.
- ``changes``: a folder: changes of the rules that people ask for, and the part of the snapshot about changes.
- ``causes``: a folder: the cause that delays training, as all views show it, and log lines about long waits.
- ``report_limit``: limits the log lines that peers can cause.

One thread owns the sockets, the arena and the core; a second runs FORM. HTTP and metrics read the snapshot, so the
broker's thread never waits for them.
"""
