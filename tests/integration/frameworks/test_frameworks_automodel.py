"""NeMo AutoModel's recipe ``train_ft`` by the YAML of its page: losses are those of AutoModel's own packed dataset, and
the recipe goes on where it was killed.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from nemo_automodel.components.datasets.loader import ThdPackingConfig
from transformers import LlamaConfig, LlamaForCausalLM

from streampack.core.model.rules import Batch, Rules
from streampack.errors import UserError
from streampack.integrations import automodel
from tests.integration.frameworks.framework_runs import (
    ROOT,
    SHAPE,
    STEPS,
    Job,
    Line,
    losses,
    run_jobs,
    serving_rows,
    write_model,
    write_rows,
)  # fmt: skip
from tests.integration.running import folder, write

PAGE = (ROOT / "docs/how-to/automodel.md").read_text()

OWN = {
    "packed_sequence": {"packed_sequence_size": 128, "max_packs": 80},
    "dataset": {"_target_": "tests.integration.frameworks.automodel_process.Samples"},
    "dataloader": {"_target_": "torchdata.stateful_dataloader.StatefulDataLoader", "shuffle": False},
}


def of_page(number: int) -> Any:
    """A YAML block of the page."""
    return yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[number])


def config_of(path: Path, endpoint: str, **changes: Any) -> Path:
    """The page's YAML, with a small model, at a broker; ``changes`` replace whole sections."""
    config = of_page(0)
    config["dataset"]["endpoint"] = endpoint
    config["model"] = {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained", "torch_dtype": "float64",
        "pretrained_model_name_or_path": str(path.parent / "model"), "force_hf": True,
    }  # fmt: skip
    config["dist_env"] = {"backend": "gloo", "timeout_minutes": 1}
    config["distributed"] = {
        "strategy": "fsdp2", "tp_size": 1, "cp_size": 1,
        "mp_policy": {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy"},
    }  # fmt: skip
    config["loss_fn"] = {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"}
    config["optimizer"] = {"_target_": "torch.optim.Adam", "lr": 1e-2}
    config["checkpoint"] |= {"model_save_format": "torch_save", "save_consolidated": False}
    config |= changes
    config["checkpoint"]["checkpoint_dir"] = str(path)
    return write(path.with_suffix(".yaml"), config)


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, list[Line]]]:
    with ExitStack() as stack:
        path = stack.enter_context(folder())
        rows = write_rows(path / "rows.jsonl")
        write_model(path / "model", LlamaForCausalLM(LlamaConfig(**SHAPE)))
        broker = stack.enter_context(serving_rows(rows, of_page(1)["rules"]))
        configs = {
            "own": config_of(path / "own", "", **OWN),
            "whole": config_of(path / "whole", broker.trainers),
            "killed": config_of(path / "killed", broker.trainers),
            "rest": path / "killed.yaml",
            "two": config_of(path / "two", broker.trainers),
        }
        dies, ranks = {"killed": 11}, {"two": 2}
        jobs = {name: Job([str(each)], dies.get(name), ranks.get(name, 1)) for name, each in configs.items()}
        yield run_jobs("automodel_process", jobs, path, rows)


def test_losses_are_those_of_automodels_own_packed_dataset(runs: dict[str, list[Line]]) -> None:
    assert [line["step"] for line in runs["own"]] == list(range(STEPS))
    assert losses(runs["whole"]) == pytest.approx(losses(runs["own"]), rel=1e-6)


def test_the_recipe_goes_on_where_it_was_killed(runs: dict[str, list[Line]]) -> None:
    assert runs["killed"] == runs["whole"][:12]
    assert runs["rest"] == runs["whole"][8:]


def test_two_ranks_of_fsdp2_have_the_losses_of_one(runs: dict[str, list[Line]]) -> None:
    assert losses(runs["two"]) == pytest.approx(losses(runs["whole"]), rel=1e-6)


def test_steps_that_are_no_updates_are_refused() -> None:
    check_rules = automodel.check_rules
    check_rules(Rules(budget=128, packs=4), 4)
    with pytest.raises(
        UserError, match=r"got steps of 8 packs, expected global_batch_size=4\. Set global_batch_size of"
    ):
        check_rules(Rules(budget=128, packs=8), 4)
    with pytest.raises(UserError, match="got steps with a varying number of packs"):
        check_rules(Rules(budget=128, batch=Batch(samples=8)), 4)


def test_settings_with_which_automodel_would_train_on_something_else_are_refused() -> None:
    dataset = automodel.StreampackDataset(4, max_packs=80)
    with pytest.raises(
        UserError, match=r"got max_packs=10, expected a multiple of global_batch_size, 4\. Set max_packs to 8"
    ):
        automodel.StreampackDataset(4, max_packs=10)
    with pytest.raises(UserError, match=r"shuffle: false and packed_sequence.prepacked: true"):
        ThdPackingConfig(128).build(dataset)
    with pytest.raises(UserError, match=r"shuffle: false and packed_sequence.prepacked: true"):
        dataset.shuffle(buffer_size=10, seed=0)
    with pytest.raises(UserError, match=r"Set dataloader.num_workers: 0"):
        pickle.dumps(dataset)
    with pytest.raises(
        UserError, match=r"got step_scheduler.local_batch_size=2, expected 1.*rules.budget 2 times as large"
    ):
        automodel.one_row([{}, {}])


def test_a_checkpoint_within_a_step_is_refused_and_each_epoch_has_max_packs(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    with serving_rows(rows, of_page(1)["rules"]) as broker:
        dataset = automodel.StreampackDataset(4, broker.trainers, max_packs=8).shard(1, 0)
        packs = iter(dataset)
        next(packs)
        with pytest.raises(
            UserError, match=r"within step 0, 3 packs before its end.*Set step_scheduler.global_batch_size"
        ):
            dataset.state_dict()
        assert len(list(packs)) + 1 == len(dataset) == 8
        assert [pack.step for pack in dataset] == [0] * 4 + [1] * 4, "of the next epoch"
        dataset.close()
