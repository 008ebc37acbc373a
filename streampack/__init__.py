"""streampack: tokens to GPUs with nothing wasted, nothing lost and nobody waiting.

``connect`` attaches a trainer to a broker; ``local`` is the same loader with no daemon; ``pack_lengths`` packs any
list of lengths offline.
The library needs no torch and no numba; what the daemons need is the extra ``service``.
"""

from streampack.client import Client, connect
from streampack.core.messages import Mesh
from streampack.core.packers import pack_lengths
from streampack.errors import StreampackError
from streampack.invariants import verify
from streampack.local import local
from streampack.packs import Pack, Step

__version__ = "0.1.0.dev0"
__all__ = ["Client", "Mesh", "Pack", "Step", "StreampackError", "connect", "local", "pack_lengths", "verify"]
