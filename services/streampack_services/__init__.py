"""The daemons and the command ``streampack``: sockets, disk, HTTP, signals and the command line around the library.

- ``entry``: the entry point of the command.
- ``cli/``: the commands, with their arguments and help.
- ``daemons/``, ``run/``: the broker and the producers as processes, alone or around a training command.
- ``broker/``: the shell around the pure broker of ``streampack.core``: sockets, memory and clock.
- ``log/``, ``ledger/``, ``audit/``: the durable record of a run, its index, and questions about it.
- ``http/``, ``watch/``: the status of a broker, over HTTP and in a terminal.
- ``forecast/``, ``plan/``, ``check/``: what a configuration does, before a run.
- ``demo/``: the whole service on one machine.
- ``export``: files to run the service elsewhere; ``export_limits``: their numbers, such as memory; ``export_warnings``:
  settings that do not work there.
- ``figure``: how a status declares a figure, and how to add one.
- ``logs``, ``amounts``: log lines, and numbers as text; ``terminal``: consoles and tables of reports.
- ``own_runs``: the brokers of a user on this host.
- ``descriptors``: file descriptors that connections may not take.
- ``web/``, ``deploy/``: data: the live page, and the files that ``streampack export`` fills in.

The services import the library, and the library never imports them. No service imports torch.
"""
