"""The wire: messages, records and snapshots as bytes. No other package knows their encoding.

- ``frames``: a message to frames and back. It checks everything before it believes it.
- ``record_frames``: a record or a snapshot to bytes and back.
- ``checksums``: CRC32C of bytes.
- ``sample_checksums``: CRC32C of every sample of a chunk in one pass.
- ``crc_kernels``: the same in compiled code, for x86-64.

The package relies on ``core.protocol`` and ``core.journal`` for what a message and a record are. It does not know
sockets or files.
"""
