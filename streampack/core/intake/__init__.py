"""Intake: the producers' side of the broker. It leases partitions to producers, and checks and admits their samples.

A producer's message passes the files in this order:

- ``leases``: handles the message. It owns the other parts, and also serves the feeds.
- ``producers``: the producers that are connected, which streams each offers, and which partitions each holds.
- ``rebalance``: shares partitions out, and moves them when producers come and go.
- ``credits``: sends each holder its lease, its credit, and which of its samples are safe.
- ``chunk_check``: checks a chunk against itself, the declared fields, the stream's terms, its position and credit.
- ``partition_accounts``: records and admits a good chunk, and knows where each partition is read again from.
- ``staged_intake``: lets samples wait for late fields, or for their turn, and admits those that are complete.
- ``partition_records``: writes records of partitions to the log, and reads those of earlier brokers.
- ``admission``, ``admission_kernels``: enter the samples of a good chunk into the sample table and the merge.
- ``overlong``: the policy for samples that are longer than the budget of a pack.

These files hold the state and the rules that the files above share:

- ``partitions``: the numbers of all partitions, and the stream and the intake of each.
- ``intake``: the position in one partition: samples in order, once each, and never more than credit allows.

Every partition has at most one holder, and every sample is admitted once. The samples go to ``merge``, and the records
to ``journal``. The package does not know packs, steps or trainers.
"""
