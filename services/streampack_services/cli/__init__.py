"""The command line: parses arguments, calls, and turns errors into one line and an exit code.

- ``main``: the command ``streampack``, its options, and the commands that start something.
- ``cli_watch``: ``status``, ``top``, ``health``.
- ``cli_control``: ``set``, ``skip``: changes of a running broker.
- ``cli_keys``: ``keys``: secrets, and who may connect.
- ``cli_plan``: ``plan`` before a run, ``report`` after it.
- ``cli_audit``: ``why``, ``replay``, ``ledger``: what happened.
- ``cli_export``: ``export``: files for a cluster.

Commands import what they run when they run, so that ``--help`` is quick. Only this package and the demo print.
"""
