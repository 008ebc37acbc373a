"""Lightning: a fit killed in the middle has the losses and steps of one that was not, wherever it was saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import streampack
from streampack.config.typed_yaml import convert
from streampack.errors import UserError
from streampack.sources import SourceSettings, open_source
from tests.integration.frameworks.example_runs import (
    Run,
    check_the_same,
    check_the_same_losses,
    killed_and_resumed,
    run,
    serving,
)
from tests.integration.running import RunningBroker, producing_here, running_broker, write_jsonl

PACKS, ALL, SAMPLES = 2, 6, 64
SETTINGS: dict[str, Any] = {
    "rules": {"budget": 256, "window": {"samples": 16}, "step": {"packs": PACKS}},
    "streams": {"text": {}, "one": {}, "more": {}, "again": {"repeat": True}},
    "feeds": {
        "train": {"streams": ["text"]},
        "single": {"streams": ["one"], "rules": {"step": {"packs": 1}}},
        "valid": {"streams": ["more"]},
        "endless": {"streams": ["again"]},
    },
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),  # a machine that has Slurm
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker of a feed of 6 steps of two packs, one of as many packs and one to validate on."""
    rows = [{"text": "t" * (1 + i * 7 % 90)} for i in range(SAMPLES)]
    file = write_jsonl(tmp_path_factory.mktemp("data") / "a.jsonl", rows)
    source = open_source(convert({"source": "jsonl", "shards": str(file)}, SourceSettings))
    sources = dict.fromkeys(SETTINGS["streams"], source)
    with running_broker(SETTINGS) as running, producing_here(running.producers, sources):
        yield running


@pytest.fixture(scope="module")
def fits() -> ModuleType:
    """Imported where it is used, since every worker of pytest imports every file of tests."""
    from tests.integration.frameworks import fits

    return fits


def of(first: int, packs: int = PACKS) -> list[Any]:
    """What a model is given from step ``first`` to the end of an epoch."""
    return [each for k in range(first, ALL) for each in (*((k, m) for m in range(packs)), "update")]


def test_a_fit_goes_on_where_it_was_killed_and_on_two_ranks(tmp_path: Path) -> None:
    runs = killed_and_resumed("lightning_module", tmp_path)
    with serving() as broker:
        whole, cut, rest, lines = run(broker, *runs, Run("lightning_module", tmp_path / "whole", ranks=2))
        assert broker.feed()["committed"] == 7, "the last that was saved"
    check_the_same(whole, cut, rest)
    assert [(line["step"], line["digest"]) for line in lines] == [(line["step"], line["digest"]) for line in whole[8:]]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in whole[8:]], rel=1e-9)


@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
def test_two_ranks_that_shard_the_model_go_on_with_the_losses_of_one(strategy: str, tmp_path: Path) -> None:
    script, folder = str(Path(__file__).with_name("lightning_sharded")), tmp_path / strategy
    with serving() as broker:
        (whole,) = run(broker, Run("lightning_module", tmp_path / "one", steps=20))
        cut, rest = run(
            broker, Run(script, folder, dies_at=9, ranks=2, steps=20), Run(script, folder, ranks=2, steps=20)
        )
    assert list(folder.glob("last.ckpt/*.distcp")), "the checkpoint is sharded"
    check_the_same_losses(whole, cut, rest, begins=8)


def test_a_fit_goes_on_wherever_it_was_saved(fits: ModuleType, broker: RunningBroker, tmp_path: Path) -> None:
    """Behind the first pack of a step the step comes again, with all that it adds up."""
    whole = fits.fit(broker)
    assert whole.noted == of(0)
    in_steps = fits.fit(broker, model=fits.InSteps(), accumulate_grad_batches=1)
    fits.torch.testing.assert_close(whole.state_dict(), in_steps.state_dict(), rtol=1e-5, atol=1e-6)
    for batch in (1, PACKS * ALL - 2):
        fits.fit(broker, fits.Saving(tmp_path / "saved.ckpt", batch))
        resumed = fits.fit(broker, resume=tmp_path / "saved.ckpt")
        assert resumed.noted == of(batch // PACKS)
        assert resumed.trainer.fit_loop.epoch_loop._batches_that_stepped == ALL, "what loggers write as a step"
        fits.torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_a_batch_that_lightning_has_fetched_ahead_is_not_used_yet(
    fits: ModuleType, broker: RunningBroker, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"feed": "single", "accumulate_grad_batches": 1}
    last = len([each for each in fits.fit(broker, **settings).noted if each == "update"])
    fits.fit(broker, fits.Saving(tmp_path / "saved.ckpt", 3), **settings)
    assert fits.fit(broker, resume=tmp_path / "saved.ckpt", **settings).noted[0] == (3, 0)
    assert last > 6


def test_a_checkpoint_saved_after_a_failed_fit_goes_on_there(
    fits: ModuleType, broker: RunningBroker, tmp_path: Path
) -> None:
    model = fits.Noting()
    with pytest.raises(RuntimeError, match="of the model"):
        fits.fit(broker, fits.Failing(), model=model)
    model.trainer.save_checkpoint(tmp_path / "failed.ckpt")
    assert fits.fit(broker, resume=tmp_path / "failed.ckpt").noted == of(2)


def test_an_epoch_that_is_over_is_followed_by_another(fits: ModuleType, broker: RunningBroker, tmp_path: Path) -> None:
    for batch in (PACKS * ALL, 0):
        fits.fit(broker, fits.Saving(tmp_path / "end.ckpt", batch), max_epochs=3)
        assert fits.fit(broker, resume=tmp_path / "end.ckpt", max_epochs=3).noted == of(0) * 2


@pytest.mark.parametrize("feed", ["train", "endless"])
def test_a_trainer_that_fits_again_goes_on(fits: ModuleType, broker: RunningBroker, feed: str) -> None:
    """Lightning fetches a batch and begins to iterate anew, where a trainer has fitted before."""
    model = fits.fit(broker, feed=feed, max_steps=2)
    trainer = model.trainer
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 2, ALL
    trainer.fit(model, datamodule=trainer.datamodule)
    assert model.noted == of(0)


def test_an_epoch_has_as_many_steps_where_it_goes_on_with_other_ranks(
    fits: ModuleType, broker: RunningBroker, tmp_path: Path
) -> None:
    """Saved behind step 1 of 4, on the first of two ranks, which has a pack of each step."""
    with streampack.connect(broker.trainers, feed="endless", mesh={"dp": 2, "dp_rank": 1}) as other:
        iter(other)
        fits.fit(
            broker, fits.Saving(tmp_path / "saved.ckpt", 2), feed="endless", mesh={"dp": 2, "dp_rank": 0},
            accumulate_grad_batches=1, limit_train_batches=4,
        )  # fmt: skip
    alone = fits.fit(broker, feed="endless", limit_train_batches=4 * PACKS, resume=tmp_path / "saved.ckpt")
    assert alone.noted == of(2)[: 2 * (PACKS + 1)]


def test_a_checkpoint_without_the_loaders_state_is_said(
    fits: ModuleType, broker: RunningBroker, tmp_path: Path
) -> None:
    class Another(fits.PackedDataModule):  # type: ignore[name-defined]
        """Lightning keeps states by the name of the class."""

    fits.fit(broker, fits.Saving(tmp_path / "saved.ckpt", PACKS))
    with pytest.warns(UserWarning, match="got a checkpoint without the state of .*Another"):
        fits.fit(broker, data=Another(broker.trainers), resume=tmp_path / "saved.ckpt", max_steps=2)


def test_with_manual_optimization_a_batch_is_a_step(fits: ModuleType, broker: RunningBroker, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 1, "precision": "bf16-true"}
    whole = fits.fit(broker, fits.Saving(tmp_path / "saved.ckpt", 3), model=fits.InSteps(), **settings)
    assert whole.noted == of(0)[: 3 * (PACKS + 1)]
    assert fits.fit(broker, resume=tmp_path / "saved.ckpt", model=fits.InSteps(), **settings).noted == of(3)


@pytest.mark.parametrize(("format", "precision"), [("thd", "bf16-true"), ("hf", "bf16-mixed")])
def test_batches_are_whole_where_lightning_converts_them(
    fits: ModuleType, broker: RunningBroker, format: str, precision: str
) -> None:
    model = fits.fit(
        broker, model=fits.Validating(), format=format, val_feed="valid", precision=precision,
        num_sanity_val_steps=1, val_check_interval=4, limit_train_batches=8,
    )  # fmt: skip
    validated = [each for each in model.noted if isinstance(each, list)]
    rounds = [validated[1:][: len(validated) // 2], validated[1 + len(validated) // 2 :]]
    assert [each for each in model.noted if not isinstance(each, list)] == of(0)[: 4 * (PACKS + 1)]
    assert rounds[0] == rounds[1]
    assert sum(map(len, rounds[0])) == SAMPLES


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"accumulate_grad_batches": 1},
            "got 2 packs on each rank in step 0, expected accumulate_grad_batches=1 packs",
        ),
        ({"limit_train_batches": 5}, "limit_train_batches=5 with accumulate_grad_batches=2, expected whole steps"),
        ({"format": "numpy"}, "got format 'numpy', expected thd or hf"),
    ],
)
def test_settings_that_would_go_wrong_are_refused(
    fits: ModuleType, broker: RunningBroker, settings: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        fits.fit(broker, **settings)


def test_a_trial_that_would_use_steps_up_is_refused(fits: ModuleType, broker: RunningBroker, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import LearningRateFinder

    with pytest.raises(UserError, match="got the callback LearningRateFinder, whose trial would use up steps"):
        fits.fit(broker, LearningRateFinder(), default_root_dir=tmp_path)
