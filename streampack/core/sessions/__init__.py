"""Sessions: the peers' ends of the protocol, as pure state machines.

- ``producer_base``: the part that all producers share: hello, pings, and the limits of credit.
- ``producer_session``: a producer that reads its samples, and can read them again.
- ``pushing``: a producer of samples that exist once, and one that gives values to their late fields.
- ``client_session``, ``client_events``, ``client_phases``: a rank that reads steps, and the requests of its trainer.
- ``step_arrivals``: the steps of a rank: parts that have come, whole steps, and steps that the trainer is done with.
- ``route``, ``routed_client``: a rank with a relay on its host, and the way of its messages.
- ``telling_session``: a process that publishes policies, reports values, or reads reported values.
- ``relaying``: a relay, which speaks for the readers of its host.
- ``open_messages``: the messages of a session that the broker has not answered.
- ``backoff``: when a message without an answer is sent again, and when a peer pings.
- ``patience``: how long a trainer waits before it gets an error.

The shell, the program around a session, passes events to its ``handle``: messages, ticks, samples. It performs the
effects that come back: messages to send, chunks to read, steps to deliver.

Every message of a session states what holds ("I have returned 7 steps") and is repeated until it is confirmed. So a
lost message does no harm. A client, a pushing process, and each lease of a ``ProducerSession`` are in a phase of an
enum. A table lists the phases that may follow. A session knows the protocol. It does not know the inside of the broker,
sockets or clocks.
"""
