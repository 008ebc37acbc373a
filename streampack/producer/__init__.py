"""The producer: from samples to chunks that a broker takes.

A producer that reads files:

- ``first_rows``: before a run, whether the first rows of each source have the keys that are asked for.
- ``loop``: one thread owns the socket, another one reads, tokenizes and cuts chunks.
- ``chunks``: from records to chunks, with checksums.
- ``chunk``: what a chunk is made of.
- ``lease_limits``: what a lease asks of samples and of chunks.

A program that pushes its own samples:

- ``push``: ``streampack.Producer``, the interface of the program.
- ``pushed_samples``: checks and converts what the program gives, and makes chunks of it.
- ``push_thread``: the thread that sends the chunks, and what it shares with the program.

``core.sessions`` decides what is sent and when; the modules here only do it. The package knows leases, records and
chunks. It does not know steps, packs or trainers.
"""
