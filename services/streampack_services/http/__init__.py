"""HTTP: what a broker says over HTTP, and the changes that it is asked for.

- ``server``: the application and its thread: probes, status, metrics, the live page, changes.
- ``http_guard``, ``http_limits``: who may ask, and how much one client may take.
- ``control``: changes of a running broker: weights, streams, steps to skip.
- ``metrics``, ``metric_rows``: the snapshot as Prometheus metrics: one row of a table each.
- ``page``: the files of ``web/``.
- ``history``, ``timeline``: figures over time, in bounded memory.
- ``http_client``: the other end: what the command line asks a broker.

All answers come from the broker's last snapshot, so they never make the broker wait. The package relies on
``broker.status`` for the types of the snapshot.
"""
