"""Lightning: feeds of a broker as a LightningDataModule.

A pack is a batch, and ``accumulate_grad_batches`` is how many of them a step has on each rank; with manual
optimization a whole step is a batch, a list of packs. What Lightning does that decides the rest:

- It fetches a batch ahead of the one that is trained, to know which is the last. So the state counts what Lightning
  says that it has processed, where a client of its own would count what was fetched, and resume a step too far.
- It restores the state of stateful loaders in the middle of an epoch alone, that of a data module always: so the state
  is the module's. Every rank has it, the checkpoint that of rank 0, and it knows no mesh.
- It may save between two batches of a step (``train_time_interval``). The gradients so far are in no checkpoint: the
  step comes again, and Lightning's count of batches goes back to the step's first.
- It has no hook for a checkpoint that is written: it is committed when the next batch is fetched, or at the end.
- It divides losses by ``accumulate_grad_batches``, and its strategies average gradients over ranks: ``averaged_over``.
- Its precision plugins make new mappings of batches, which have the keys alone: what is given to ``training_step`` is
  made a whole view again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities import rank_zero_warn

from streampack.client.connect import Client, connect
from streampack.client.ranks import mesh_of
from streampack.core.model.mesh import Mesh
from streampack.errors import StreampackError, UserError
from streampack.packs.step import Step
from streampack.views.view import View


class PackedDataModule(LightningDataModule):
    """A feed to train on, and one to validate on: ``trainer.fit(model, PackedDataModule(val_feed="valid"))``.

    ``endpoint`` and ``client``: the arguments of ``connect``; ``mesh`` is by default the trainer's ranks, each one of
    dp, or its strategy's DeviceMesh; ``device`` the strategy's GPU. A checkpoint has the loader's state, after the last
    step that was trained whole, and goes on with any number of ranks. Where fit is called again it goes on, too. An
    epoch of a finite feed begins at its first step, one of an infinite feed (``limit_train_batches``) goes on.

    Raises UserError for the format ``numpy``; when fit begins, for ``accumulate_grad_batches`` that is not the number
    of packs that a step has on each rank, for a ``limit_train_batches`` that ends within a step, and for callbacks that
    try things out on it (LearningRateFinder, BatchSizeFinder). Warns of a checkpoint that has no state of this class:
    Lightning passes over that of a class of another name, and the feed begins anew.

    >>> def training_step(self, batch, index):  # doctest: +SKIP
    ...     data = self.trainer.datamodule
    ...     total = cross_entropy(self.net(batch.input_ids), batch.labels, reduction="sum")
    ...     return total * data.averaged_over / data.step.num_loss_tokens
    """

    def __init__(
        self, endpoint: str | None = None, *, feed: str = "train", val_feed: str | None = None, mesh: Any = None,
        order: str | None = None, **client: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if client.get("format") == "numpy":
            raise UserError("got format 'numpy' for Lightning, which moves tensors, expected thd or hf")
        self._endpoint, self._feed, self._val_feed = endpoint, feed, val_feed
        self._mesh, self._order, self._client = mesh, order, client
        self._loaders: dict[str, Client] = {}
        self._batches: _Batches | None = None
        self._state: dict[str, Any] | None = {}  # where there is no loader: what it begins with; None: nobody knows
        self._resumed = False
        if val_feed is not None:  # where it is defined Lightning misses a validation_step
            self.val_dataloader = self._val_loader

    def connect(self, feed: str) -> Client:
        """The loader of a feed, once a fit. Override it for another, as ``streampack.local`` gives."""
        settings = dict(self._client)
        if self.trainer.strategy.root_device.type == "cuda":
            settings.setdefault("device", self.trainer.strategy.root_device)
        return connect(self._endpoint, feed=feed, mesh=self.mesh, **settings)

    @property
    def mesh(self) -> Mesh:
        """This rank's place, once the trainer has one."""
        if self._mesh is not None or self._order is not None:
            return mesh_of(self._mesh, self._order)
        of_strategy = getattr(self.trainer.strategy, "device_mesh", None)
        if of_strategy is not None:
            return mesh_of(of_strategy)
        return Mesh(dp=self.trainer.world_size, dp_rank=self.trainer.global_rank)

    @property
    def step(self) -> Step:
        """The step that the batch in ``training_step`` is of: its denominators, digest and index."""
        return self._training().step()

    @property
    def averaged_over(self) -> int:
        """What Lightning and its strategy divide gradients by, dp * cp * ``accumulate_grad_batches``: for a step's sum
        over its loss tokens a loss is times this, over ``step.num_loss_tokens``.
        """
        mesh = self.mesh
        return mesh.dp * mesh.cp * (_accumulated(self.trainer) or 1)

    def _training(self) -> _Batches:
        if self._batches is None:
            raise UserError("got no training that is on, expected trainer.fit(model, datamodule=this)")
        return self._batches

    # What Lightning calls

    def setup(self, stage: str) -> None:
        """Refuse what would use steps up. Raises UserError."""
        _check_callbacks(self.trainer)

    def train_dataloader(self) -> _Batches:
        """Of the feed: the same loader each time, until the fit is over."""
        if self._batches is None:
            if self._resumed and self._state:
                _back_to_a_step(self.trainer, self._state["batches_a_step"])
            elif self.trainer.ckpt_path is not None:
                rank_zero_warn(
                    f"got a checkpoint without a state of {type(self).__qualname__}, expected one that was saved with "
                    f"it: the feed {self._feed} begins where it would without"
                )
            self._resumed = False
            self._batches = _Batches(self._loader(self._feed), self.trainer, self._state or {})
        return self._batches

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch with all that a view has."""
        return self._batches.whole(batch) if self._batches is not None and self.trainer.training else batch

    def state_dict(self) -> dict[str, Any]:
        """The loader's, after the last step that was trained whole: equal on all ranks."""
        if self._batches is not None:
            return self._batches.state()
        if self._state is None:
            raise UserError(
                "got a fit that has failed for its data, expected a checkpoint made in it: go on from the last"
            )
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin there, when fit begins."""
        self._state, self._resumed = state, True

    def teardown(self, stage: str) -> None:
        """Give the ranks up; a checkpoint made later still has the state."""
        if self._batches is not None:
            self._batches.commit()
            self._state = self._batches.state()
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Give the ranks up; a checkpoint made later has the state, unless it is the data that has failed."""
        if self._batches is not None:
            self._state = None
            if not isinstance(exception, StreampackError):
                with suppress(StreampackError):
                    self._state = self._batches.state()
        self._close()

    def _val_loader(self) -> Client:
        return self._loader(str(self._val_feed))

    def _loader(self, feed: str) -> Client:
        if feed not in self._loaders:
            self._loaders[feed] = self.connect(feed)
        return self._loaders[feed]

    def _close(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        self._loaders, self._batches = {}, None


class _Batches:
    """What Lightning iterates, and how far it is: its count of batches processed says which steps are over."""

    def __init__(self, loader: Client, trainer: Any, state: Mapping[str, Any]) -> None:
        self._loader, self._trainer = loader, trainer
        self._steps: deque[tuple[int, Step]] = deque()  # not over yet, each with the count at its end
        self._fetched: deque[Any] = deque(maxlen=2)  # not yet in use; Lightning fetches one ahead
        self._source: Iterator[Step] = iter(())
        self._began = 0  # the count where this iteration began
        self._last: int | None = None  # the last step that is over, in this iteration
        self._saved: int | None = None  # that of a checkpoint that is not committed
        accumulated, limit = _accumulated(trainer), trainer.limit_train_batches
        if accumulated and isinstance(limit, int) and limit % accumulated:
            raise UserError(
                f"got limit_train_batches={limit} and accumulate_grad_batches={accumulated}, expected whole steps: a "
                f"multiple, such as {limit // accumulated * accumulated or accumulated}"
            )
        if state:
            loader.load_state_dict(state["loader"])
            if state["epoch_is_over"] and loader.rules.finite:
                next(loader.steps(), None)  # so that the next iteration is another, from the first step

    def __iter__(self) -> Iterator[Any]:
        """Lightning begins twice where it fits again: what was fetched and is not used comes again, then."""
        self.commit()
        self._forget()
        goes_on = self._steps and (self._count() == self._began or not self._loader.rules.finite)
        again = [step for _, step in self._steps] if goes_on else []
        if not goes_on:
            self._source, self._last = self._loader.steps(), None
        self._steps.clear()
        self._fetched.clear()
        self._began = self._count()
        return self._iterate(chain(again, self._source), self._began)

    def _iterate(self, steps: Iterator[Step], count: int) -> Iterator[Any]:
        for step in steps:
            accumulated = _accumulated(self._trainer)
            if accumulated not in (None, len(step)):
                raise UserError(
                    f"got step {step.index} of {len(step)} packs on each rank and accumulate_grad_batches="
                    f"{accumulated}, expected as many: set Trainer(accumulate_grad_batches={len(step)}), or, where "
                    f"steps differ, automatic_optimization = False in the model, whose batches are whole steps"
                )
            batches = [list(step)] if accumulated is None else list(step)
            count += len(batches)
            self._steps.append((count, step))
            for batch in batches:
                self._forget()
                self.commit()
                self._fetched.append(batch)
                yield batch

    def step(self) -> Step:
        """The first that is not over."""
        self._forget()
        if not self._steps:
            raise UserError("got no batch in use, expected to be asked within training_step")
        return self._steps[0][1]

    def whole(self, batch: Any) -> Any:
        """A batch that is about to be used, with all that it had when it was fetched."""
        given = self._fetched.popleft()
        if not isinstance(given, list):
            return _whole(batch, given)
        return [_whole(each, before) for each, before in zip(batch, given, strict=True)]

    def state(self) -> dict[str, Any]:
        """The loader's after the last step that is over, and whether that was an epoch's last."""
        self._forget()
        last = self._last
        if last is None and self._steps:  # fetched, and none is over
            last = self._steps[0][1].index - 1
        self._saved = self._last
        over = not self._steps and self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        batches = _accumulated(self._trainer) or 1
        return {"loader": self._loader.state_dict(last), "epoch_is_over": over, "batches_a_step": batches}

    def state_dict(self) -> dict[str, Any]:
        """Nothing beside the module's; but Lightning says of loaders that have none that they cannot be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``state_dict``."""

    def commit(self) -> None:
        """The checkpoint of the last state is written by now."""
        if self._saved is not None and self._trainer.is_global_zero:
            self._loader.commit(self._saved)
        self._saved = None

    def _forget(self) -> None:
        """What is over."""
        while self._steps and self._steps[0][0] <= self._count():
            self._last = self._steps.popleft()[1].index

    def _count(self) -> int:
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.total.processed)


def _check_callbacks(trainer: Any) -> None:
    """Raise UserError for what trains and then takes the model back: a feed that goes on is not taken back with it."""
    for callback in trainer.callbacks:
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            raise UserError(
                f"got a {type(callback).__name__}, whose trial would use steps up, expected none: run it before, on a "
                f"loader of its own, such as streampack.local's"
            )


def _accumulated(trainer: Any) -> int | None:
    """Batches a step; None where a batch is a step."""
    return int(trainer.accumulate_grad_batches) if trainer.lightning_module.automatic_optimization else None


def _back_to_a_step(trainer: Any, batches_a_step: int) -> None:
    """Lightning's count of batches as it is at a step's first: those of a step that was not over come again; and with
    other ranks a step has another number of them than where it was saved.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    steps, over = divmod(progress.current.processed, batches_a_step)
    change = steps * (_accumulated(trainer) or 1) - progress.current.processed
    progress.increment_by(change, is_last_batch=progress.is_last_batch)
    loop._batches_that_stepped -= bool(over)  # the loggers' step: Lightning adds one, for a step that was over


def _whole(batch: Any, given: Any) -> Any:
    if not (isinstance(batch, View) and isinstance(given, View)) or batch.canonical is not None:
        return batch
    return View(batch, given.canonical, given.rest, given.rules, given.copied)
