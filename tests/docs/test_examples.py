"""Python examples of the README and of ``docs/`` run as they stand: real broker, real producer, tiny models on the CPU.

A test here gives an example the names that it takes from its reader (a model, an optimizer) and replaces the endpoint.
The examples in ``TESTED`` have tests of their own, which look at the results. ``test_an_example_runs`` runs the others.
"""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

import streampack
from docs.generate.hooks import filled
from streampack.config.typed_yaml import convert
from streampack.sources import SourceSettings, open_source
from tests.docs.pages import BLOCKS, PAGES, ROOT, Block
from tests.docs.pasted import CODE, SAMPLES, SETTINGS, VALID, VOCABULARY, Tiny, tiny_llama
from tests.integration.running import RunningBroker, producing_here, running_broker, write_jsonl
from tests.integration.small_broker import SmallBroker

README = (ROOT / "README.md").read_text()


TESTED = (
    "model(batch.input_ids",
    "llama(**batch",
    "evaluate(batch)",
    "load_state_dict",
    "for prompt in prompts",
    "in preferences",
    "streampack.local(",
    'streampack.local("data/',
    "streampack.way_back",
    "step.regroup(budget=32768)",
    "streampack.packed_loss(",
    "batch.attention_mask",
    "eval_loader=valid",
    "trl_grpo.install(trainer)",
    "chats.send(sample)",
    "range(rollouts.next_seq",
)
"""A text of each example that has a test of its own."""


def block(starts: str) -> str:
    """Return the first example that holds a text; the README's come first."""
    assert starts in TESTED, f"add {starts!r} to TESTED"
    found = [each.code for each in CODE if starts in each.code]
    assert found, f"no example holds {starts!r}: mend the test, or take it out of TESTED"
    return found[0]


def run(code: str, endpoint: str, **names: Any) -> dict[str, Any]:
    """Run an example; the names it leaves behind."""
    assert "tcp://node0:7402" in code
    names |= {"streampack": streampack, "torch": torch}
    with pytest.MonkeyPatch.context() as patch:  # as ``streampack run`` does
        patch.setenv("STREAMPACK_ENDPOINT", endpoint)
        exec(compile(code.replace("tcp://node0:7402", endpoint), "README.md", "exec"), names)
    return names


def changed(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def falls(losses: list[float]) -> bool:
    """The last quarter is below the first; packs that are empty, as the last may be, have no loss."""
    some = [loss for loss in losses if loss]
    quarter = len(some) // 4
    return sum(some[-quarter:]) < 0.9 * sum(some[:quarter])


def test_the_training_loop_lowers_the_loss(broker: RunningBroker) -> None:
    torch.manual_seed(0)
    model = Tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []

    def summed(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        loss = cross_entropy(logits, labels, reduction=reduction)
        losses.append(loss.item() / max(int((labels != -100).sum()), 1))
        return loss

    given = {"model": model, "optimizer": optimizer, "cross_entropy": summed, "device_mesh": None}
    left = run(block("model(batch.input_ids"), broker.trainers, **given)
    assert len(losses) == 2 * (left["step"].index + 1)
    assert changed(model, before)
    assert falls(losses)


def test_the_loop_with_transformers_lowers_the_loss(broker: RunningBroker) -> None:
    torch.manual_seed(0)
    llama = tiny_llama()
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3)
    losses: list[float] = []
    llama.register_forward_hook(lambda _, __, out: losses.append(out.loss.item()))
    left = run(block("llama(**batch"), broker.trainers, llama=llama, optimizer=optimizer)
    assert len(losses) == 2 * (left["step"].index + 1)
    assert changed(llama, before)
    assert falls(losses)


def test_each_validation_reads_the_same_samples_while_training_goes_on(broker: RunningBroker) -> None:
    trained: list[Any] = []
    evaluated: list[Any] = []
    left = run(block("evaluate(batch)"), broker.trainers, update=trained.append, evaluate=evaluated.append)
    assert len(left["losses"]) == len(evaluated) / -(-len(trained) // 20)
    assert [step.index for step in trained] == list(range(len(trained)))
    rounds = -(-len(trained) // 20)
    assert rounds > 1
    each = len(evaluated) // rounds
    of_rounds = [evaluated[first : first + each] for first in range(0, len(evaluated), each)]
    ids = [[sample for batch in batches for sample in batch.sample_ids.tolist()] for batches in of_rounds]
    assert len(ids) == rounds
    assert all(found == ids[0] and len(found) == VALID for found in ids)
    assert sum(batch.num_samples for step in trained for batch in step) == SAMPLES


def test_the_trainer_of_hugging_face_trains_on_a_broker_s_steps(broker: RunningBroker, tmp_path: Path) -> None:
    torch.manual_seed(0)
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        str(tmp_path), max_steps=12, eval_strategy="steps", eval_steps=6, save_steps=6, logging_steps=6,
        learning_rate=1e-2, report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    given = {"Trainer": Trainer, "model": tiny_llama(), "args": args, "checkpoint": None}

    def logged(name: str) -> list[float]:
        trainer = run(block("eval_loader=valid"), broker.trainers, **given)["trainer"]
        return [line[name] for line in trainer.state.log_history if name in line]

    early, late = logged("loss")
    assert late < early
    given["model"] = tiny_llama()
    evaluated = logged("eval_loss")
    given["checkpoint"] = str(tmp_path / "checkpoint-6")
    assert logged("eval_loss") == evaluated


class Stopped(Exception):
    """A trainer that ends in the middle."""


def test_a_loop_resumes_from_a_checkpoint_without_losing_a_sample(broker: RunningBroker) -> None:
    code = block("load_state_dict")
    model, saved, log = Tiny(), list[dict[str, Any]](), list[Any]()
    given = {"model": model, "device_mesh": None, "save": saved.append, "log": log}

    def stop(step: streampack.Step) -> None:
        if step.index == 5:
            raise Stopped
        assert all(batch.step == step.index for batch in step)

    with pytest.raises(Stopped):
        run(code, broker.trainers, **given, checkpoint=None, update=stop)
    (checkpoint,) = saved
    assert checkpoint["loader"]["next_step"] == 1
    before, log[:] = [(index, digest, ids.tolist()) for index, digest, ids in log], []
    run(code, broker.trainers, **given, checkpoint=checkpoint, update=lambda step: None)
    after = [(index, digest, ids.tolist()) for index, digest, ids in log]
    assert after[:4] == before[1:]
    assert [index for index, _, _ in after] == list(range(1, len(after) + 1))
    samples = [tuple(sample) for _, _, ids in before[:1] + after for sample in ids]
    assert len(set(samples)) == len(samples) == SAMPLES


def test_the_loop_of_padded_micro_batches_trains_a_model(tmp_path: Path) -> None:
    """Its losses are those of the samples one by one, each over its update's tokens."""
    torch.manual_seed(0)
    llama, optimizer = tiny_llama(), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    samples = [list(b"padded") * (1 + i * 7 % 30) for i in range(60)]
    file = write_jsonl(tmp_path / "web.jsonl", [{"tokens": tokens} for tokens in samples])
    source = open_source(convert({"source": "jsonl", "shards": str(file)}, SourceSettings))
    settings = {
        "tokens": "uint16", "streams": {"web": {}},
        "rules": {"padded": True, "budget": 256, "step": {"samples": 20}, "align": {"lcm": 8}},
    }  # fmt: skip
    losses: list[float] = []

    def summed(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        loss = cross_entropy(logits, labels, reduction=reduction)
        losses.append(loss.item())
        return loss

    given: dict[str, Any] = {"gpt": lambda ids, mask: llama(ids, attention_mask=mask, use_cache=False).logits}
    given |= {"optimizer": optimizer, "cross_entropy": summed, "device_mesh": None}
    with running_broker(settings) as running, producing_here(running.producers, {"web": source}):
        left = run(block("batch.attention_mask"), running.trainers, **given)
    assert left["step"].index == 2
    with torch.no_grad():
        each = [torch.tensor([tokens]) for tokens in samples]
        alone = sum(float(llama(ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in each)
    assert sum(losses) == pytest.approx(alone, rel=1e-5)


def test_log_probs_of_forward_packs(broker: RunningBroker) -> None:
    """They are those of the micro-batches: until the policy is updated, the ratio to what it was is 1."""
    torch.manual_seed(0)
    actor = Tiny()
    before = {name: value.clone() for name, value in actor.state_dict().items()}
    ratios: list[torch.Tensor] = []
    forwards: list[int] = []

    def logprobs(actor: Tiny, batch: Any) -> torch.Tensor:
        forwards.append(len(batch.input_ids))
        logits = actor(batch.input_ids, batch.position_ids, batch.cu_seqlens_padded)
        return -cross_entropy(logits, batch.labels, reduction="none")

    def policy_loss(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        ratio = torch.exp(new - old)
        ratios.append(ratio.detach())
        return -(ratio * advantages).sum()

    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)
    given = {"actor": actor, "logprobs": logprobs, "policy_loss": policy_loss, "optimizer": optimizer}
    left = run(block("step.regroup(budget=32768)"), broker.trainers, **given)
    assert forwards == [512, 256, 256] * (left["step"].index + 1)
    assert torch.allclose(torch.cat(ratios), torch.ones(256 * len(ratios)), atol=1e-5)
    assert changed(actor, before)


def test_the_loss_of_each_sample_gets_every_sample_alone_and_falls(broker: RunningBroker) -> None:
    """It is given every sample by itself, and falls."""
    torch.manual_seed(0)
    embed, head = torch.nn.Embedding(VOCABULARY, 24), torch.nn.Linear(8, VOCABULARY)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    optimizer = torch.optim.AdamW([*embed.parameters(), *head.parameters()], lr=1e-2)
    of_samples: list[float] = []

    def qkv(batch: Any) -> Any:
        return embed(batch.input_ids).view(-1, 3, 2, 4).unbind(1)

    def noted(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        found = cross_entropy(logits, labels, reduction=reduction)
        of_samples.append(found.item() / max(int((labels >= 0).sum()), 1))
        return found

    given = {"qkv": qkv, "head": lambda x: head(x.flatten(1)), "cross_entropy": noted, "optimizer": optimizer}
    run(block("streampack.packed_loss("), broker.trainers, **given)
    assert len(of_samples) == SAMPLES
    assert changed(head, before)
    assert falls(of_samples)


def test_the_first_block_of_the_readme_runs_as_pasted_with_its_output(tmp_path: Path) -> None:
    """In an empty folder, in a process of its own."""
    code, output = re.findall(r"```(?:python|text)\n(.*?)```", README, re.DOTALL)[:2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert not done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    lines = output.splitlines()
    assert lines.pop() == "..."
    assert done.stdout.splitlines()[: len(lines)] == lines
    assert not list(tmp_path.iterdir())


def test_the_readme_is_short() -> None:
    assert len(README.encode()) < 9000


def test_local_packs_files_without_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "a.jsonl", [{"text": "local" * (1 + i % 9)} for i in range(50)])
    monkeypatch.chdir(tmp_path)
    packs: list[Any] = []
    code = block('streampack.local("data/').replace("mycode.tokens:encode", "bytes")
    exec(compile(code, "README.md", "exec"), {"streampack": streampack, "train": packs.append})
    assert sum(pack.num_samples for pack in packs) == 50


def test_way_back_puts_values_of_packs_in_the_order_of_samples() -> None:
    lengths = [4000, 3000, 1192, 5000, 3192, 8, 9, 10, 11]
    given: dict[str, Any] = {"streampack": streampack, "lengths": lengths}
    given["forward"] = lambda packs: np.array([lengths[i] for pack in packs for i in pack])
    exec(compile(block("streampack.way_back"), "README.md", "exec"), given)
    assert len(given["packs"]) == 8
    assert given["in_order"].tolist() == lengths


def test_a_pusher_that_is_started_again_pushes_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails in the middle, then ends the partition, and is started once more after the end."""
    rollouts = {"pushed": True, "partitions": 1}
    settings = {
        "merge": "arrival", "state_dir": str(tmp_path), "rules": SETTINGS["rules"], "streams": {"rollouts": rollouts}
    }  # fmt: skip
    made: list[int] = []

    def generate(prompt: int) -> list[int]:
        made.append(prompt)
        if len(made) == 20:
            raise RuntimeError("killed")
        return [prompt] * 3

    prompts = list(range(1, 51))
    names: dict[str, Any] = {"streampack": streampack, "worker": 0, "prompts": prompts, "generate": generate}
    with running_broker(settings) as running:
        monkeypatch.setenv("STREAMPACK_PRODUCERS", running.producers)
        code = compile(block("range(rollouts.next_seq"), "rl-loop.md", "exec")
        with pytest.raises(RuntimeError, match="killed"):
            exec(code, dict(names))
        for _ in range(2):
            exec(code, names)
            assert names["rollouts"].ended
        with streampack.connect(running.trainers, format="numpy") as loader:
            found = [token for step in loader.steps() for pack in step for token in pack.input_ids.tolist()]
    assert sorted(token for token in found if token) == sorted(3 * prompts)
    assert len(made) == 51, "one was made twice"


def test_the_rollout_worker_of_the_page_pushes_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = SmallBroker()
    monkeypatch.setenv("STREAMPACK_PRODUCERS", broker.endpoint)
    given = {"worker": 1, "updates": 2, "prompts": ["a", "bc"], "generate": lambda prompt: [[1], torch.arange(3)]}
    try:
        exec(compile(block("for prompt in prompts"), "README.md", "exec"), {"streampack": streampack, **given})
    finally:
        broker.stop()
    assert [taken.lengths for taken in broker.taken] == [[1, 3]] * 4
    assert broker.marks == [(4, 0), (8, 1)]


def test_a_sample_with_an_image_reaches_a_trainer_of_the_page_s_broker(tmp_path: Path) -> None:
    (config,) = [each.code for each in BLOCKS if each.code.startswith("# broker.yaml\nrun: vlm")]
    with running_broker(yaml.safe_load(config) | {"state_dir": str(tmp_path / "state"), "memory": "256MiB"}) as running:
        code = block("chats.send(sample)").replace("tcp://node0:7401", running.producers)
        exec(compile(code, "vision.md", "exec"), {})
        with streampack.connect(running.trainers, format="numpy") as loader:
            (pack,) = [pack for pack in loader if pack.num_samples]
    assert pack["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert [each.uri for each in pack["pixel_values"]] == ["s3://bucket/images.tar"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers warns of names that TRL uses
def test_the_trainer_of_trl_trains_with_grpo(tmp_path: Path) -> None:
    from tests.integration.frameworks.grpo_trainers import trainer_of  # here: it imports TRL

    names: dict[str, Any] = {"streampack": streampack, "GRPOTrainer": lambda *_, **__: trainer_of(tmp_path)}
    names |= dict.fromkeys(("model", "reward_funcs", "args", "dataset"))
    exec(compile(block("trl_grpo.install(trainer)"), "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 3
    assert any("streampack_share" in batch for batch in names["trainer"]._buffered_inputs)


def test_each_pair_of_preferences_is_pushed_as_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = SmallBroker(terms={"stream": "pairs"})
    monkeypatch.setenv("STREAMPACK_PRODUCERS", broker.endpoint)
    given = {"worker": 1, "preferences": [([1, 2], [3]), (torch.arange(3), [4])]}
    try:
        exec(compile(block("in preferences"), "README.md", "exec"), {"streampack": streampack, **given})
    finally:
        broker.stop()
    assert [(taken.lengths, taken.message.keep) for taken in broker.taken] == [([2, 1], "pack"), ([3, 1], "pack")]


OWN = {block(starts) for starts in TESTED}
OTHERS = [block for block in CODE if block.code not in OWN]


@pytest.mark.parametrize("example", [each for each in OTHERS if ">>> " in each.code], ids=str)
def test_a_session_prints_what_the_page_says(example: Block) -> None:
    parsed = doctest.DocTestParser().get_doctest(example.code, {"streampack": streampack}, str(example), None, 0)
    assert doctest.DocTestRunner().run(parsed).failed == 0


@pytest.mark.parametrize("example", [each for each in OTHERS if ">>> " not in each.code], ids=str)
def test_an_example_runs(
    example: Block, broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example finds the names of a trainer's script, files in ``data/``, and the broker by its variables."""
    model: torch.nn.Module = tiny_llama() if re.search(r"\*\*batch|llama|format=.hf", example.code) else Tiny()
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", [{"text": "local" * (1 + i % 9)} for i in range(50)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMPACK_ENDPOINT", broker.trainers)
    monkeypatch.setenv("STREAMPACK_PRODUCERS", broker.producers)
    names: dict[str, Any] = {
        "__name__": "__main__", "streampack": streampack, "torch": torch, "np": np, "model": model, "llama": model,
        "optimizer": torch.optim.AdamW(model.parameters()), "cross_entropy": cross_entropy, "device_mesh": None,
        "checkpoint": None, "log": [], "save": lambda *_: None, "update": lambda *_: None, "train": lambda *_: None,
        "evaluate": lambda *_: 0.0,
    }  # fmt: skip
    code = re.sub(r"tcp://[\w.-]+:7402", broker.trainers, example.code)
    exec(compile(code, str(example), "exec"), names)


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_a_page_leads_somewhere() -> None:
    links = [
        (path, *re.fullmatch(r"([^#]*)#?(.*)", link).groups())  # type: ignore[union-attr]
        for path, text in PAGES.items()
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)
    ]
    assert len(links) > 15
    dead = [
        f"{path.name}: {to}#{anchor}"
        for path, to, anchor in links
        if not (path.parent / to).exists()
        or (anchor and anchor not in anchors(filled((path.parent / to if to else path).read_text())))
    ]
    assert dead == []


def test_the_map_of_the_code_has_every_folder() -> None:
    where_to_look = PAGES[ROOT / "docs/concepts/architecture.md"]
    tops = (ROOT / "streampack", ROOT / "services/streampack_services")
    folders = {str(path.parent.relative_to(top)) for top in tops for path in top.rglob("*.py")} - {"."}
    assert len(folders) > 40
    assert {folder for folder in folders if f"`{folder}/`" not in where_to_look} == set()


def test_every_failure_that_is_promised_has_tests_that_are_there() -> None:
    promised = PAGES[ROOT / "docs/concepts/exactly-once.md"].partition("| what fails |")[2].partition("\n## ")[0]
    named = re.findall(r"`((?:\w+/)*test_\w+)`", promised)
    assert len(named) > 20
    paths = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {str(path.with_suffix("")) for path in paths}
    assert set(named) <= there | {path.stem for path in paths if path.parts[0] == "integration"}


def test_every_rule_is_defined_once_on_the_page_with_a_mutant_that_breaks_it() -> None:
    """No other page or module defines a rule, and modules cite only rules of the page."""
    mutants = (ROOT / "tests/simulation/test_mutants.py").read_text()
    page = PAGES[ROOT / "docs/concepts/exactly-once.md"]
    rows = re.findall(r"^\| (R\d+) \|(?:[^|]+\|){2} \[`(\w+)`\]\(.*test_mutants.py\) \|$", page, re.M)
    assert [rule for rule, _ in rows] == [f"R{number}" for number in range(1, 11)]
    assert [name for rule, name in rows if not re.search(rf'@mutant\("{rule}".*\)\ndef {name}\(', mutants)] == []
    code = {path: path.read_text() for top in ("streampack", "services") for path in (ROOT / top).rglob("*.py")}
    defined = [path for path, text in (PAGES | code).items() if re.search(r"^\W*R\d+(?:\.| \|)", text, re.M)]
    assert defined == [ROOT / "docs/concepts/exactly-once.md"]
    cited = {rule for text in code.values() for rule in re.findall(r"\bR\d+\b", text)}
    assert cited <= {rule for rule, _ in rows}
