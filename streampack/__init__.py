"""streampack: tokens to GPUs with nothing wasted, nothing lost and nobody waiting.

``connect`` attaches a trainer to a broker; ``Producer`` pushes a program's own samples to one, as RL's rollouts;
``local`` is the same loader with no daemon; ``pack_lengths`` packs any list of lengths offline, ``plan_step`` plans an
update over a mesh, and ``way_back`` puts results in the packs' order back into that of the samples.
The library needs no torch and no numba, which a client uses where it is installed (extra ``fast``); what the daemons
need is the extra ``service``.
"""

from typing import TYPE_CHECKING, Any

from streampack.client import Client, connect
from streampack.core.messages import Mesh
from streampack.core.packers import pack_lengths, way_back
from streampack.errors import StreampackError
from streampack.formats import rows
from streampack.invariants import verify
from streampack.local import local
from streampack.packs import Pack, Step
from streampack.planning import StepPlan, plan_step

if TYPE_CHECKING:
    from streampack.push import Producer

__version__ = "0.1.0.dev0"
__all__ = [
    "Client",
    "Mesh",
    "Pack",
    "Producer",
    "Step",
    "StepPlan",
    "StreampackError",
    "connect",
    "local",
    "pack_lengths",
    "plan_step",
    "rows",
    "verify",
    "way_back",
]


def __getattr__(name: str) -> Any:
    """``Producer``, when it is asked for: trainers need none of what it loads."""
    if name == "Producer":
        from streampack.push import Producer

        return Producer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
