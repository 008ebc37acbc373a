"""Pushing: the sessions of a program that sends samples of its own, which exist once.

- ``push_session``: sends the samples of one partition.
- ``push_buffer``: the buffer of samples that are not safe yet.
- ``ticket_counts``: how many samples the program may generate, in a paced feed.
- ``amend_session``: gives values to the late fields of samples, also of those that other processes sent.
"""
