"""Run: start a broker and producers around one command, or in threads of this process.

- ``command``: ``streampack run``: starts a broker, producers and a command, watches them and ends them together.
- ``child``: one daemon as a child process, with its log lines.
- ``host_relay``: the relay of this host, for ranks that read from a broker on another host.
- ``orphans``: the guard process, which ends all processes below it, so that none outlives ``streampack run``.
- ``kernel_calls``: the calls of compiled kernels in a run, for ``streampack kernels``.
- ``local``: ``streampack.local``: a broker and a producer in threads, and the client that reads from them.

``command`` runs the commands of ``daemons`` as processes; ``local`` uses the classes behind them. Both end everything
that they started, in any case.
"""
