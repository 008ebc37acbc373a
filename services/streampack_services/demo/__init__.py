"""Demo: the whole service on this machine, checked sample by sample.

- ``demo``: starts a broker, producers and ranks, as a user would, and waits for them.
- ``demo_text``: text that every machine has, as shards.
- ``demo_rank``: one rank: it trains nothing, and checks every pack.
- ``demo_verdict``: compares what ranks report with the source itself.

The demo uses the commands that a user would use, in processes of their own.
"""
