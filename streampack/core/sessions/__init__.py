"""Sessions: the peers' ends of the protocol, as pure state machines.

- ``producer_base``: what every producer does: it makes itself known, and sends no further than it may.
- ``producer_session``: a producer that reads its samples, and can read them again.
- ``push_session``, ``push_buffer``: a producer of samples that exist once, and what it keeps until they are safe.
- ``client_session``, ``client_events``: a rank that reads steps, and what its trainer asks of it.
- ``backoff``: when a message without an answer is sent again.
- ``patience``: how long a trainer waits before it is told that nothing will come.

A session sends states and repeats them until they hold, so no message has to arrive. A client, and each lease of a
producer, is in one phase of an enum; a table has the phases that may follow. Sessions know the protocol. They do not
know the broker's insides, sockets or clocks: time comes as an event.
"""
