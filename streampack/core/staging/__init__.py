"""Staging: pushed samples that are safe in the log and wait for their late fields before they are admitted.

- ``staged_chunk``: one chunk, the values that came for it, and which of its samples are complete.
- ``staged_partition``: the chunks, marks and the end of one partition, and what may be admitted next.
- ``dropped_samples``: the samples that were dropped, and why.
- ``amendments``: checks the values of an ``Amend`` message.
- ``tickets``: how many samples programs may generate ahead, if the feed is paced.
- ``staging``: the staged partitions of all feeds: their records, timeouts and answers.

A partition with late fields has two counts of its samples. A sample is *sent* with one number, by which its values name
it. It is admitted with another, in the order in which samples are complete. ``intake`` passes complete samples on as
ordinary chunks. So merge, steps and replay know nothing of late fields. A paced feed stages all pushed samples. It
admits them only when a step needs them, the oldest policy first.
"""
