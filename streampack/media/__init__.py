"""Media that samples refer to: the client fetches their bytes, checks them, and decodes them ahead of use.

- ``media``: the options of a trainer, ``Media``.
- ``fetcher``: fetches and decodes in threads, each item of a step once.
- ``processor``: decodes images as the processor of a folder does.

Samples name the bytes with a ``Reference`` (``core.media.references``), and ``sources.files.read_bytes`` reads them.
Nothing of this runs in brokers or relays.
"""
