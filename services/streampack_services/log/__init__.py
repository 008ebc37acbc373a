"""The log: a durable sequence of numbered records, which a broker appends and reads again after a crash.

- ``log``: appends records, reads them and cuts old ones. The calling thread never waits for the disk.
- ``log_writer``: a thread that writes and syncs records in groups, reports up to which record all are safe, and waits
  if the disk is full.
- ``reserve``: space of the disk that is held back, so that old segments can be deleted on a full one.
- ``segments``: the format of the files, and their recovery after a crash.

A record is a number (lsn), a kind and bytes; the folder does not know what the bytes mean. A record is *safe* once it
survives a power cut (durability ``os``) or the end of the process (``process``). The broker tells others of a record
only when it is safe.
"""
