"""The ledger: the log's index for people. Which sample went into which step, and where in which pack?

- ``state_dir``: the folder of a log and its ledger; brings the ledger up to date.
- ``ledger``: from records to rows, and from a question to rows.
- ``step_rows``: a step as the ledger keeps it, in about 10 bytes a sample.
- ``run_history``: what the rare records say of a run: rules, changes, lineages, ends.
- ``ledger_tables``: SQLite tables whose rows are believed only while they agree with their checksums.

No recovery depends on the ledger: it can be made again from the log, as far as the log reaches back.
"""
