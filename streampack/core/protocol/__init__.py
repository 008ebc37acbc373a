"""Protocol: what peers say, and what the state machines hear and ask for.

- ``message``: the envelope, and the messages that concern both producers and trainers.
- ``producer_messages``, ``trainer_messages``: every other message, each with the side that it concerns.
- ``events``: the events and effects that all state machines share.
- ``effects``: the events that the broker hears, and the effects that it asks its shell for; those of the log are in
  ``journal``.
- ``rights``: what the key of a peer allows it to do.

Control messages carry state, not changes of state, so they may be lost, repeated or reordered. The package does not
know bytes: ``wire`` encodes messages.
"""
