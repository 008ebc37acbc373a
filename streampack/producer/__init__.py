"""The producer: turns samples into chunks and sends the chunks to a broker.

A producer that reads files, in the order in which data passes:

- ``first_rows``: checks before a run that the first rows of each source have the configured keys.
- ``sorted_rows``: finds sources whose files are sorted and hardly mixed.
- ``loop``: one thread owns the socket, another reads and tokenizes records and makes chunks.
- ``lease_limits``: applies a lease's limits, policies and fields to records.
- ``media_values``: turns the media of a sample into the bytes that are sent.
- ``chunk``: the parts of a chunk: a batch of samples, and samples gathered for a batch.
- ``chunks``: turns records into batches, and batches into chunks with checksums.

A program that pushes its own samples:

- ``push``: ``streampack.Producer``, the interface for the program.
- ``pushed_samples``: checks and converts the program's samples, and makes chunks.
- ``tree_groups``: makes the chunk of a group whose samples share tokens.
- ``push_thread``: the thread that sends the chunks.
- ``late_values``, ``amend_thread``: convert and send values of late fields.

A batch here is the samples of one chunk. The sessions in ``core.sessions`` decide which messages are sent and when. The
folder knows leases, records and chunks. It does not know steps, packs or trainers.
"""
