"""The client: a rank's place at a broker, from the socket to ``step``.

- ``connect``: ``streampack.connect`` and the ``Client`` that it returns.
- ``ranks``: which rank of which mesh this process is, from what its user already has.
- ``reader``: steps, packs, states and commits, as the trainer asks for them.
- ``prefetch``: the thread that owns the socket and keeps a few steps ready.
- ``state``: what a trainer saves with its model, and what a loader goes on from.
- ``reading_stats``: how much came, and how long the trainer waited for it, and for what.

``core.sessions.client_session`` decides what is said to the broker; ``packs`` and ``views`` make what the trainer gets.
The thread of ``prefetch`` knows no ``Client``, so a client that is dropped gives its rank up.
"""
