"""The client: one trainer rank reads the steps of a feed from a broker.

Two threads share the work. The trainer's thread calls ``Client``; the client's thread owns the socket and prefetches.

- ``connect``: ``streampack.connect`` and the ``Client`` that it returns.
- ``ranks``: finds this process's place in the mesh from sizes, a DeviceMesh, or RANK and WORLD_SIZE.
- ``reader``: hands out steps and packs, makes checkpoint states and sends commits; runs in the trainer's thread.
- ``prefetch``: the client's thread, which owns the socket and keeps a few steps ready.
- ``state``: writes and reads the state that a trainer saves with its model.
- ``reporting``: publishes policies, and reports values of samples.
- ``results``: reads the values that trainers report; needs no rank.
- ``reading_stats``: counts steps, packs and tokens, and measures data wait by cause.

Data path: ``prefetch`` receives the messages of a step. The folders ``packs`` and ``views`` turn the messages into
packs or views, which ``reader`` hands to the trainer.

All decisions about messages to the broker are made in ``core.sessions.client_session``.

Invariant: the client's thread holds no reference to ``Client``. A client without references is therefore closed, and
its rank becomes free.
"""
