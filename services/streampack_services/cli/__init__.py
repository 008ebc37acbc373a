"""The command line ``streampack``: parse arguments, run a command, print its result or its error, return an exit code.

``main`` defines the command, reads the arguments and maps each error to one line on standard error and an exit code.
``main`` also adds the commands of the other files, one theme per file:

- ``cli_daemons``: ``broker``, ``produce``, ``relay``, ``run``: start the processes of a run.
- ``cli_check``: ``check`` a configuration, ``demo``: try the service.
- ``cli_watch``: ``status``, ``top``, ``health``: look at a running broker.
- ``cli_control``: ``set weights``, ``set streams``, ``skip``: change the mixture or the steps of a running broker.
- ``cli_stages``: ``set``: change the rules of a running broker, list and cancel changes.
- ``cli_plan``: ``plan`` before a run, ``report`` after it.
- ``cli_audit``: ``why``, ``replay``, ``ledger``: show what happened in a run.
- ``cli_export``: ``export``: write the files for a cluster.
- ``cli_kernels``: ``kernels``: compile kernels before a run.
- ``cli_keys``: ``keys``: make secrets, and allow or revoke keys.
- ``cli_options``: the options that several commands share, and the printing of results.

Each function here has the arguments and the help text of one command. The function imports the folder that does the
work only when the command runs, so that ``--help`` is quick. Only this folder and ``demo`` print.
"""
