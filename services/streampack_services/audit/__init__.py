"""Audit: what went where, whether everything is there exactly once, and a step again.

- ``why``: what was in a step, and where a sample went.
- ``origins``: the file and row that a sample came from.
- ``verify``: the ledger's rows against each other, and against the log.
- ``conservation``: which samples of a stream are where, and which are missing.
- ``audit_report``: shows the answers to a person.
- ``replay``, ``rerun``: one step again, bit for bit, by a broker on a copy of the log.

The package relies on ``ledger``. It only reads; a broker that runs hears nothing of it.
"""
