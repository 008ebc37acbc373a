"""Intake: the producers' side of the broker. Who sends which partition, and is a chunk good?

- ``leases``: hears producers, serves the feeds' needs, and joins the other parts.
- ``partitions``: the partitions' numbers, and the intake of each.
- ``partition_records``: what the log has of each partition.
- ``partition_accounts``: takes samples, and knows what waits and where a partition is read again from.
- ``intake``: one partition's samples, in order, once each, and never more than was granted.
- ``producers``: the producers that are there, which streams each offers, and which partitions each holds.
- ``rebalance``: shares partitions out, and moves them when producers come and go.
- ``credits``: tells each holder where its partition begins, how much it may send, and what is safe.
- ``lease_terms``: what the rules ask of a stream's samples.
- ``overlong``: the policy for samples that are longer than a pack.
- ``chunk_check``: checks a chunk against itself, the declared fields and the terms.
- ``admission``, ``admission_kernels``: enter the samples of a good chunk into the table and the merge.

The package relies on ``merge``, which gets the samples, and on ``journal``, which records them. It does not know packs,
steps or trainers.
"""
