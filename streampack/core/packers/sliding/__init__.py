"""Packers that slide a window over the stream, and refill it after every pack.

- ``concatenative``: next fit in the order of the stream.
- ``buffer_first_fit``: the window in order of arrival; everything that fits is taken.
- ``sliding_ffd``: first fit decreasing over a window that is refilled after every pack.

``concatenative`` looks at one pack only. The other two choose packs from the ``SlidingWindow`` of ``packers.window``.
"""
