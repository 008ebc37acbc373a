"""A broker's status in a terminal: ``streampack top`` and ``streampack status``.

Its files:

- ``top``: ``streampack top``: fetches the status every second and shows it until a key ends it.
- ``view_model``: the view that both commands show: the last status, events, and rates over the last seconds.
- ``top_view``: the page of ``top``: blocks of lines that fit the terminal, and the table of streams.
- ``top_ranks``: the ranks as a table or a map.
- ``top_text``: columns, bars and charts of characters.
- ``status_report``: ``streampack status``: the view of one status, printed in full.

The package fetches everything over HTTP.
"""
