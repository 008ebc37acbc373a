"""Lightning: a fit killed in the middle has the losses and steps of one that was not, wherever it was saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder

import streampack
from streampack.errors import UserError
from streampack.integrations.lightning import PackedDataModule
from streampack.sources import SourceSettings, open_source
from streampack.typed_tree import convert
from tests.integration.frameworks import killed_and_resumed_is_the_same, run, serving
from tests.integration.running import RunningBroker, producing_here, running_broker, write_jsonl

PACKS, ALL, SAMPLES = 2, 6, 64
SETTINGS: dict[str, Any] = {
    "rules": {"budget": 256, "window": {"samples": 16}, "step": {"packs": PACKS}},
    "streams": {"text": {}, "one": {}, "more": {}},
    "feeds": {
        "train": {"streams": ["text"]},
        "single": {"streams": ["one"], "rules": {"step": {"packs": 1}}},
        "valid": {"streams": ["more"]},
    },
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec:FutureWarning"),
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker of a feed of 6 steps of two packs, one of as many packs and one to validate on."""
    rows = [{"text": "t" * (1 + i * 7 % 90)} for i in range(SAMPLES)]
    file = write_jsonl(tmp_path_factory.mktemp("data") / "a.jsonl", rows)
    source = open_source(convert({"source": "jsonl", "shards": str(file)}, SourceSettings))
    sources = dict.fromkeys(("text", "one", "more"), source)
    with running_broker(SETTINGS) as running, producing_here(running.producers, sources):
        yield running


class Noting(LightningModule):
    """Notes what it is given: (step, micro-batch) of each batch, and ``update`` where the optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Embedding(257, 4), torch.nn.Linear(4, 257))
        self.noted: list[Any] = []
        self.lr = 0.1

    def summed(self, batch: Any) -> torch.Tensor:
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
    """The same, and notes what it validates on; it cuts batches by sample, as packed losses do."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        assert len(streampack.per_sample(batch.labels, batch)) == batch.num_samples
        return super().training_step(batch, index)

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


def fit(broker: RunningBroker, *callbacks: Any, resume: Path | None = None, model: Any = None, **settings: Any) -> Any:
    """The model, trained for an epoch by default; what it was given is noted in it."""
    feeds = {name: settings.pop(name) for name in ("feed", "val_feed", "format") if name in settings}
    model = model or Noting()
    given = {"accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": 1, "accumulate_grad_batches": PACKS}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(**given | quiet | settings, callbacks=list(callbacks))
    trainer.fit(model, datamodule=PackedDataModule(broker.trainers, **feeds), ckpt_path=resume)
    return model


def of(first: int, packs: int = PACKS) -> list[Any]:
    """What a model is given from step ``first`` to the end of an epoch."""
    return [each for k in range(first, ALL) for each in (*((k, m) for m in range(packs)), "update")]


def test_a_fit_goes_on_where_it_was_killed_and_on_two_ranks(tmp_path: Path) -> None:
    with serving() as broker:
        whole = killed_and_resumed_is_the_same("lightning_module", broker, tmp_path)
        assert broker.feed()["committed"] == 7, "the last that was saved"
        lines = run("lightning_module", broker, tmp_path / "whole", ranks=2)
    assert [(line["step"], line["digest"]) for line in lines] == [(line["step"], line["digest"]) for line in whole[8:]]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in whole[8:]], rel=1e-6)


def test_a_fit_goes_on_wherever_it_was_saved(broker: RunningBroker, tmp_path: Path) -> None:
    """Behind the first pack of a step the step comes again, with all that it adds up."""
    whole = fit(broker)
    assert whole.noted == of(0)
    for batch in (1, PACKS * ALL - 2):
        fit(broker, Saving(tmp_path / "saved.ckpt", batch))
        resumed = fit(broker, resume=tmp_path / "saved.ckpt")
        assert resumed.noted == of(batch // PACKS)
        torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_a_batch_that_lightning_has_fetched_ahead_is_not_used_yet(broker: RunningBroker, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"feed": "single", "accumulate_grad_batches": 1}
    last = len([each for each in fit(broker, **settings).noted if each == "update"])
    fit(broker, Saving(tmp_path / "saved.ckpt", 3), **settings)
    assert fit(broker, resume=tmp_path / "saved.ckpt", **settings).noted[0] == (3, 0)
    assert last > 6


def test_what_is_saved_when_a_fit_has_failed_goes_on_there(broker: RunningBroker, tmp_path: Path) -> None:
    class Failing(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                self.trainer = trainer
                raise RuntimeError("of the model")

    failing = Failing()
    with pytest.raises(RuntimeError, match="of the model"):
        fit(broker, failing)
    failing.trainer.save_checkpoint(tmp_path / "failed.ckpt")
    assert fit(broker, resume=tmp_path / "failed.ckpt").noted == of(2)


def test_an_epoch_that_is_over_is_followed_by_another(broker: RunningBroker, tmp_path: Path) -> None:
    for batch in (PACKS * ALL, 0):
        fit(broker, Saving(tmp_path / "end.ckpt", batch), max_epochs=3)
        assert fit(broker, resume=tmp_path / "end.ckpt", max_epochs=3).noted == of(0) * 2


def test_with_manual_optimization_a_batch_is_a_step(broker: RunningBroker, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 1, "precision": "bf16-mixed"}
    whole = fit(broker, Saving(tmp_path / "saved.ckpt", 3), model=InSteps(), **settings)
    assert whole.noted == of(0)[: 3 * (PACKS + 1)]
    assert fit(broker, resume=tmp_path / "saved.ckpt", model=InSteps(), **settings).noted == of(3)


@pytest.mark.parametrize("format", ["thd", "hf"])
def test_batches_are_whole_where_lightning_converts_them(broker: RunningBroker, format: str) -> None:
    model = fit(
        broker, model=Validating(), format=format, val_feed="valid", precision="bf16-mixed", num_sanity_val_steps=1,
        val_check_interval=4, limit_train_batches=8,
    )  # fmt: skip
    validated = [each for each in model.noted if isinstance(each, list)]
    rounds = [validated[1:][: len(validated) // 2], validated[1 + len(validated) // 2 :]]
    assert [each for each in model.noted if not isinstance(each, list)] == of(0)[: 4 * (PACKS + 1)]
    assert rounds[0] == rounds[1]
    assert sum(map(len, rounds[0])) == SAMPLES


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"accumulate_grad_batches": 1}, "got step 0 of 2 packs on each rank and accumulate_grad_batches=1"),
        ({"limit_train_batches": 5}, "limit_train_batches=5 and accumulate_grad_batches=2, expected whole steps"),
        ({"format": "numpy"}, "got format 'numpy' for Lightning"),
    ],
)
def test_what_would_go_wrong_is_refused(broker: RunningBroker, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        fit(broker, **settings)


def test_a_trial_that_would_use_steps_up_is_refused(broker: RunningBroker, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got a LearningRateFinder, whose trial would use steps up"):
        fit(broker, LearningRateFinder(), default_root_dir=tmp_path)
