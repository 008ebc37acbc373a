"""Protocol: what peers say, and what the state machines hear and ask for.

- ``messages``: every message between producers, broker and clients.
- ``events``: the events and effects that all state machines share.
- ``effects``: the events that the broker hears, and the effects that it asks its shell for.
- ``rights``: what the key of a peer allows it to do.

Control messages carry state, not changes of state, so they may be lost, repeated or reordered. The package does not
know bytes: ``wire`` encodes messages.
"""
