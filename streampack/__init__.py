"""streampack: a streaming data loader that packs samples into token budgets while a run trains.

- Read packs: ``connect`` attaches a trainer to a broker, and ``local`` returns the same loader without daemons.
- Push samples: ``Producer`` sends samples that a program makes, such as RL rollouts, to a broker.
- Pack without a broker: ``pack_lengths`` packs a list of lengths, and ``way_back`` restores the samples' order. The
  function ``plan_step`` plans one optimizer update over a mesh.
- Compute on packs with torch: ``packed_loss``, ``per_sample``, ``target_logprobs``, ``varlen_attention`` and the masks.
- Check batches: ``verify`` checks every invariant of a batch.
- Count: ``ModelFlops`` counts the useful FLOPs of a model.

The library needs neither torch nor numba; a client uses numba if it is installed (extra ``fast``). The daemons need
the extra ``service``.

Each folder is a stage that data passes; its ``__init__`` says what its files do. The modules beside the folders:

- ``local``: the loader without daemons.
- ``planning``: ``plan_step``.
- ``errors``: all exceptions, in one tree.
- ``version``: the version of the library and the services.
- ``__main__``: the command ``streampack``.

No module of the library imports this one. Each imports a name from the module that defines it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streampack.batch_checks.step_check import verify
from streampack.client.connect import Client, connect
from streampack.core.flops.model_flops import ModelFlops
from streampack.core.model.mesh import Mesh
from streampack.core.packers.closed import pack_lengths, way_back
from streampack.errors import StageEnds, StreampackError
from streampack.local import local
from streampack.packs.pack import Pack
from streampack.packs.step import Step
from streampack.planning import StepPlan, plan_step
from streampack.version import __version__ as __version__
from streampack.views.padded import rows

if TYPE_CHECKING:
    from streampack import integrations as integrations
    from streampack.client.results import StepResults, results
    from streampack.core.media.references import Reference
    from streampack.media.media import Media
    from streampack.producer.late_values import SampleId
    from streampack.producer.push import Producer
    from streampack.training.attention import varlen_attention
    from streampack.training.loss import packed_loss, per_sample, reduce_metrics, target_logprobs
    from streampack.training.masks import block_causal_mask, block_causal_mask_mod, block_mask, document_ids
    from streampack.training.process_groups import cp_groups

__all__ = [
    "Client",
    "Media",
    "Mesh",
    "ModelFlops",
    "Pack",
    "Producer",
    "Reference",
    "SampleId",
    "StageEnds",
    "Step",
    "StepPlan",
    "StepResults",
    "StreampackError",
    "block_causal_mask",
    "block_causal_mask_mod",
    "block_mask",
    "connect",
    "cp_groups",
    "document_ids",
    "local",
    "pack_lengths",
    "packed_loss",
    "per_sample",
    "plan_step",
    "reduce_metrics",
    "results",
    "rows",
    "target_logprobs",
    "varlen_attention",
    "verify",
    "way_back",
]


_LATER = {
    "Media": "streampack.media.media",
    "Producer": "streampack.producer.push",
    "Reference": "streampack.core.media.references",
    "SampleId": "streampack.producer.late_values",
    "StepResults": "streampack.client.results",
    "block_causal_mask": "streampack.training.masks",
    "block_causal_mask_mod": "streampack.training.masks",
    "block_mask": "streampack.training.masks",
    "cp_groups": "streampack.training.process_groups",
    "document_ids": "streampack.training.masks",
    "integrations": "streampack.integrations",
    "packed_loss": "streampack.training.loss",
    "per_sample": "streampack.training.loss",
    "reduce_metrics": "streampack.training.loss",
    "results": "streampack.client.results",
    "target_logprobs": "streampack.training.loss",
    "varlen_attention": "streampack.training.attention",
}
"""Names that are imported on first use, since most trainers use none of them: name -> the module that has the name."""


def __getattr__(name: str) -> Any:
    """Import and return a name of ``_LATER`` on first use. Raises AttributeError for other names."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name])
    return module if _LATER[name] == f"{__name__}.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return sorted([*__all__, "__version__", "errors", "integrations"])
