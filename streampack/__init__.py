"""streampack: tokens to GPUs with nothing wasted, nothing lost and nobody waiting.

``connect`` attaches a trainer to a broker; ``Producer`` pushes a program's own samples to one, as RL's rollouts;
``local`` is the same loader with no daemon; ``pack_lengths`` packs any list of lengths offline, ``plan_step`` plans an
update over a mesh, and ``way_back`` puts results in the packs' order back into that of the samples.
The library needs no torch and no numba, which a client uses where it is installed (extra ``fast``); what the daemons
need is the extra ``service``.

The folders are stages of the data's way; ``__init__`` of each says what its files do. Beside them:

- ``local``: the loader with no daemon.
- ``planning``: ``plan_step``.
- ``errors``: every error, in one tree.
- ``version``: the version, of the library and of the services.
- ``__main__``: the command ``streampack``.

No module imports this one: it imports each name from where the name is defined.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streampack.batch_checks.step_check import verify
from streampack.client.connect import Client, connect
from streampack.core.model.mesh import Mesh
from streampack.core.packers.closed import pack_lengths, way_back
from streampack.errors import StreampackError
from streampack.local import local
from streampack.packs.pack import Pack
from streampack.packs.step import Step
from streampack.planning import StepPlan, plan_step
from streampack.version import __version__ as __version__
from streampack.views.padded import rows

if TYPE_CHECKING:
    from streampack import integrations as integrations
    from streampack.producer.push import Producer
    from streampack.training.attention import varlen_attention
    from streampack.training.loss import packed_loss, per_sample, reduce_metrics
    from streampack.training.masks import block_causal_mask, block_causal_mask_mod, document_ids

__all__ = [
    "Client",
    "Mesh",
    "Pack",
    "Producer",
    "Step",
    "StepPlan",
    "StreampackError",
    "block_causal_mask",
    "block_causal_mask_mod",
    "connect",
    "document_ids",
    "local",
    "pack_lengths",
    "packed_loss",
    "per_sample",
    "plan_step",
    "reduce_metrics",
    "rows",
    "varlen_attention",
    "verify",
    "way_back",
]


_LATER = {
    "Producer": "streampack.producer.push",
    "block_causal_mask": "streampack.training.masks",
    "block_causal_mask_mod": "streampack.training.masks",
    "document_ids": "streampack.training.masks",
    "integrations": "streampack.integrations",
    "packed_loss": "streampack.training.loss",
    "per_sample": "streampack.training.loss",
    "reduce_metrics": "streampack.training.loss",
    "varlen_attention": "streampack.training.attention",
}
"""What is loaded when it is asked for, since most trainers never do: a name, and the module that has it or is it."""


def __getattr__(name: str) -> Any:
    """What ``_LATER`` has."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name])
    return module if _LATER[name] == f"{__name__}.{name}" else getattr(module, name)
