"""Lightning: ``PackedDataModule`` reads feeds of a broker for Lightning's Trainer.

A pack is a batch, and ``accumulate_grad_batches`` is the number of packs of a step on each rank. With manual
optimization, a batch is a whole step: a list of packs, also where a stage has another number of them. Otherwise,
training ends where a stage has another number than ``accumulate_grad_batches``. It ends where the loader raises
StageEnds, too, and callbacks save as at the end of an epoch. Six habits of Lightning shape this module:

- Lightning fetches a batch ahead, to know which one is last. The state therefore follows Lightning's count of processed
  batches, not the fetched ones.
- Lightning restores stateful loaders only in the middle of an epoch, but data modules always. The state is therefore
  the data module's. The checkpoint holds that of rank 0, which is equal on all ranks.
- Lightning may save between two batches of a step (``train_time_interval``), without the gradients so far. After a
  restore the step is repeated, and Lightning's count of batches goes back to the step's first batch.
- Lightning has no hook after a checkpoint is written. The commit is sent when the next batch is fetched, or at the end.
- Lightning divides losses by ``accumulate_grad_batches``, and its strategies average gradients over ranks. The property
  ``averaged_over`` gives the product.
- Lightning's precision plugins, and torch's FSDP and DDP, copy batches as plain mappings, which lose the attributes of
  a view. A hook restores the view before it is moved to a device. The model's ``training_step`` and
  ``validation_step`` are wrapped during a fit, and restore it again.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities import rank_zero_warn

from streampack.client.connect import Client, connect
from streampack.client.ranks import mesh_of
from streampack.core.model.mesh import Mesh
from streampack.errors import StageEnds, StreampackError, UserError
from streampack.integrations.checks.tried_versions import Tried
from streampack.packs.step import Step
from streampack.views.view import View

__all__ = ["PackedDataModule"]

TRIED = Tried("lightning", "2.6.6")


class PackedDataModule(LightningDataModule):
    """Data module that trains on one feed of a broker and validates on another.

    A checkpoint holds the loader's state after the last step that was trained whole, and restores on any number of
    ranks. A second call of ``fit`` continues, too. An epoch of a finite feed begins at its first step. An epoch of an
    infinite feed, with ``limit_train_batches``, begins at the next step.

    A checkpoint without a state of this class causes a warning, and the feed begins as in a new run. Lightning finds
    the state by the name of the class.

    Args:
        endpoint: Address of the broker, as for ``connect``.
        feed: Name of the feed to train on.
        val_feed: Name of the feed to validate on. Default: no validation.
        mesh: This rank's place, as for ``connect``. Default: the DeviceMesh of the trainer's strategy, or else each of
            the trainer's ranks is a data-parallel rank.
        order: Order of the mesh's axes, as for ``connect``.
        client: Further arguments of ``connect``. The default of ``device`` is the strategy's GPU.

    Raises:
        UserError: The format is ``numpy``. Also raised by ``fit`` if ``accumulate_grad_batches`` is not the number of
            packs of a step on each rank, or ``limit_train_batches`` ends within a step. Likewise for callbacks that use
            up steps in trials (LearningRateFinder, BatchSizeFinder).

    Example:
        >>> def training_step(self, batch, index):  # doctest: +SKIP
        ...     data = self.trainer.datamodule
        ...     total = cross_entropy(self.net(batch.input_ids), batch.labels, reduction="sum")
        ...     return total * data.averaged_over / data.step.num_loss_tokens
        >>> trainer.fit(model, PackedDataModule(val_feed="valid"))  # doctest: +SKIP
    """

    def __init__(
        self, endpoint: str | None = None, *, feed: str = "train", val_feed: str | None = None, mesh: Any = None,
        order: str | None = None, **client: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if client.get("format") == "numpy":
            raise UserError("got format 'numpy', expected thd or hf, because Lightning moves tensors between devices")
        self._endpoint, self._feed, self._val_feed = endpoint, feed, val_feed
        self._mesh, self._order, self._client = mesh, order, client
        self._loaders: dict[str, Client] = {}
        self._batches: _Batches | None = None
        self._state: dict[str, Any] | None = {}  # the state without a loader; None after a failure of the data
        self._resumed = False
        self._in_use: Any = None  # the batch before it passed through the strategy
        self._unwrapped: dict[str, Any] = {}  # the steps of the model that are wrapped; None for a method of its class
        if val_feed is not None:  # defined only then: otherwise Lightning would require a validation_step
            self.val_dataloader = self._val_loader

    def connect(self, feed: str) -> Client:
        """Return a new loader of a feed; called once per feed and fit. Override it for another loader.

        Args:
            feed: Name of the feed.

        Returns:
            A loader, such as one of ``streampack.connect`` or ``streampack.local``.
        """
        settings = dict(self._client)
        if self.trainer.strategy.root_device.type == "cuda":
            settings.setdefault("device", self.trainer.strategy.root_device)
        return connect(self._endpoint, feed=feed, mesh=self.mesh, **settings)

    @property
    def mesh(self) -> Mesh:
        """The trainers' mesh and this rank's place in the mesh; needs a trainer."""
        if self._mesh is not None or self._order is not None:
            return mesh_of(self._mesh, self._order)
        of_strategy = getattr(self.trainer.strategy, "device_mesh", None)
        if of_strategy is not None:
            return mesh_of(of_strategy)
        return Mesh(dp=self.trainer.world_size, dp_rank=self.trainer.global_rank)

    @property
    def step(self) -> Step:
        """The step that holds the batch of ``training_step``. Raises UserError outside of training."""
        return self._training().step()

    @property
    def averaged_over(self) -> int:
        """Number by which Lightning and its strategy divide gradients: dp * cp * ``accumulate_grad_batches``.

        For the mean over a step's loss tokens, multiply a summed loss by this and divide by ``step.num_loss_tokens``.
        """
        mesh = self.mesh
        return mesh.dp * mesh.cp * (_accumulated(self.trainer) or 1)

    def _training(self) -> _Batches:
        """Return the batches of the current fit. Raises UserError outside of training."""
        if self._batches is None:
            raise UserError(
                "got no training in progress, expected a call while trainer.fit(model, datamodule=...) runs"
            )
        return self._batches

    # Called by Lightning

    def setup(self, stage: str) -> None:
        """Check the trainer's callbacks. Lightning calls it before a fit.

        Args:
            stage: Lightning's name of the stage, such as ``fit``.

        Raises:
            UserError: A callback would use up steps in trials.
        """
        _check_callbacks(self.trainer)
        TRIED.check(self.trainer.fit_loop.epoch_loop, "batch_progress", "_batches_that_stepped")
        self._unwrap_steps()
        model = self.trainer.lightning_module
        for name in ("training_step", *(["validation_step"] if self._val_feed is not None else [])):
            self._unwrapped[name] = vars(model).get(name)
            setattr(model, name, self._with_views(getattr(model, name)))

    def train_dataloader(self) -> _Batches:
        """Return the batches of the training feed; the same object until the fit ends."""
        if self._batches is None:
            if self._resumed and self._state:
                _rewind_to_step(self.trainer, self._state["batches_a_step"])
            elif self.trainer.ckpt_path is not None:
                rank_zero_warn(
                    f"got a checkpoint without the state of {type(self).__qualname__}, expected a checkpoint that "
                    f"includes this state. The feed {self._feed} does not resume from the checkpoint"
                )
            self._resumed = False
            self._batches = _Batches(self._loader(self._feed), self.trainer, self._state or {})
        return self._batches

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Restore the attributes of a training batch that was copied as a plain mapping.

        Args:
            batch: The batch, or a list of batches with manual optimization.
            dataloader_idx: Ignored.
        """
        training = self._batches is not None and self.trainer.training
        self._in_use = self._batches.whole(batch) if training and self._batches is not None else batch
        return self._in_use

    def _with_views(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step of the model whose batch gets the attributes back that the strategy has dropped."""

        @functools.wraps(step)
        def with_views(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return step(_restored(batch, self._in_use), *args, **kwargs)

        return with_views

    def _unwrap_steps(self) -> None:
        """Give the model its own steps back."""
        for name, own in self._unwrapped.items():
            delattr(self.trainer.lightning_module, name)
            if own is not None:
                setattr(self.trainer.lightning_module, name, own)
        self._unwrapped = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last step that was trained whole; equal on all ranks.

        Raises:
            UserError: The data failed in this fit.
        """
        if self._batches is not None:
            return self._batches.state()
        if self._state is None:
            raise UserError(
                "got a request for the loader's state after the loader failed in this fit. "
                "Resume from the last checkpoint"
            )
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state when ``fit`` begins.

        Args:
            state: The dict that ``state_dict`` returned.
        """
        self._state, self._resumed = state, True

    def teardown(self, stage: str) -> None:
        """Close the loaders and keep the state for later checkpoints.

        Args:
            stage: Lightning's name of the stage, such as ``fit``.
        """
        if self._batches is not None:
            self._batches.commit()
            self._state = self._batches.state()
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Close the loaders; keep the state for later checkpoints, unless the data failed.

        Args:
            exception: The exception that ended the fit.
        """
        if self._batches is not None:
            self._state = None
            if not isinstance(exception, StreampackError):
                with suppress(StreampackError):
                    self._state = self._batches.state()
        self._close()

    def _val_loader(self) -> Client:
        """Return the loader of the validation feed; Lightning calls it as ``val_dataloader``."""
        return self._loader(str(self._val_feed))

    def _loader(self, feed: str) -> Client:
        """Return the feed's loader of this fit; connect on first use."""
        if feed not in self._loaders:
            self._loaders[feed] = self.connect(feed)
        return self._loaders[feed]

    def _close(self) -> None:
        """Close all loaders of this fit."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders, self._batches, self._in_use = {}, None, None
        self._unwrap_steps()


class _Batches:
    """Iterable of a feed's batches for Lightning, with the position of training.

    Lightning's count of processed batches tells which steps are over.
    """

    def __init__(self, loader: Client, trainer: Any, state: Mapping[str, Any]) -> None:
        self._loader, self._trainer = loader, trainer
        self._steps: deque[tuple[int, Step]] = deque()  # steps that are not over, each with the count at its end
        self._fetched: deque[Any] = deque(maxlen=2)  # batches not yet in use; Lightning fetches one ahead
        self._source: Iterator[Step] = iter(())
        self._began = 0  # the count at the start of this iteration
        self._last: int | None = None  # index of the last step of this iteration that is over
        self._ends: StageEnds | None = None  # a stage that this trainer cannot read has ended training
        self._saved: int | None = None  # index of the last step of a checkpoint that is not committed yet
        accumulated, limit = _accumulated(trainer), trainer.limit_train_batches
        if accumulated and isinstance(limit, int) and limit % accumulated:
            raise UserError(
                f"got limit_train_batches={limit} with accumulate_grad_batches={accumulated}, expected whole steps. "
                f"Set limit_train_batches to a multiple of {accumulated}, such as "
                f"{limit // accumulated * accumulated or accumulated}"
            )
        if state:
            loader.load_state_dict(state["loader"])
            if state["epoch_is_over"] and loader.rules.finite:
                next(loader.steps(), None)  # begins this iteration, so that the next one is at the first step

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; in a further fit, hand out again the batches that were fetched and not used."""
        if self._ends is not None:  # the Trainer goes on for its min_epochs or min_steps
            raise self._ends
        self.commit()
        self._drop_finished()
        goes_on = self._steps and (self._count() == self._began or not self._loader.rules.finite)
        again = [step for _, step in self._steps] if goes_on else []
        if not goes_on:
            self._source, self._last = self._loader.steps(), None
        self._steps.clear()
        self._fetched.clear()
        self._began = self._count()
        return self._iterate(chain(again, self._source), self._began)

    def _iterate(self, steps: Iterator[Step], count: int) -> Iterator[Any]:
        """Yield the batches of ``steps``; ``count`` is the number of batches before. Raises UserError."""
        stage: str | None = None
        for step in self._until_stage_ends(steps):
            accumulated = _accumulated(self._trainer)
            if accumulated not in (None, len(step)):
                why = (
                    f"got {len(step)} packs on each rank in step {step.index}, expected "
                    f"accumulate_grad_batches={accumulated} packs. Set Trainer(accumulate_grad_batches={len(step)}). "
                    f"If the number of packs varies, set automatic_optimization = False in the model: each batch is "
                    f"then a whole step"
                )
                if stage in (None, step.stage):
                    raise UserError(why)
                self._stop(StageEnds(step.index, step.stage, why))
                return
            stage = step.stage
            batches = [list(step)] if accumulated is None else list(step)
            count += len(batches)
            self._steps.append((count, step))
            for batch in batches:
                self._drop_finished()
                self.commit()
                self._fetched.append(batch)
                yield batch

    def _until_stage_ends(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Yield steps until the loader raises StageEnds; raise it if it comes before the first of them."""
        number = 0
        try:
            for number, step in enumerate(steps, 1):  # noqa: B007 - counted for the handler
                yield step
        except StageEnds as error:
            if not number:
                raise
            self._stop(error)

    def _stop(self, error: StageEnds) -> None:
        """Let the Trainer end after the steps that were handed out, and save."""
        self._ends = error
        self._trainer.should_stop = True
        rank_zero_warn(f"training stops, and callbacks save as at the end of an epoch: {error}")

    def step(self) -> Step:
        """Return the first step that is not over. Raises UserError without a batch in use."""
        self._drop_finished()
        if not self._steps:
            raise UserError("got no batch in use, expected a call within training_step")
        return self._steps[0][1]

    def whole(self, batch: Any) -> Any:
        """Return the batch about to be used, with the attributes that it had when it was fetched."""
        return _restored(batch, self._fetched.popleft())

    def state(self) -> dict[str, Any]:
        """Return the loader's state after the last finished step, and whether an epoch ended there."""
        self._drop_finished()
        last = self._last
        if last is None and self._steps:  # steps were fetched, and none is over
            last = self._steps[0][1].index - 1
        self._saved = self._last
        over = not self._steps and self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and not self._ends
        batches = _accumulated(self._trainer) or 1
        return {"loader": self._loader.state_dict(last), "epoch_is_over": over, "batches_a_step": batches}

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, since Lightning warns of loaders without ``state_dict``; the module has the state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state, since the data module restores the position of training."""

    def commit(self) -> None:
        """Tell the broker that the checkpoint with the last state is durable; Lightning has written it by now."""
        if self._saved is not None and self._trainer.is_global_zero:
            self._loader.commit(self._saved)
        self._saved = None

    def _drop_finished(self) -> None:
        """Drop steps whose batches Lightning has processed, and note the last of them."""
        while self._steps and self._steps[0][0] <= self._count():
            self._last = self._steps.popleft()[1].index

    def _count(self) -> int:
        """Return the number of batches that Lightning has processed."""
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.total.processed)


def _check_callbacks(trainer: Any) -> None:
    """Raise UserError for callbacks that train in trials and restore the model, since the feed would not go back."""
    for callback in trainer.callbacks:
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            raise UserError(
                f"got the callback {type(callback).__name__}, whose trial would use up steps of the feed, expected no "
                f"such callback. Run the trial before, on a separate loader, such as one from streampack.local"
            )


def _accumulated(trainer: Any) -> int | None:
    """Return the number of batches of a step, or None with manual optimization, where a batch is a step."""
    return int(trainer.accumulate_grad_batches) if trainer.lightning_module.automatic_optimization else None


def _rewind_to_step(trainer: Any, batches_a_step: int) -> None:
    """Set Lightning's count of batches back to the first batch of the step that was not over at the checkpoint.

    ``batches_a_step``: batches of a step where the checkpoint was saved; on another mesh a step has another number.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    steps, over = divmod(progress.current.processed, batches_a_step)
    change = steps * (_accumulated(trainer) or 1) - progress.current.processed
    progress.increment_by(change, is_last_batch=progress.is_last_batch)
    loop._batches_that_stepped -= bool(over)  # the loggers' step: Lightning has counted the unfinished step as over


def _restored(batch: Any, before: Any) -> Any:
    """Return ``batch`` with the attributes of ``before``, a view, if it has lost its own; likewise lists of views."""
    if isinstance(before, list) and isinstance(batch, list):
        return [_restored(each, own) for each, own in zip(batch, before, strict=True)]
    if not (isinstance(before, View) and isinstance(batch, dict)) or getattr(batch, "canonical", None) is not None:
        return batch
    device = next((value.device for value in batch.values() if isinstance(value, torch.Tensor)), None)
    moved = before if device is None else before.to(device)
    return View(batch, moved.canonical, moved.rest, moved.rules, moved.copied)
