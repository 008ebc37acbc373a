"""The broker's HTTP side: status, metrics, probes, the live page, and changes of a running broker.

Its files:

- ``server``: the application and its thread.
- ``http_guard``: checks the token and the host of every request.
- ``http_limits``: limits the time and the connections that clients may take.
- ``control``: changes of a running broker: weights, streams, steps to skip.
- ``metrics``: the Prometheus metrics, found by their declarations in ``broker.status`` and read from a snapshot.
- ``page``: serves the files of ``web/``, and ``/history``.
- ``history``, ``timeline``: keep figures over time, in bounded memory.
- ``http_client``: the client that the command line uses.

All answers come from the broker's last snapshot (types in ``broker.status``), so no request makes the broker wait. Only
``control`` hands a request to the broker's thread.
"""
