"""Media that samples refer to: the client fetches their bytes, checks them, and decodes them ahead of use.

- ``media``: the options of a trainer, ``Media``.
- ``fetcher``: fetches and decodes in threads, each item of a step once.
- ``read_bytes``: reads a range of bytes of a file or of a URL.

Samples name the bytes with a ``Reference`` (``core.media.references``). Nothing of this runs in brokers or relays.
"""
