"""Daemons: the broker and the producers as processes.

- ``broker``: the broker's process: its service, HTTP beside it, and signals.
- ``producer``: ``streampack produce``: several processes that read and send, and one that watches them.
- ``progress``: how far a producer's processes are.
- ``rendezvous``: the file in which a broker says where it is.
- ``systemd``: what systemd is told of a daemon.

The package relies on ``streampack_services.broker`` and ``streampack.producer`` for the work itself.
"""
