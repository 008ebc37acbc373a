"""Hugging Face: transformers' Trainer and TRL's SFTTrainer read from a loader in place of a dataset.

With ``PackedTrainerMixin``, an update of the Trainer is a step of the loader. To the Trainer a step is one batch
(``StepInputs``). The method ``training_step`` goes over the step's packs and synchronizes gradients with the last.
Losses are divided by the step's own denominator, so the Trainer counts and gathers nothing. Batches do not pass
through a DataLoader, a collator or ``accelerator.prepare``, which would concatenate, drop or repeat packs.

A checkpoint's ``trainer_state.json`` holds the loader's state after the last trained step, as the state of the callback
``LoaderState``. The checkpoint is committed once every rank has written its part.

Training ends at the end of a finite feed, with a warning, unless ``num_train_epochs`` asks for more passes. It ends in
the same way where the loader raises StageEnds: the Trainer saves, and begins no further pass. The checks in
``hf_checks`` reject unsuitable settings when the trainer is constructed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from streampack.errors import StageEnds, StateError, UserError
from streampack.integrations.checks import hf_checks
from streampack.packs.step import Step
from streampack.views.view import View, real_tokens

__all__ = ["PackedTrainerMixin"]

log = logging.getLogger("streampack.hf")


class StepInputs(dict[str, Any]):
    """A step as the Trainer's single batch of an update.

    The Trainer counts tokens by ``input_ids`` and ``attention_mask``, both [tokens of this rank's packs].
    """

    def __init__(self, step: Step) -> None:
        super().__init__(
            input_ids=torch.cat([pack["input_ids"].flatten() for pack in step]),
            attention_mask=torch.cat([~pack.padding_mask.flatten() for pack in step]),
        )
        self.packs = step.packs


class Steps:
    """A loader's steps as the Trainer's dataloader; keeps track of the trained steps.

    Each iteration is one pass over the feed; training has at most ``passes`` of them. The Trainer's ``max_steps``
    updates make ``epochs`` passes, which may be a fraction.
    """

    def __init__(self, loader: Any, passes: int, epochs: float) -> None:
        self.loader, self.passes, self.epochs = loader, passes, epochs
        self.begun = 0
        """Number of passes begun."""
        self.ended = False
        """True once the feed has ended and all passes are done, or a stage has ended training."""
        self.stage_ends: StageEnds | None = None
        """The error with which a stage has ended training; None if none has."""
        self.samples = 0
        """Number of samples that this rank has trained on since training began."""
        self.step: Step | None = None
        """The step in training, or the last trained step; None before the first."""
        self._trained: int | None = None  # index of the last trained step; None: no step was handed out
        self._start: dict[str, Any] | None = None  # the loader's state when training first began
        self._restored = False  # the next iteration continues a pass from a checkpoint

    def __iter__(self) -> Iterator[Step]:
        restored, self._restored = self._restored, False
        self.begun += not restored  # a checkpoint is within a pass, or at its end
        yield from self._pass()
        if restored and self._trained is None and self.begun < self.passes:
            self.begun += 1
            yield from self._pass()
        self.ended = self.begun >= self.passes or self.stage_ends is not None

    def _pass(self) -> Iterator[Step]:
        """Iterate the steps of one pass over the feed."""
        self._trained = None
        try:
            for step in self.loader.steps():
                if self._trained is None:
                    self._trained = step.index - 1
                self.step = step
                yield step
        except StageEnds as error:
            if self._trained is None:  # nothing to save
                raise
            self.stage_ends = error

    def begin(self, state: dict[str, Any] | None, begun: int) -> None:
        """Begin training at ``state`` in pass number ``begun``; without a state, at the first training's start."""
        again = self._start is not None
        self._start = self._start or self.loader.state_dict()
        if state or again:
            self.loader.load_state_dict(state or self._start)
        self._trained, self._restored, self.ended = None, state is not None, False
        self.begun, self.samples, self.stage_ends = begun if state else 0, 0, None

    def note_trained(self) -> None:
        """Note that the last step handed out has made its update."""
        assert self.step is not None
        self._trained = self.step.index

    def state(self) -> dict[str, Any]:
        """Return the loader's state after the last trained step; later steps will be handed out again."""
        state: dict[str, Any] = self.loader.state_dict(step=self._trained)
        return state

    def saved(self) -> dict[str, Any]:
        """Return the contents of a checkpoint: the loader's state and the number of the pass."""
        return {"saved": self.state(), "passes_begun": self.begun}

    @property
    def any_trained(self) -> bool:
        """True if a step of this pass has been trained."""
        return self._trained is not None

    def commit(self) -> None:
        """Tell the broker that a checkpoint after the last trained step is durable."""
        if self._trained is not None:
            self.loader.commit(self._trained)


class LoaderState(TrainerCallback, ExportableState):
    """Callback that keeps the loader's state in the Trainer's checkpoints, under the name of this class.

    The callback gets the loader when training begins: a Trainer that restores callbacks constructs new objects.
    """

    steps: Steps | None = None
    """The steps in training; None before training begins."""

    def state(self) -> dict[str, Any]:
        """Return the loader's state for the checkpoint. The Trainer calls it on rank 0 only."""
        return {"args": {}, "attributes": self.steps.saved() if self.steps else {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **kwargs: Any) -> None:
        """Restore the loader's state from the checkpoint, if there is one."""
        saved, begun = None, 0
        if state.global_step:
            attributes = state.stateful_callbacks.get(LoaderState.__name__, {}).get("attributes", {})
            saved, begun = attributes.get("saved"), attributes.get("passes_begun", 1)
            if saved is None:
                raise StateError(
                    f"got a checkpoint of {state.global_step} updates without the loader's state, expected a "
                    f"checkpoint that a PackedTrainerMixin saved. To use only the weights of this checkpoint, omit "
                    f"resume_from_checkpoint"
                )
        self.steps = train_dataloader
        train_dataloader.begin(saved, begun)
        control.should_training_stop |= state.global_step >= state.max_steps  # the Trainer checks only after updates

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **kwargs: Any) -> None:
        """Count the step as trained; a checkpoint made before this repeats it."""
        train_dataloader.note_trained()

    def on_step_end(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **kwargs: Any) -> None:
        """Set the Trainer's epoch from the share of ``max_steps``, since the stream's length is unknown."""
        state.epoch = train_dataloader.epochs * state.global_step / state.max_steps

    def on_epoch_end(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **kwargs: Any) -> None:
        """Request a checkpoint and an evaluation at the end of the feed, as the Trainer does at ``max_steps``."""
        if not (train_dataloader.ended and train_dataloader.any_trained) or state.global_step >= state.max_steps:
            return
        if args.save_strategy == "steps" and state.global_step % state.save_steps:
            control.should_save = True
        if args.eval_strategy == "steps" and state.global_step % state.eval_steps:
            control.should_evaluate = True

    def on_save(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **kwargs: Any) -> None:
        """Commit the checkpoint once all ranks have written their parts."""
        args.distributed_state.wait_for_everyone()
        if state.is_world_process_zero:
            train_dataloader.commit()


class PackedTrainerMixin:
    """Mixin that makes transformers' Trainer, or TRL's SFTTrainer, train on a loader's steps.

    An update is a step of the loader, whatever its number of micro-batches. Training makes ``args.max_steps`` updates,
    or fewer: a finite feed may end before, or a stage may begin that the loader cannot read (``stage_ends``). Settings
    of the dataset and its DataLoader, such as batch sizes and workers, have no effect.

    The metric ``eval_loss`` is the mean over all loss tokens of the evaluation feed. Logs have
    ``packing_efficiency``: real tokens as a share of this rank's tokens since the last log.

    Args:
        model: The model, as for the Trainer.
        args: TrainingArguments, or SFTConfig for an SFTTrainer. Leave ``gradient_accumulation_steps`` at 1.
        loader: Loader with ``format="hf"`` or ``"hf_shifted"``. With several processes, its mesh is
            ``{"dp": args.world_size, "dp_rank": args.process_index}``. The caller closes the loader.
        eval_loader: Loader of a finite feed for evaluation, or a dict of such loaders by name. The caller closes them.
        steps_per_epoch: Number of steps in one pass, as ``streampack plan`` reports. With this number,
            ``args.num_train_epochs`` passes replace ``args.max_steps``.
        given: Further arguments of the Trainer.

    Raises:
        UserError: A setting or the model would change what the loader's steps train on; the message says what to set.
        MeshError: The loader's mesh does not match the Trainer's processes.

    Example:
        >>> class PackedTrainer(PackedTrainerMixin, Trainer): ...  # doctest: +SKIP
        >>> loader = streampack.connect(format="hf")  # doctest: +SKIP
        >>> PackedTrainer(model, args, loader=loader).train()  # doctest: +SKIP
    """

    args: Any
    """The Trainer's arguments."""
    accelerator: Any
    """The Trainer's accelerator."""
    control: Any
    """The Trainer's control flags."""
    current_gradient_accumulation_steps: int
    """Number of packs of the step in training."""

    def __init__(
        self, model: Any = None, args: Any = None, *, loader: Any, eval_loader: Any = None,
        steps_per_epoch: int | None = None, **given: Any,
    ) -> None:  # fmt: skip
        hf_checks.methods(type(self))
        hf_checks.arguments(args, given, steps_per_epoch)
        passes, epochs = 1, 1.0
        if not args.max_steps > 0:
            passes, epochs = math.ceil(args.num_train_epochs), args.num_train_epochs
            args.max_steps = math.ceil(epochs * (steps_per_epoch or 1))
        evaluating = eval_loader.values() if isinstance(eval_loader, dict) else [eval_loader]
        loaders = [loader, *(each for each in evaluating if each is not None)]
        hf_checks.loaders(loaders)
        args.ignore_data_skip = True  # the loader's state holds the position: the Trainer need not skip batches
        sft = hf_checks.is_sft(type(self), args)
        data = _stand_ins(args, eval_loader is not None) if sft else {"eval_dataset": eval_loader}
        super().__init__(model=model, args=args, **{**given, **data})  # type: ignore[call-arg]
        hf_checks.trainer(self, loaders)
        self.eval_dataset = eval_loader
        self._loaders = loaders
        self._steps = Steps(loader, passes, epochs)
        self._real = self._slots = 0  # tokens since the last log
        self._evaluated: list[tuple[torch.Tensor, int, int]] = []  # summed loss, loss tokens, samples
        self.add_callback(LoaderState())  # type: ignore[attr-defined]

    @property
    def packed_step(self) -> Step:
        """The loader's step in training, or the last trained step. Raises UserError before the first."""
        if self._steps.step is None:
            raise UserError(
                "got no step yet, expected training to have begun. Read packed_step in a callback, or after train()"
            )
        return self._steps.step

    @property
    def stage_ends(self) -> StageEnds | None:
        """The error with which a stage has ended training, since its rules do not fit; None if training goes on."""
        return self._steps.stage_ends

    def get_train_dataloader(self) -> Steps:
        """Return the loader itself, without ``accelerator.prepare``."""
        return self._steps

    def get_batch_samples(self, epoch_iterator: Iterator[Step], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the next step as one batch, with its denominator over all ranks.

        Args:
            epoch_iterator: Iterator of the loader's steps.
            num_batches: Ignored: a step is one batch.
            device: Device of the denominator.

        Returns:
            ([inputs], loss tokens of the step, at least 1); ([], None) at the end of a pass.
        """
        step = None if self.control.should_training_stop else next(epoch_iterator, None)
        if step is None:
            self._end_pass()
            return [], None
        return [StepInputs(step)], torch.tensor(step.num_loss_tokens, device=device)

    def _end_pass(self) -> None:
        """End the Trainer's epoch; at the end of the last pass, end training."""
        self.control.should_epoch_stop = True
        if not self._steps.ended or self.control.should_training_stop:
            return
        self.control.should_training_stop = True
        state = self.state  # type: ignore[attr-defined]
        if not (state.global_step < state.max_steps and state.is_world_process_zero):
            return
        if (ends := self.stage_ends) is not None:
            log.warning(
                "training stops after %d of max_steps=%d updates, and saves a checkpoint unless save_strategy is 'no': "
                "%s", state.global_step, state.max_steps, ends,
            )  # fmt: skip
        else:
            log.warning(
                "the feed ended: training stops after %d of max_steps=%d updates. To train on the data again, set "
                "passes or repeat of its streams in broker.yaml, or replace max_steps with num_train_epochs and "
                "steps_per_epoch",
                state.global_step, state.max_steps,
            )  # fmt: skip

    def training_step(self, model: Any, inputs: StepInputs, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute the loss and gradients of a step on this rank; ranks reduce gradients with the last pack.

        Args:
            model: The model in training.
            inputs: The step, from ``get_batch_samples``.
            num_items_in_batch: The step's denominator.

        Returns:
            The summed loss of this rank's packs, divided by the denominator; a scalar tensor.
        """
        self.current_gradient_accumulation_steps = len(inputs.packs)
        losses = []
        for pack in inputs.packs:
            last = pack is inputs.packs[-1]
            self._real += real_tokens(pack)
            self._steps.samples += int(pack.num_samples)
            self._slots += pack["input_ids"].numel()
            with self._accumulating(model, last):
                losses.append(super().training_step(model, dict(pack), num_items_in_batch))  # type: ignore[misc]
        return torch.stack(losses).sum()

    def _accumulating(self, model: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context that reduces gradients only with the last pack; DeepSpeed decides for itself."""
        state = self.accelerator.gradient_state
        state._set_sync_gradients(last)
        every = state.plugin_kwargs.get("sync_each_batch", False)
        if last or every or self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return contextlib.nullcontext()
        unreduced: contextlib.AbstractContextManager[Any] = self.accelerator.no_sync(model=model)
        return unreduced

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add ``packing_efficiency`` to the logs, and let ``train_samples_per_second`` count samples, not packs.

        Args:
            logs: Values by name, changed in place.
            args: Further arguments of the Trainer's ``log``.
            kwargs: Further keyword arguments of the Trainer's ``log``.
        """
        if "train_samples_per_second" in logs:
            samples = sum(gather_object([self._steps.samples])) / self.get_tp_size()  # type: ignore[attr-defined]
            logs["train_samples_per_second"] = round(samples / max(logs["train_runtime"], 1e-9), 3)
        if "loss" in logs and self._slots:
            logs["packing_efficiency"] = self._real / self._slots
            self._real = self._slots = 0
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the evaluation loader unchanged, or the Trainer's DataLoader for a dataset.

        Args:
            eval_dataset: A loader, a dataset, or the name of a loader. Default: the ``eval_loader``.

        Raises:
            UserError: The loader is unsuitable for an evaluation.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        return self._unprepared(dataset) if _is_loader(dataset) else super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return a loader for ``predict`` unchanged, or the Trainer's DataLoader for a dataset.

        Args:
            test_dataset: A loader or a dataset.

        Raises:
            UserError: The loader is unsuitable for an evaluation.
        """
        if _is_loader(test_dataset):
            return self._unprepared(test_dataset)
        return super().get_test_dataloader(test_dataset)  # type: ignore[misc]

    def _unprepared(self, loader: Any) -> Any:
        """Return a loader unchanged; check a loader that was not passed to the constructor. Raises UserError."""
        if loader not in self._loaders[1:]:
            hf_checks.loaders([self._loaders[0], loader])
            hf_checks.attached(self, [loader])
        return loader

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Run the Trainer's evaluation, with the mean loss over all loss tokens in place of the mean over batches.

        Args:
            dataloader: A loader, or the Trainer's DataLoader.
            args: Further arguments of the Trainer's ``evaluation_loop``.
            metric_key_prefix: Prefix of the metrics' names.
            kwargs: Further keyword arguments of the Trainer's ``evaluation_loop``.

        Returns:
            The Trainer's EvalLoopOutput.
        """
        self._evaluated.clear()
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]
        if not self._evaluated:
            return output
        losses, tokens, samples = zip(*self._evaluated, strict=True)
        of_rank = (float(torch.stack(losses).cpu().double().sum()), sum(tokens), sum(samples))
        loss, num_tokens, num_samples = (sum(column) for column in zip(*gather_object([of_rank]), strict=True))
        output.metrics[f"{metric_key_prefix}_loss"] = loss / max(num_tokens, 1)
        return output._replace(num_samples=num_samples)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Evaluate one pack.

        Args:
            model: The model.
            inputs: The pack as a ``View``; other batches go to the Trainer.
            prediction_loss_only: True to return the loss alone.
            ignore_keys: Passed to the Trainer for other batches.

        Returns:
            (summed loss, logits, labels); logits and labels are None with ``prediction_loss_only``.
        """
        if not isinstance(inputs, View):
            predicted: tuple[Any, Any, Any] = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
            return predicted
        batch = self._prepare_inputs(dict(inputs))  # type: ignore[attr-defined]
        labels, wants_outputs = batch["labels"], not prediction_loss_only
        one = torch.ones((), device=labels.device)
        with torch.no_grad(), self.compute_loss_context_manager():  # type: ignore[attr-defined]
            loss = self.compute_loss(model, batch, return_outputs=wants_outputs, num_items_in_batch=one)  # type: ignore[attr-defined]
        loss, outputs = loss if wants_outputs else (loss, None)
        scale = self.accelerator.num_processes // self.get_tp_size()  # type: ignore[attr-defined] # compute_loss's own
        self._evaluated.append((loss.detach() / scale, inputs.num_loss_tokens, inputs.num_samples))
        return loss.detach(), outputs and outputs["logits"], labels if wants_outputs else None


def _is_loader(given: Any) -> bool:
    """Return True for a loader, False for a dataset or a name."""
    return hasattr(given, "steps")


def _stand_ins(args: Any, evaluates: bool) -> dict[str, Any]:
    """Return a dataset of one row and a collator for SFTTrainer, which requires both; neither is used in training."""
    from datasets import Dataset

    row = Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
    args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
    return {"train_dataset": row, "eval_dataset": row if evaluates else None, "data_collator": list}
