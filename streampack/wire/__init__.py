"""The wire: messages, records and snapshots as bytes. No other package knows their encoding.

- ``frames``: encodes messages to frames, and checks and decodes frames.
- ``bundles``: several messages in one, between a relay and the broker.
- ``record_frames``: encodes and decodes records of the log and snapshots.
- ``checksums``: CRC32C of bytes.
- ``sample_checksums``: CRC32C of every sample of a chunk in one pass.
- ``crc_kernels``: compiled code for ``sample_checksums``, for x86-64.

Sockets give and take the frames of a message, the log the bytes of a record. ``decode`` verifies sizes and checksums
before it decodes anything. ``core.protocol`` and ``core.journal`` define messages and records. The package does not
know sockets or files.
"""
