"""Protocol: the messages between peers, and the events and effects of the state machines.

- ``message``: the envelope, the bases of messages, and the messages of both producers and trainers.
- ``rights``: what the key of a peer allows.
- ``producer_messages``: the messages between producers and the broker.
- ``trainer_messages``, ``step_part``: the messages between the readers of ranks and the broker.
- ``result_messages``: the messages of processes without a rank, which publish policies, report values or read them.
- ``relay_messages``: the messages between relays and the broker, and from relays to their readers.
- ``standby_messages``: the messages between the active broker and its standby.
- ``events``: the events and effects that all state machines share.
- ``effects``: the events and effects of the broker; the log's are in ``journal.log_effects``.
- ``handlers``: tables that lead from the kind of a message or an event to the method that handles it.
- ``recent_events``: the last events of a broker, for bug reports.

A state machine takes events and returns effects; its shell, the program around it, performs the effects.

Control messages carry state, not changes of state, so they may be lost, repeated or reordered. The package does not
know their bytes: ``wire`` encodes messages.

To add a question of a trainer, such as ``AskState``:

1. In ``trainer_messages``, define a ``Question`` and its ``ReaderAnswer``, each with a ``TYPE`` that no other message
   has. Add both to ``TRAINER_MESSAGES``. A message that needs rights of its own says so in ``forbidden_by``.
2. In ``serve.readers``, register a method for the question, ``@_from_readers.of(MyQuestion)``, and let it return the
   answer. A kind without a method fails at import.
3. Relays and sessions need no line: they pass on what they do not treat. The program sends ``Ask(MyQuestion(...))``.
4. For a method of the loader, ask in ``client.reader`` by ``self._prefetching.ask``, and add the method to ``Client``.

Any other message of a reader is a ``ReaderMessage``. A message of the broker needs a method in ``client_session``.
Test the message with a relay and without one, and add an example to ``tests/fuzz/decoders.py``.
"""
