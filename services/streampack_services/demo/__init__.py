"""Demo: run the whole service on this machine and check every sample.

``demo`` starts the processes and shows the result. A run passes through the files in this order:

- ``demo_text``: writes the text of the Python standard library as tar shards.
- ``demo``: starts a broker, two producers and the ranks of a mesh, and waits for them to end.
- ``demo_rank``: one rank, which trains nothing but checks every pack and takes the checksum of every sample.
- ``demo_verdict``: reads the source once more, compares it with the ranks' reports, and computes the figures.

The broker and the producers are processes that run the same commands as a user's; the ranks use the public client.
The result is good only if every sample arrived exactly once, with the right checksum.
"""
