"""Relaying: a relay's session, which speaks for the readers of its host.

- ``relay_events``: the events and effects of the session.
- ``relay_session``: hands messages to the right place, and lets readers attach.
- ``local_readers``: the readers of the host, and the bytes on their way to them.
- ``relay_state``: what all parts of the session share.
- ``node_feed``: the parts of one feed's steps that have come.
- ``relay_requests``: requests steps of the broker, and reports the readers to it.
- ``relay_deliveries``: takes parts from the broker, and sends them to readers.
"""
