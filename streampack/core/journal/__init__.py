"""Journal: the broker's decisions as records in a log.

- ``recorder``: turns a decision of a feed into a record, and adds it to the feed's history.
- ``log_records``: every kind of record.
- ``journal``: numbers the records, and tracks which records are safe.
- ``log_effects``: the effects that write, read and cut the log, and the events that answer.
- ``key_index``: the recorded keys of a pushed stream, so that each sample is admitted once.
- ``history``: the recorded steps, snapshots and chunks of one feed; a new broker fills it from the log.

A record has a log sequence number (LSN), which counts all records of the run. A record is *safe* once the log has
stored it as durably as the settings demand. The broker sends nothing that depends on an unsafe record (R1, R2). The
package does not know bytes, files or disks: ``wire`` encodes records, and the services write them.
"""
