"""The ledger: the log's index for people. It records which sample went into which step, and into which pack.

Records of the log pass through these files in order:

- ``state_dir``: the folder of a log and its ledger; reads new records from the log and updates the ledger.
- ``ledger``: turns records into rows, and answers questions from the rows.
- ``step_rows``: encodes a step in about 10 bytes per sample; ``columns``: encodes its columns.
- ``reported_values``: puts the values together that ranks reported for a step.
- ``run_history``: puts the rare records of a run together: rules, changes, lineages, ends.
- ``formed_by``: tells by which of these rules a step was formed.
- ``run_hours``: the hours that ranks trained and waited, in a file beside the ledger.
- ``ledger_tables``: SQLite tables whose rows carry checksums, so that a damaged row is reported and never used.

Recovery never reads the ledger. It can be rebuilt from the log, except for steps that the log no longer has.
"""
