"""Watch: a broker's status in a terminal.

- ``top``: ``streampack top``: asks again and again, until a key ends it.
- ``view_model``: what is shown, as plain values, out of snapshots and events.
- ``top_view``, ``top_ranks``, ``top_text``: the same as lines of text that fit the terminal.
- ``status_report``: ``streampack status``: one snapshot, laid out.

The package asks over HTTP. It does not know the broker's objects.
"""
