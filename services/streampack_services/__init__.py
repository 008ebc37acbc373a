"""The daemons and the command: sockets, disk, HTTP, signals and the command line around the library's pure core.

- ``entry``: where the command ``streampack`` begins.
- ``cli/``: what the arguments of each command mean.
- ``daemons/``, ``run/``: the broker and the producers as processes, and around a command.
- ``broker/``: the shell of the pure broker: sockets, memory and clock.
- ``log/``, ``ledger/``, ``audit/``: what was decided: its bytes, its index, and questions about it.
- ``http/``, ``watch/``: what a broker says of itself, over HTTP and in a terminal.
- ``forecast/``, ``plan/``, ``check/``: what a configuration would do, before a run.
- ``demo/``: the whole on one machine.
- ``export``: files to run the service elsewhere.
- ``logs``, ``amounts``: log lines, and numbers as people read them.
- ``web/``, ``deploy/``: data: the live page, and the files that ``streampack export`` fills in.

The services rely on the library; the library does not know them. No service imports torch.
"""
