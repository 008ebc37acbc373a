"""VeOmni's text trainer, by the program and the configuration of its page: packs and losses are those of VeOmni's own
dataloader, and it goes on where it was killed. VeOmni needs another transformers: see requirements-veomni.txt.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

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
from tests.integration.running import RunningBroker, folder, write

PACKAGES = Path(sys.prefix) / "veomni"
PAGE = (ROOT / "docs/how-to/veomni.md").read_text()

pytestmark = pytest.mark.skipif(
    not (PACKAGES / "veomni").exists(),
    reason=f"no VeOmni: pip install --no-deps --target {PACKAGES} -r requirements-veomni.txt",
)


def of_page(kind: str, number: int = 0) -> str:
    """A code block of the page."""
    return str(re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[number])


class Runs:
    """Runs of the page's program, one after another, in forks of one process that has imported VeOmni."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs: dict[str, Job] = {}
        (path / "train.py").write_text(of_page("python"))
        config = yaml.safe_load(of_page("yaml"))
        kernels = ("cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss", "moe")
        config["model"]["ops_implementation"] |= {f"{name}_implementation": "eager" for name in kernels}
        config["model"]["model_path"] = str(path / "model")
        config["train"]["accelerator"] = {"fsdp_config": {"mixed_precision": {"enable": False}}}
        config["train"] |= {"gradient_checkpointing": {"enable": False}, "wandb": {"enable": False}}
        config["train"]["optimizer"] = {"lr": 1e-2}
        config["train"]["checkpoint"]["save_hf_weights"] = False  # VeOmni refuses torch 2.13 there
        write(path / "train.yaml", config)
        write_model(path / "model", Qwen2ForCausalLM(Qwen2Config(**SHAPE)))

    def add(self, name: str, *arguments: str, out: str = "", dies_at: int | None = None, ranks: int = 1) -> None:
        """``out``: the run whose checkpoints it shares."""
        one = ["--train.init_device=cuda", "--train.accelerator.fsdp_config.fsdp_mode=ddp"] if ranks == 1 else []
        where = f"--train.checkpoint.output_dir={self.path / (out or name)}"
        words = [str(self.path / "train.py"), str(self.path / "train.yaml"), where, *one, *arguments]
        self.jobs[name] = Job(words, dies_at, ranks)

    def add_program(self, name: str, code: str) -> None:
        """Another program, in the same kind of process."""
        (self.path / f"{name}.py").write_text(code)
        self.jobs[name] = Job([str(self.path / f"{name}.py")])


def at(broker: RunningBroker) -> str:
    return f"--data.train_path={broker.trainers}"


OWN = ("--data.datasets_type=rows", "--data.dataloader.type=native", "--data.dataloader.num_workers=0",
       "--data.dyn_bsz_buffer_size=16", "--data.dataloader.pin_memory=false", "--train.checkpoint.save_steps=0",
       "--train.checkpoint.save_epochs=0")  # fmt: skip
BATCHES = ("--train.dyn_bsz=false", "--train.micro_batch_size=3", "--train.global_batch_size=12")


REFUSED = """
import json
from streampack.core.model.keys.planning_keys import Warmup
from streampack.core.model.rules import Batch, Rules
from streampack.errors import UserError
from streampack.integrations.veomni import Settings, VeomniDataLoader, VeomniFeed, check_rules
from veomni.data.data_collator import MainCollator, NoopDataCollator
from veomni.distributed.parallel_state import init_parallel_state

init_parallel_state(dp_size=1, dp_mode="ddp")
dataset = VeomniFeed("tcp://127.0.0.1:1")
usual = {"collate_fn": MainCollator(), "dyn_bsz": True, "micro_batch_size": 1, "global_batch_size": 4,
         "max_seq_len": 64, "train_steps": 100, "bsz_warmup_ratio": 0.0,
         "bsz_warmup_init_mbtoken": 200, "dyn_bsz_count_mode": "total"}
on = Settings(dyn_bsz=True, budget=64, packs=4, samples=4, warmup=None)
off = Settings(dyn_bsz=False, budget=64, packs=4, samples=4, warmup=None)
grows = Settings(dyn_bsz=True, budget=64, packs=4, samples=4, warmup=(16, 2))
fits = Rules(budget=64, packs=4)
check_rules(fits, on)
check_rules(Rules(budget=64, batch=Batch(samples=4)), off)
check_rules(Rules(budget=64, packs=4, warmup=Warmup(init=16, steps=2)), grows)
calls = [
    lambda: VeomniFeed("tcp://node0:7402", data_type="conversation"),
    lambda: iter(dataset),
    lambda: VeomniDataLoader([], **usual),
    lambda: VeomniDataLoader(dataset, **usual | {"collate_fn": NoopDataCollator()}),
    lambda: VeomniDataLoader(dataset, **usual | {"dyn_bsz_count_mode": "effective"}),
    lambda: check_rules(Rules(budget=64, packs=8), on),
    lambda: check_rules(Rules(budget=128, packs=4), on),
    lambda: check_rules(Rules(budget=64, batch=Batch(samples=4)), on),
    lambda: check_rules(fits, off),
    lambda: check_rules(fits, grows),
    lambda: check_rules(Rules(budget=64, packs=4, warmup=Warmup(init=16, steps=2)), on),
    lambda: check_rules(Rules(budget=64, packs=4, share="prefix"), on),
]
for number, call in enumerate(calls):
    try:
        call()
        error = "nothing"
    except UserError as refused:
        error = str(refused)
    print(json.dumps({"step": number, "error": error}))
"""
"""Calls that the adapter refuses, each of which prints why."""
REASONS = (
    "got data.data_type='conversation', expected 'plaintext'",
    "got data.datasets_type: streampack with another dataloader",
    "got data.dataloader.type: streampack with another dataset",
    "got the collator NoopDataCollator",
    "got train.dyn_bsz_count_mode='effective', expected 'total'",
    "got steps of 8 packs, expected 4 packs, because train.dyn_bsz is true",
    "got packs of 128 tokens, expected 64",
    "got steps of batches of 4 samples, expected 4 packs",
    "got steps of 4 packs, expected batches of 4 samples, because train.dyn_bsz is false",
    "got no rules.warmup, expected {init: 16, steps: 2}",
    "got rules.warmup {init: 16, steps: 2}, but VeOmni's settings have none",
    "got a feed with share",
)


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, list[Line]]]:
    with ExitStack() as stack:
        path = stack.enter_context(folder())
        rows = write_rows(path / "rows.jsonl")
        broker = stack.enter_context(serving_rows(rows, yaml.safe_load(of_page("yaml", 1))["rules"]))
        batches = {"budget": 192, "packer": "none", "micro_batch_size": 3, "step": {"samples": 12}}
        batched = stack.enter_context(serving_rows(rows, batches))
        todo = Runs(path)
        todo.add("own", *OWN)
        todo.add("whole", at(broker))
        todo.add("killed", at(broker), dies_at=11)
        todo.add("rest", at(broker), out="killed")
        todo.add("own_batches", *OWN, *BATCHES)
        todo.add("batches", at(batched), *BATCHES)
        todo.add("two_killed", at(broker), dies_at=11, ranks=2)
        todo.add("two_rest", at(broker), out="two_killed")
        todo.add("ulysses", at(broker), "--train.accelerator.ulysses_size=2", ranks=2)
        todo.add_program("refused", REFUSED)
        yield run_jobs("veomni_process", todo.jobs, path, rows, PACKAGES)


def check_equal(got: list[Line], expected: list[Line]) -> None:
    assert [line["step"] for line in expected] == list(range(STEPS))
    assert [line["digest"] for line in got] == [line["digest"] for line in expected]
    assert losses(got) == pytest.approx(losses(expected), rel=1e-6)


def test_micro_batches_and_losses_are_those_of_veomnis_buffer(runs: dict[str, list[Line]]) -> None:
    check_equal(runs["whole"], runs["own"])


def test_without_dyn_bsz_they_are_those_of_its_fixed_batches(runs: dict[str, list[Line]]) -> None:
    check_equal(runs["batches"], runs["own_batches"])


def test_the_trainer_goes_on_where_it_was_killed(runs: dict[str, list[Line]]) -> None:
    assert runs["killed"] == runs["whole"][:12]
    assert runs["rest"] == runs["whole"][8:]


def test_two_ranks_of_fsdp2_have_the_losses_of_one_which_goes_on_with_their_checkpoint(
    runs: dict[str, list[Line]],
) -> None:
    assert losses(runs["two_killed"]) == pytest.approx(losses(runs["whole"][:12]), rel=1e-6)
    assert losses(runs["two_rest"]) == pytest.approx(losses(runs["whole"][8:]), rel=1e-6)


def test_two_ranks_that_share_sequences_by_ulysses_have_the_losses_of_one(runs: dict[str, list[Line]]) -> None:
    assert losses(runs["ulysses"]) == pytest.approx(losses(runs["whole"]), rel=1e-6)


def test_settings_with_which_veomni_would_train_on_something_else_are_refused(runs: dict[str, list[Line]]) -> None:
    errors = [line["error"] for line in runs["refused"]]
    assert [error[: len(reason)] for error, reason in zip(errors, REASONS, strict=True)] == list(REASONS)
