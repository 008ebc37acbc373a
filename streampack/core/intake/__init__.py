"""Intake: the producers' side of the broker. Who sends which partition, and is a chunk good?

- ``leases``: hears producers' messages and answers them.
- ``producers``: who offers which streams, and who holds which partition.
- ``rebalance``: shares partitions out, and moves them when producers come and go.
- ``credits``: tells each holder where its partition begins, how much it may send, and what is safe.
- ``lease_terms``: what the rules ask of a stream's samples.
- ``chunk_check``: checks a chunk against itself, the declared fields and the terms.
- ``intake``: takes the samples of one partition, in order, once each, and never more than was granted.
- ``admission``, ``admission_kernels``: enter the samples of a good chunk into the table and the merge.
- ``partition_accounts``: what of each partition was taken, what waits, and where it is read again from.
- ``partitions``: the partitions' numbers, and what the log has of each.

The package relies on ``merge``, which gets the samples, and on ``journal``, which records them. It does not know packs,
steps or trainers.
"""
