"""Journal: what the broker decides, as records in a log.

- ``recorder``: from a decision to a record and a line of history, in one move.
- ``log_records``: every kind of record.
- ``journal``: gives records their numbers, and knows which are safe.
- ``log_effects``: what the log is asked to do, and the events that answer.
- ``history``: what is recorded of one feed; a new broker fills it from the log.

Nothing goes out that a record which is not safe decides (R1, R2). The package does not know bytes, files or disks:
``wire`` encodes records, and the services write them.
"""
