"""The parts of the broker's main loop. ``broker.service`` owns one of each, and calls them in its turns.

- ``allowed_keys``: the keys that may connect, read again when their file changes.
- ``peer_sockets``: the socket for producers and the one for trainers, with limits on what their peers send ahead.
- ``peer_messages``: decodes messages to events for the core, in fair turns; sends the core's messages.
- ``peer_reports``: log lines that peers cause, and their limits.
- ``kept_hours``: writes the hours of the ranks to the state_dir, in a thread of its own.
- ``step_times``: the times of the last steps, which ``kept_hours`` writes.
- ``stopping``: hands over to the standby, waits for it, or drains.

Only the broker's thread uses them, unless a method says otherwise. They return events, which the service hands to the
core.
"""
