"""The cause that delays training of a feed: one decision, which every view shows.

Its files, in the order in which data passes them:

- ``feed_waits``: the reason that a feed's next step is missing, since when, and the log lines about it.
- ``waiting_for``: the type of that reason in a snapshot.
- ``headline``: decides from the reason, the recent data waits and the slow ranks what people are told.

``streampack status``, ``top``, the page, systemd and the metric ``streampack_delayed`` show the headline. The package
knows neither HTTP nor the rest of the snapshot.
"""
