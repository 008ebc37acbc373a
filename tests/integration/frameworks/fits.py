"""Fits of a small model by Lightning, noting what they are given; apart, since Lightning takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import streampack
from streampack.integrations.lightning import PackedDataModule
from tests.integration.running import RunningBroker

PACKS = 2


class Noting(LightningModule):
    """Notes what it is given: (step, micro-batch) of each batch, and ``update`` where the optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Embedding(257, 4), torch.nn.Linear(4, 257))
        self.noted: list[Any] = []
        self.lr = 0.1

    def summed(self, batch: Any) -> torch.Tensor:
        assert len(streampack.per_sample(batch.labels, batch)) == batch.num_samples, "whole, however it was converted"
        self.noted.append((batch.step, batch.micro_batch))
        logits, labels = self.net(batch.input_ids).flatten(0, -2), batch.labels.flatten()
        loss: torch.Tensor = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return loss

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        data = self.trainer.datamodule
        assert data.step.index == batch.step
        loss: torch.Tensor = self.summed(batch) * data.averaged_over / data.step.num_loss_tokens
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.noted.append("update")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class InSteps(Noting):
    """The same with manual optimization: it is given whole steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batches: list[Any], index: int) -> None:  # type: ignore[override]
        data, optimizer = self.trainer.datamodule, self.optimizers()
        for batch in batches:
            self.manual_backward(self.summed(batch) * data.averaged_over / data.step.num_loss_tokens)
        optimizer.step()
        optimizer.zero_grad()


class Validating(Noting):
    """The same, and notes what it validates on."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.noted.append(batch.sample_ids.tolist())


class Saving(Callback):
    """Saves behind the batch of that number, or the first epoch, and ends the fit."""

    def __init__(self, path: Path, batch: int = 0) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.batch:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if not self.batch:
            self.save(trainer)

    def save(self, trainer: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True


class Failing(Callback):
    """Fails in the second step."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("of the model")


def fit(
    broker: RunningBroker, *callbacks: Any, resume: Path | None = None, model: Any = None, data: Any = None,
    **settings: Any,
) -> Any:  # fmt: skip
    """The model, trained for an epoch by default; what it was given is noted in it."""
    feeds = {name: settings.pop(name) for name in ("feed", "val_feed", "format", "mesh") if name in settings}
    model = model or Noting()
    given = {"accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": 1, "accumulate_grad_batches": PACKS}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(**given | quiet | settings, callbacks=list(callbacks))
    trainer.fit(model, datamodule=data or PackedDataModule(broker.trainers, **feeds), ckpt_path=resume)
    return model
