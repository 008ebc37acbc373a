"""Protocol: the messages between peers, and the events and effects of the state machines.

- ``message``: the envelope, and the messages of both producers and trainers.
- ``producer_messages``: the messages between producers and the broker.
- ``trainer_messages``: the messages between trainers and the broker.
- ``relay_messages``: the messages between relays and the broker, and from relays to their readers.
- ``standby_messages``: the messages between the active broker and its standby.
- ``events``: the events and effects that all state machines share.
- ``effects``: the events and effects of the broker; the log's are in ``journal.log_effects``.
- ``rights``: the messages that the key of a peer allows.

A state machine takes events and returns effects; its shell, the program around it, performs the effects.

Control messages carry state, not changes of state, so they may be lost, repeated or reordered. The package does not
know their bytes: ``wire`` encodes messages.
"""
