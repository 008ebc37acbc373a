"""The log: numbered records of bytes, appended, safe a little later, and read again after a crash.

- ``log``: appends, reads and cuts. It never waits for the disk.
- ``log_writer``: the thread that writes and syncs groups of records, and waits where the disk is full.
- ``segments``: the files: what their bytes mean, and what is left of them after a crash.

The package knows bytes. It does not know what a record says.
"""
