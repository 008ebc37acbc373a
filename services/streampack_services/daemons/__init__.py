"""Daemons: the broker and the producers as processes.

- ``broker``: ``streampack broker``: a broker's service with HTTP beside it, its rendezvous file, and signals.
- ``standby``: a broker that is not active yet: it copies the log of the active one.
- ``producer``: ``streampack produce``: processes that read and send samples, and the parent that watches them.
- ``relay``: ``streampack relay``: reads once for all ranks of a host, and serves them.
- ``progress``: adds up the progress of a producer's processes, and shows it.
- ``rendezvous``: the file that tells others a broker's addresses.
- ``signals``: the signals that end a daemon.
- ``systemd``: tells systemd the state of a daemon.

The work itself is in ``streampack_services.broker`` and ``streampack.producer``; this folder starts and ends it.
"""
