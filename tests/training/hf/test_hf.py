"""The mixin over transformers' Trainer and TRL's SFTTrainer: losses, gradients, evaluations, resuming, what is refused.

As processes that are killed: ``tests/integration/frameworks/test_frameworks_hf.py`` and ``test_frameworks_trl.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import streampack
from streampack.errors import MeshError, StateError, UserError
from streampack.sources import SourceSettings, open_source
from tests.integration.running import producing_here, running_broker, write_jsonl

hf: Any
"""``tests.training.hf.hf_trainers``, once tests run."""


@pytest.fixture(autouse=True, scope="module")
def _frameworks() -> None:
    global hf
    hf = import_module("tests.training.hf.hf_trainers")


BATCHES: dict[str, dict[str, Any]] = {
    "packs": {},
    "samples": {"samples": 20},
    "padded": {"samples": 20, "padded": True},
}


@pytest.mark.parametrize("kind", list(BATCHES))
def test_an_update_has_the_loss_and_gradients_of_its_samples(tmp_path: Path, kind: str) -> None:
    compare = hf.Compare(1e-9)
    with hf.local(**BATCHES[kind]) as loader:
        model = hf.llama().double()
        trainer = hf.made(
            tmp_path,
            loader,
            model=model,
            callbacks=[compare],
            compute_loss_func=hf.of_double,
            max_grad_norm=0,
            max_steps=3,
        )
        trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged == pytest.approx(compare.losses, rel=1e-6)  # the Trainer adds them up in float32
    assert len(logged) == 3
    assert len(set(compare.sizes)) == (1 if kind == "packs" else 2), "so many micro-batches as a step has"


@pytest.mark.parametrize("format", ["hf", "hf_shifted"])
@pytest.mark.parametrize("sft", [False, True])
def test_trainers_own_losses_are_those_of_the_samples(tmp_path: Path, sft: bool, format: str) -> None:
    compare = hf.Compare(1e-5)
    with hf.local(format=format, samples=20) as loader:
        trainer = hf.made(
            tmp_path, loader, sft=sft, callbacks=[compare], max_grad_norm=0, max_steps=3, learning_rate=1e-3
        )
        trainer.args.include_num_input_tokens_seen = "non_padding"
        trainer.model.config.use_cache = True  # as parts of a configuration have it that the Trainer does not know
        trainer.train()
        assert trainer.state.num_input_tokens_seen == loader.stats()["tokens"]
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["loss"] for line in logged] == pytest.approx(compare.losses, rel=1e-5)
    assert all(0.5 < line["packing_efficiency"] <= 1 for line in logged)
    assert trainer.current_gradient_accumulation_steps == compare.sizes[-1] > 1  # by which SFT divides auxiliary losses


@pytest.mark.parametrize("sft", [False, True])
def test_an_evaluation_is_by_token_over_the_whole_feed_each_time(tmp_path: Path, sft: bool) -> None:
    with hf.local() as loader, hf.local(hf.rows(20), packs=1) as valid:
        trainer = hf.made(tmp_path, loader, sft=sft, eval_loader=valid, eval_strategy="steps", eval_steps=2)
        trainer.model.config.use_cache = True
        before, again = trainer.evaluate(), trainer.evaluate()
        with torch.no_grad():
            alone = [row["tokens"] for row in hf.rows(20)]
            expected = float(hf.summed(trainer.model.eval(), alone)) / sum(len(tokens) - 1 for tokens in alone)
        trainer.train()
    assert before["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert again["eval_loss"] == before["eval_loss"]
    found = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line][-2:]
    assert before["eval_loss"] > found[0] > found[1]


def test_feeds_for_evaluation_have_names_and_metrics_their_logits(tmp_path: Path) -> None:
    shapes = []

    def metrics(found: Any) -> dict[str, float]:
        shapes.append((found.predictions.shape, found.label_ids.shape))
        return {"count": len(found.predictions)}

    with hf.local() as loader, hf.local(hf.rows(9), packs=1) as easy, hf.local(hf.rows(20), packs=1) as hard:
        trainer = hf.made(tmp_path, loader, eval_loader={"easy": easy, "hard": hard})
        trainer.compute_metrics = metrics
        found = trainer.evaluate()
        predicted = trainer.predict(hard)
    assert predicted.metrics["test_loss"] == found["eval_hard_loss"]
    assert shapes.pop() == (predicted.predictions.shape, predicted.label_ids.shape) == shapes[-1]
    assert found["eval_easy_loss"] != found["eval_hard_loss"]
    assert found["eval_hard_count"] > found["eval_easy_count"]
    assert shapes == [
        ((n, hf.BUDGET, hf.VOCABULARY), (n, hf.BUDGET)) for n in (found["eval_easy_count"], found["eval_hard_count"])
    ]


def trained(
    folder: Path, max_steps: int, save_steps: int, resume: str | None = None, **more: Any
) -> tuple[Any, list[Any]]:
    seen = hf.Seen()
    with hf.local(hf.rows(30)) as loader:
        trainer = hf.made(
            folder, loader, callbacks=[seen], max_steps=max_steps, save_strategy="steps", save_steps=save_steps, **more
        )
        trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    return seen, trainer.state.log_history


def feed_of() -> list[str]:
    with hf.local(hf.rows(30)) as loader:
        return [step.digest for step in loader.steps()]


def test_training_stops_where_a_finite_feed_ends_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    feed = feed_of()
    count = len(feed)
    seen, _ = trained(tmp_path, 6 * count, save_steps=count - 1)
    assert seen.digests == feed
    said = [record.message for record in caplog.records if record.name == "streampack.hf"]
    assert len(said) == 1
    assert said[0].startswith(f"the feed ended: training stops after {count} of max_steps={6 * count} updates")
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{n}" for n in (count - 1, count)}
    saved = json.loads((tmp_path / f"checkpoint-{count}" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["LoaderState"]["attributes"]["saved"]["next_step"] == count
    for place, rest in ((count - 1, feed[-1:]), (count, [])):
        assert trained(tmp_path, 6 * count, save_steps=100, resume=f"checkpoint-{place}")[0].digests == rest
    caplog.clear()
    assert trained(tmp_path, count, save_steps=100)[0].digests == feed
    assert not [record for record in caplog.records if record.name == "streampack.hf"], "as many as were asked for"


def test_updates_follow_the_packs_of_each_stage_and_a_stage_that_does_not_fit_ends_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stages of 2, then 4 packs; the third has no bound of samples in a pack, as static shapes need."""
    settings = {
        "rules": {"budget": hf.BUDGET, "step": {"packs": 2}, "max_samples_per_pack": 16},
        "streams": {"web": {}},
        "stages": [
            {"name": "more", "at": {"step": 2}, "rules": {"step": {"packs": 4}}},
            {"name": "free", "at": {"step": 5}, "rules": {"max_samples_per_pack": None}},
        ],
    }
    data = write_jsonl(tmp_path / "data.jsonl", hf.rows(300))
    source = open_source(SourceSettings("jsonl", str(data), tokens_key="tokens"))
    sizes, seen = list[int](), hf.Seen()

    class Sizes(hf.Seen):
        def on_pre_optimizer_step(self, *_: Any, train_dataloader: Any, **more: Any) -> None:
            sizes.append(len(train_dataloader.step))

    with (
        running_broker(settings) as broker,
        producing_here(broker.producers, {"web": source}),
        streampack.connect(broker.trainers, format="hf", static_shapes=True) as loader,
    ):
        whole: dict[str, Any] = {"max_steps": 40, "save_strategy": "steps", "save_steps": 30}
        trainer = hf.made(tmp_path / "out", loader, callbacks=[seen, Sizes()], **whole)
        trainer.train()
    assert sizes == [2, 2, 4, 4, 4]
    assert trainer.state.global_step == len(seen.digests) == 5
    assert (trainer.stage_ends.step, trainer.stage_ends.stage) == (5, "free")
    (line,) = [record.message for record in caplog.records if record.name == "streampack.hf"]
    assert line.startswith("training stops after 5 of max_steps=40 updates, and saves a checkpoint")
    assert "cannot go on with step 5, which is in stage 'free'" in line
    (saved,) = (tmp_path / "out").glob("checkpoint-*/trainer_state.json")
    state = json.loads(saved.read_text())["stateful_callbacks"]["LoaderState"]["attributes"]["saved"]
    assert state["next_step"] == 5


def test_epochs_are_passes_over_a_feed_of_known_length(tmp_path: Path) -> None:
    feed = feed_of()
    count = len(feed)
    more: dict[str, Any] = {"num_train_epochs": 3, "steps_per_epoch": count}
    whole, log = trained(tmp_path, -1, save_steps=count, **more)
    assert whole.digests == feed * 3
    assert log[-1]["epoch"] == 3
    for epoch in (1, 2):
        rest, rest_log = trained(tmp_path, -1, save_steps=count, resume=f"checkpoint-{epoch * count}", **more)
        assert rest.digests == feed * (3 - epoch)
        assert [line for line in rest_log if "loss" in line] == [line for line in log if "loss" in line]
    half, _ = trained(tmp_path, -1, save_steps=count + 1, **more)
    rest, _ = trained(tmp_path, -1, save_steps=count, resume=f"checkpoint-{count + 1}", **more)
    assert half.digests == feed * 3
    assert rest.digests == [*feed[1:], *feed]
    assert whole.places[: 2 * count] == [place for k in range(count) for place in (k, k + 1)]
    saved = json.loads((tmp_path / f"checkpoint-{count}" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["LoaderState"]["attributes"]["saved"]["next_step"] == count


def test_a_save_between_the_packs_of_a_step_is_the_state_before_it(tmp_path: Path) -> None:
    places: list[tuple[int, int]] = []

    class Saving(hf.PackedTrainer):
        def compute_loss(self, *args: Any, **given: Any) -> Any:
            loss = super().compute_loss(*args, **given)
            states = self._steps.state(), self._steps.loader.state_dict()
            places.append((states[0]["next_step"], self.packed_step.index))
            assert states[1]["next_step"] in (self.packed_step.index, self.packed_step.index + 1)
            return loss

    with hf.local() as loader:
        Saving(model=hf.llama(), args=hf.arguments(tmp_path, max_steps=3), loader=loader).train()
    assert len(places) > 3
    assert all(saved == trained for saved, trained in places)


def test_training_again_begins_where_it_began(tmp_path: Path) -> None:
    seen = hf.Seen()
    with hf.local(repeat=True) as loader:
        trainer = hf.made(tmp_path, loader, callbacks=[seen], max_steps=3)
        trainer.train()
        trainer.train()
    assert seen.digests[:3] == seen.digests[3:]


def test_samples_a_second_are_of_samples(tmp_path: Path) -> None:
    with hf.local(hf.rows(30)) as loader:
        metrics = hf.made(tmp_path, loader, max_steps=100).train().metrics
    assert metrics["train_samples_per_second"] == pytest.approx(30 / metrics["train_runtime"], rel=0.01)


def test_a_run_that_has_ended_trains_no_more(tmp_path: Path) -> None:
    """However often it is started: the Trainer alone would make one more update each time."""
    trained(tmp_path, 2, save_steps=2)
    seen, _ = trained(tmp_path, 2, save_steps=2, resume="checkpoint-2")
    assert seen.digests == []
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_callbacks_that_are_restored_from_a_checkpoint_leave_the_loader_where_it_belongs(tmp_path: Path) -> None:
    seen = hf.Seen()
    with hf.local() as loader:
        hf.made(tmp_path, loader, max_steps=2, save_strategy="steps", save_steps=2).train()
    with hf.local() as loader:
        trainer = hf.made(
            tmp_path, loader, max_steps=3, callbacks=[seen], save_strategy="steps", save_steps=3,
            restore_callback_states_from_checkpoint=True,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=True)
    assert seen.places == [2, 3]
    saved = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["LoaderState"]["attributes"]["saved"]["next_step"] == 3


@pytest.fixture(scope="module")
def loader() -> Iterator[Any]:
    with hf.local() as found:
        yield found


def test_a_checkpoint_of_another_dataset_is_refused(tmp_path: Path, loader: Any) -> None:
    hf.made(tmp_path, loader, max_steps=1, save_strategy="steps", save_steps=1).train()
    path = tmp_path / "checkpoint-1" / "trainer_state.json"
    saved = json.loads(path.read_text())
    del saved["stateful_callbacks"]["LoaderState"]
    path.write_text(json.dumps(saved))
    with pytest.raises(StateError, match="1 updates without the loader's state"):
        hf.made(tmp_path, loader, max_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"max_steps": -1}, "got max_steps=-1, expected max_steps of at least 1"),
        ({"gradient_accumulation_steps": 4}, "got gradient_accumulation_steps=4, expected 1"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
            "got gradient_accumulation_steps=4, expected 1",
        ),
        ({"batch_eval_metrics": True}, "got batch_eval_metrics=True"),
        ({"auto_find_batch_size": True}, "got auto_find_batch_size=True"),
        ({"train_sampling_strategy": "group_by_length"}, "got train_sampling_strategy='group_by_length'"),
        ({"use_cache": True}, "got use_cache=True, expected False"),
        ({"sft": True, "packing": True}, "got packing=True, expected False. The broker packs"),
        ({"sft": True, "padding_free": True}, "got padding_free=True"),
        ({"sft": True, "completion_only_loss": True}, "got completion_only_loss=True.*loss_mask"),
    ],
)
def test_settings_that_packs_cannot_have_are_refused(
    tmp_path: Path, loader: Any, setting: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        hf.made(tmp_path, loader, **setting)


def test_loaders_that_cannot_be_are_refused(tmp_path: Path, loader: Any) -> None:
    with (
        hf.local(format="thd") as other,
        pytest.raises(UserError, match="got a loader with format='thd', expected 'hf'"),
    ):
        hf.made(tmp_path, other)
    with hf.local(repeat=True) as endless, pytest.raises(UserError, match="an eval_loader that never ends"):
        hf.made(tmp_path, loader, eval_loader=endless)
    with pytest.raises(UserError, match="the same loader for training and evaluation"):
        hf.made(tmp_path, loader, eval_loader=loader)
    with pytest.raises(UserError, match="got train_dataset together with a loader"):
        hf.PackedTrainer(hf.llama(), hf.arguments(tmp_path), loader=loader, train_dataset=[1])
    trainer = hf.made(tmp_path, loader)
    with pytest.raises(UserError, match="the same loader for training and evaluation"):
        trainer.evaluate(loader)
    with hf.local(format="thd") as other, pytest.raises(UserError, match="got a loader with format='thd'"):
        trainer.predict(other)
    positions = {"position_ids": {"dtype": "int32"}}
    supplied = [row | {"position_ids": list(range(len(row["tokens"])))} for row in hf.rows()]
    with hf.local(supplied, fields=positions) as own, pytest.raises(UserError, match="got declared position_ids with"):
        hf.made(tmp_path, own)


def test_trainers_that_lose_the_denominator_are_refused(tmp_path: Path, loader: Any) -> None:
    model = hf.llama()
    model.accepts_loss_kwargs = False
    with pytest.raises(UserError, match="got LlamaForCausalLM, to which this Trainer passes no num_items_in_batch"):
        hf.made(tmp_path, loader, model=model)
    with pytest.raises(
        UserError, match=r"got TrainingArguments as the arguments of an SFTTrainer, expected trl\.SFTConfig"
    ):
        hf.PackedSFTTrainer(hf.llama(), hf.arguments(tmp_path), loader=loader)
    with pytest.raises(UserError, match="got formatting_func together with a loader"):
        hf.PackedSFTTrainer(hf.llama(), None, loader=loader, formatting_func=str)


@pytest.mark.parametrize(
    ("kind", "attention", "apart"),
    [
        ("llama", "eager", True),
        ("qwen3_moe", "sdpa", True),
        ("gemma3_text", "sdpa", True),
        ("gpt2", "sdpa", True),
        ("opt", "sdpa", False),
        ("bloom", "eager", False),
        ("gpt_oss", "eager", False),
        ("mamba", "eager", False),
    ],
)
def test_models_in_which_samples_see_each_other_are_refused(
    tmp_path: Path, loader: Any, kind: str, attention: str, apart: bool
) -> None:
    """And those alone: what changes a sample's logits is tried beside it, in calls that are not checked."""
    from streampack.views.isolation.hf_dependence import inside

    model = hf.tiny(kind, attention).eval()
    positions = torch.tensor([[*range(5), *range(6)]])
    ids = torch.arange(1, 12)[None]
    other = torch.cat([ids[:, :5] + 20, ids[:, 5:]], dim=1)
    with torch.no_grad(), inside():
        one, two = (model(input_ids=x, position_ids=positions, use_cache=False).logits[0, 5:] for x in (ids, other))
    assert torch.allclose(one, two, atol=1e-6) == apart  # experts get other shapes, and add in another order
    if apart:
        hf.made(tmp_path, loader, model=model)
        assert all(parameter.grad is None for parameter in model.parameters())
    else:
        with pytest.raises(
            UserError, match=f"with attn_implementation='{attention}', in which samples of a pack affect"
        ):
            hf.made(tmp_path, loader, model=model)


def test_a_model_is_left_as_it_was(tmp_path: Path, loader: Any) -> None:
    """Its modes, its random numbers; and one whose layers are checkpointed the old way is tried as well."""
    model = hf.llama(attention_dropout=0.5).train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    model.lm_head.eval()
    hf.made(tmp_path, loader, model=model)
    drawn = torch.rand(())
    assert [model.training, model.model.training, model.lm_head.training] == [True, True, False]
    torch.manual_seed(hf.arguments(tmp_path).seed)  # as trainers begin
    assert drawn == torch.rand(())


@pytest.mark.parametrize(("shown", "refused"), [("tuple", True), ("loss", False)])
def test_models_are_tried_by_the_logits_that_they_give(tmp_path: Path, loader: Any, shown: str, refused: bool) -> None:
    """A tuple's first are; one that gives none is not."""
    model = hf.tiny("opt", "sdpa")
    forward = model.forward

    def of(*args: Any, **given: Any) -> Any:
        found = forward(*args, **given)
        return found.to_tuple() if shown == "tuple" else {"loss": found.loss}

    model.forward = of
    if refused:
        with pytest.raises(UserError, match="samples of a pack affect each other"):
            hf.made(tmp_path, loader, model=model)
    else:
        hf.made(tmp_path, loader, model=model)


def test_models_of_padded_rows_may_be_any(tmp_path: Path) -> None:
    with hf.local(samples=20, padded=True) as rows_of_samples:
        hf.made(tmp_path, rows_of_samples, model=hf.tiny("opt", "sdpa"), max_steps=1).train()


def test_a_trainer_whose_own_arguments_come_first_is_given_them_by_name(tmp_path: Path, loader: Any) -> None:
    class Own(hf.Trainer):
        def __init__(self, settings: str, **given: Any) -> None:
            super().__init__(**given)
            self.settings = settings

    class PackedOwn(hf.PackedTrainerMixin, Own):
        pass

    kind: Any = PackedOwn
    assert kind(hf.llama(), hf.arguments(tmp_path), loader=loader, settings="own").settings == "own"


def test_a_rank_that_reads_for_another_is_refused(tmp_path: Path, loader: Any) -> None:
    from streampack.integrations.checks import hf_checks

    args = hf.arguments(tmp_path)
    hf_checks._check_mesh(streampack.Mesh(), args, 1)
    with pytest.raises(MeshError, match=r"got a loader with dp=1/2 .* in process 0 of 1"):
        hf_checks._check_mesh(streampack.Mesh(dp=2, dp_rank=1), args, 1)
