"""Run: daemons around one command, or in threads of this process.

- ``command``: ``streampack run``: starts a broker, producers and a command, and ends them together.
- ``child``: one daemon as a child process.
- ``orphans``: a guard, so that no child outlives its parent.
- ``local``: ``streampack.local``: a broker and a producer in threads, and the client that reads from them.

The parts are those of ``daemons``; nothing here is another way of packing.
"""
