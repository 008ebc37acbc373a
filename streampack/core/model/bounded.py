"""Types whose values are bounded: the limits on each kind of value that a peer may send.

Messages, records and the mesh are made of these types, so a value out of bounds is rejected where it is decoded.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=2000)]
Host = Annotated[str, Meta(max_length=255)]
"""A host name; 255 characters are the longest that DNS allows."""
Small = Annotated[int, Meta(ge=0, lt=2**20)]
Digest = Annotated[bytes, Meta(max_length=16)]
PingS = Annotated[float, Meta(ge=0.1, le=60.0)]
MAX_STREAMS = 1024
MAX_CHUNK_SAMPLES = 16_384
"""The most samples in one chunk. Credits always allow this many to a partition without waiting samples."""

MOST_VERSION = 2**53
"""Highest version of a policy: beyond it, not every program holds each integer."""
