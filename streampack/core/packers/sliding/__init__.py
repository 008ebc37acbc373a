"""Packers that slide a window over the stream, and refill it after every pack.

- ``concatenative``: next fit in the order of the stream.
- ``buffer_first_fit``: the window in order of arrival; everything that fits is taken.
- ``sliding_ffd``: first fit decreasing that never stops to empty its window.

They rely on ``window`` for what a packer is and when a window is late.
"""
