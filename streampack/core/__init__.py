"""The pure core: events in, effects out. No clock, no I/O, no threads, no randomness.

It reads in the order data flows: ``samples``, ``rules``, ``intake``, ``merge``, ``packers``,
``form``, ``deal``, ``layout``; ``messages`` are what travels, and ``producer_session``,
``broker`` and ``client_session`` are the three state machines that join them.
"""
