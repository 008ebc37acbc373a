"""Watch: a broker's status in a terminal.

- ``top``: ``streampack top``: asks again and again, until a key ends it.
- ``view_model``: the one view that both commands render: the last status, events, and what changed lately.
- ``top_view``: the page of ``top``: blocks of lines that fit the terminal, and the table of streams.
- ``top_ranks``, ``top_text``: the ranks as a table or a map; columns, bars and charts.
- ``status_report``: ``streampack status``: the view of one status, printed once in full.

The package asks over HTTP. It does not know the broker's objects.
"""
