"""How many steps are left of the pass that is read, as far as anybody can know."""

from __future__ import annotations

from typing import Any

from streampack.core.broker import Broker
from streampack.core.feed import Feed


def steps_left(core: Broker, feed: Feed) -> dict[str, Any] | None:
    """``estimate``, ``low`` and ``high``; None where nothing can be known."""
    return None
