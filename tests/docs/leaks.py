"""Watch the calls of models in a program, and test that samples of a pack do not see each other in them.

``watched`` looks at each outermost call of a torch module whose arguments hold the tokens of a batch. It makes the same
call twice more: as it is, and with two tokens of one sample exchanged. Outputs of that sample must move. Outputs of all
others, and the gradients of their squares, must stay as they are. So a program is tested with what its calls pass.

As a program of ``tests.integration.forked`` with arguments SCRIPT ARGUMENTS it runs a script so, and ends it after
``WANTED`` calls. It prints how many calls were tested, and the error of a call in which samples see each other.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

from streampack.views.view import View, canonical
from tests.integration.forks import import_what_it_does

WANTED = 3
WITHIN = 1e-6
"""By how much outputs of other samples may move: kernels may add in another order."""


class Enough(BaseException):
    """Ends a program whose calls have been tested; no framework takes it for an error of its own."""


class Watch:
    """Tests the calls of modules. ``attention`` replaces that of models of transformers."""

    def __init__(self, attention: str | None) -> None:
        self.attention, self.tested = attention, 0
        self.views: deque[View] = deque(maxlen=256)
        self.call: Any = None
        self.ended = self._inside = False

    def see(self, call: Any, module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Return the outputs of a call, made by ``call``; test it, unless another module makes it."""
        if self._inside or self.ended:
            return call(module, *args, **given)
        self.call = call
        self._inside = True
        try:
            view = self._batch_of((args, given))
            change = None if view is None else exchanged(view)
            if view is not None and change is not None:
                if self.attention and hasattr(module, "set_attn_implementation"):
                    module.set_attn_implementation(self.attention)
                self._test(module, (args, given), view, *change)
                self.tested += 1
            if self.tested == WANTED or (self.tested and self.attention == "flex_attention"):
                raise Enough  # flex attention has no backward pass on a CPU, so a program cannot go on
            return self.call(module, *args, **given)
        finally:
            self._inside = False

    def _batch_of(self, arguments: Any) -> View | None:
        """Return the batch that is among the arguments, itself or by its tokens."""
        for each in tree_flatten(arguments)[0]:
            for view in self.views:
                if each is view or _are_ids(each, ids_of(view)):
                    return view
        return None

    def _test(self, module: Any, arguments: Any, view: View, ids: torch.Tensor, own: torch.Tensor) -> None:
        """Assert that only the rows ``own``, bool [T], depend on the tokens that ``ids`` [T] changes."""

        def changed(value: Any) -> Any:
            if value is view:
                return view.with_tensors({id(ids_of(view)): ids.view_as(ids_of(view))})
            return ids.view_as(value) if _are_ids(value, ids_of(view)) else value

        name = type(module).__name__
        sharded = any(map(_is_sharded, module.parameters()))
        learns = torch.is_grad_enabled() and not sharded and self.attention != "flex_attention"
        with torch.set_grad_enabled(learns):
            before, after = (self._rows(module, len(ids), *call) for call in (arguments, tree_map(changed, arguments)))
        moved = (before - after).detach().abs().reshape(len(ids), -1).amax(1)
        assert float(moved[own].max()) > 0, f"{name}: the sample that is changed does not move"
        assert float(moved[~own].max()) <= WITHIN, f"{name}: outputs of other samples move by {moved[~own].max()}"
        for one, two in zip(*(_gradients(module, rows[~own]) for rows in (before, after)), strict=True):
            assert torch.allclose(one, two, rtol=WITHIN, atol=WITHIN), f"{name}: gradients of other samples move"

    def _rows(self, module: Any, count: int, args: Any, given: Any) -> torch.Tensor:
        """Return the outputs of a call for each of ``count`` tokens, [count, ...].

        They are the last hidden states of a model that computes its loss without logits, as TRL's trainers have it.
        """
        hidden = list[Any]()

        def note(*given: Any) -> None:
            if hasattr(given[-1], "last_hidden_state"):
                hidden.append(given[-1].last_hidden_state)

        hooks = [each.register_forward_hook(note) for each in module.modules()]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found = self.call(module, *args, **given)
        for hook in hooks:
            hook.remove()
        rows = getattr(found, "logits", None)
        rows = found if rows is None else rows
        rows = rows[0] if isinstance(rows, tuple) else rows
        rows = rows if isinstance(rows, torch.Tensor) else hidden[-1]
        if len(rows) != count:
            assert prod(rows.shape[:2]) == count, f"outputs of shape {list(rows.shape)} for {count} tokens"
            rows = rows.flatten(0, 1)
        return rows


def _gradients(module: Any, rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the squares of some rows with respect to a module's parameters."""
    if not rows.requires_grad:
        return []
    parameters = [each for each in module.parameters() if each.requires_grad]
    found = torch.autograd.grad(rows.square().sum(), parameters, allow_unused=True)
    return [each for each in found if each is not None]


def ids_of(view: View) -> torch.Tensor:
    """Return the tokens of a batch, by the name that its format gives them."""
    return next(view[name] for name in ("input_ids", "tokens", "input") if name in view)  # type: ignore[no-any-return]


def _is_sharded(value: Any) -> bool:
    from torch.distributed.tensor import DTensor  # takes a second

    return isinstance(value, DTensor)


def _are_ids(value: Any, ids: torch.Tensor) -> bool:
    """Return True if ``value`` is a tensor with the tokens ``ids``."""
    same = isinstance(value, torch.Tensor) and not _is_sharded(value) and value.dtype == ids.dtype
    return same and value.numel() == ids.numel() and torch.equal(value.flatten(), ids.flatten())


def exchanged(view: View) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the tokens of a batch with two of one sample exchanged, [T], and which tokens may see them, bool [T].

    Others follow the sample in the pack, as a model that looks at all earlier tokens would see. None if no such sample
    has two tokens that differ. If samples share tokens, one token that belongs to one sample alone is changed.
    """
    ids, pack = ids_of(view).flatten().clone(), canonical(view)
    own = torch.zeros(len(ids), dtype=torch.bool)
    if pack.path_index is not None:
        leaves = np.flatnonzero(np.bincount(pack.path_index, minlength=len(ids)) == 1)
        last = next((i for i in leaves[:-1] if i + 1 not in leaves or pack.position_ids[i + 1] == 0), None)
        if last is None:
            return None
        own[last], ids[last] = True, ids[last - 1]
        return (ids, own) if ids[last] != ids_of(view).flatten()[last] else None
    bounds = pack.cu_seqlens_padded.tolist()
    for sample, size in enumerate(np.diff(pack.cu_seqlens)[: pack.num_samples].tolist()):
        begin, end = bounds[sample], bounds[sample + 1]
        differing = torch.nonzero(ids[begin : begin + size] != ids[begin])
        if len(differing) and end < len(ids):
            last = begin + int(differing[-1])
            ids[begin], ids[last] = ids[last].clone(), ids[begin].clone()
            own[begin:end] = True
            return ids, own
    return None


@contextmanager
def watched(attention: str | None = None) -> Iterator[Watch]:
    """Watch the calls of modules, and the batches of all loaders in this process. ``Enough`` ends the block."""
    watch = Watch(attention)
    made = View.__init__

    def noted(self: View, *args: Any, **given: Any) -> None:
        made(self, *args, **given)
        if not watch._inside and any(name in self for name in ("input_ids", "tokens", "input")):
            watch.views.append(self)

    def seen(call: Any) -> Any:
        return lambda self, *args, **given: watch.see(call, self, args, given)

    classes: list[Any] = [torch.nn.Module]
    if "transformers" in sys.modules:  # a class whose calls are wrapped already, by an earlier loader of this process
        classes.append(sys.modules["transformers"].PreTrainedModel)
    calls = {kind: vars(kind)["__call__"] for kind in classes if "__call__" in vars(kind)}
    View.__init__ = noted  # type: ignore[method-assign]
    for kind, call in calls.items():
        kind.__call__ = seen(call)
    try:
        yield watch
    except Enough:
        pass
    finally:
        watch.ended = True  # what has wrapped the calls meanwhile goes on to make them
        View.__init__ = made  # type: ignore[method-assign]
        for kind, call in calls.items():
            kind.__call__ = call


def prepare(arguments: list[str]) -> None:
    import_what_it_does(arguments[0])


def main() -> None:
    """Run a script and end this process, whatever else runs in it."""
    script, status = Path(sys.argv[1]), 0
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    with watched(os.environ.get("LEAKS_ATTENTION") or None) as watch:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Enough:
            pass
        except BaseException:
            status = 1
            traceback.print_exc()
    print(f"tested {watch.tested}", flush=True)
    os._exit(status)
