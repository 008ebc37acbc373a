"""Serve: the trainers' side of the broker. It gives ranks to readers, and sends every rank its steps.

A *reader* is a trainer's process that reads the steps of one rank of the mesh. An *attempt* is one generation of all
ranks: it begins when every rank is ready. A reader's message passes the files in this order:

- ``readers``: handles the message, drops silent readers, and owns the other parts.
- ``rank_reader``: a reader, its phases, and the connection that receives its steps: its own, or its relay's.
- ``rank_registry``: the reader that holds each rank, and the readers that claim one.
- ``attaching``, ``snapshot_requests``: let readers attach, also with the snapshot of a checkpoint.
- ``attempts``, ``join_texts``: begin attempts, at the earliest step that a rank asks for, and say who is missing.
- ``served_steps``, ``progress``: keep each step until every rank has returned it.
- ``receivers``: the connections that receive parts, and the bytes on their way.
- ``step_sender``: sends the parts of steps, and says why a step waits.
- ``checkpoint_questions``: answers questions about checkpoints.
- ``step_source``: the functions of a feed that readers need.

A rank *returns* a step when its trainer is done with it. Every step goes to all ranks or to none (R3), and reads are
pure (R4). A step goes to a rank once four things hold:

- The log is safe up to the step's record (``feed.outbox``), so the step is formed.
- The rank takes part in the attempt, which begins when all ranks are ready (``RankRegistry.all_wait``).
- The rank has asked for the step (``Get``).
- Bytes in flight to this rank, and to all ranks, are below their limits (``deal.part_flow``).

A rank is dead after ``READER_SILENT_S`` or three ping intervals of silence (``Readers.tick``). If another process
claims the rank, ``CLAIM_S`` is enough (``AttemptCoordinator._decide``).

The package relies on ``deal.step_cache`` for the messages of a step. It does not know samples, or how steps are formed.
"""
