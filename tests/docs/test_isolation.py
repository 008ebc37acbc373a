"""Samples of a pack do not see each other, by the calls that the README, ``docs/`` and ``examples/`` show.

Blocks and scripts run as they stand, watched by ``tests.docs.leaks``. Every one that calls a model is in a table here.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import cross_entropy

import streampack
from streampack.views.view import View
from tests.docs.leaks import exchanged, watched
from tests.docs.pages import BLOCKS, ROOT, Block, written
from tests.docs.pasted import Tiny, tiny_llama
from tests.integration.forked import Command
from tests.integration.frameworks.example_runs import serving
from tests.integration.running import RunningBroker, forked, running_broker
from tests.training.hf.processor_models import colored_chats

CALLS = re.compile(r"\.backward\(|\.train\(|trainer\.fit\(|attend\(|evaluate\(batch|get_forward_backward_func\(")
"""Text of blocks and scripts that call a model with batches."""
HERE = "tcp://node0:7402"


def block(text: str) -> Block:
    (found,) = [each for each in BLOCKS if each.language == "python" and text in each.code]
    return found


def run(text: str, endpoint: str, **names: Any) -> dict[str, Any]:
    """Run the block with this text on the CPU; return its names."""
    code = block(text).code.replace(HERE, endpoint).replace(', device="cuda"', "")
    names = {"streampack": streampack, "torch": torch, "device_mesh": None, "cross_entropy": cross_entropy} | names
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMPACK_ENDPOINT", endpoint)
        exec(compile(code, str(block(text)), "exec"), names)
    return names


def optimizer_of(model: Any) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}


def by_boundaries(text: str, broker: RunningBroker, attention: str | None, path: Path) -> None:
    model = Tiny()
    run(text, broker.trainers, model=model, **optimizer_of(model))


def of_transformers(text: str, broker: RunningBroker, attention: str | None, path: Path) -> None:
    model = tiny_llama()
    run(text, broker.trainers, llama=model, **optimizer_of(model))


def by_a_trainer(text: str, broker: RunningBroker, attention: str | None, path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(str(path), max_steps=6, report_to="none", disable_tqdm=True, use_cpu=True)
    run(text, broker.trainers, Trainer=Trainer, model=tiny_llama(), args=args, checkpoint=None)


def of_padded_rows(text: str, broker: RunningBroker, attention: str | None, path: Path) -> None:
    rows = [list(b"padded") * (1 + i * 7 % 30) for i in range(60)]
    llama = tiny_llama()

    def connect(endpoint: str, mesh: Any) -> Any:
        return streampack.local(rows, budget=256, samples=20, padded=True)

    given = {"streampack": SimpleNamespace(connect=connect), "gpt": lambda *args: llama(*args).logits}
    run(text, broker.trainers, **given, **optimizer_of(llama))


def of_images(text: str, broker: RunningBroker, attention: str | None, path: Path) -> None:
    from tests.training.hf.small_vlm import FIELDS, small_model, vlm_sample

    model = small_model()
    samples = [vlm_sample(model, number) for number in range(20)]

    def connect(endpoint: str, **given: Any) -> Any:
        return streampack.local(samples, budget=160, fields=FIELDS, **given)

    given = {"streampack": SimpleNamespace(connect=connect), "media": None}
    run(text, broker.trainers, **given, vlm=model, **optimizer_of(model))


def of_log_probs(text: str, broker: RunningBroker, attention: str | None, path: Path) -> None:
    actor = Tiny()

    def logprobs(actor: Tiny, batch: Any) -> torch.Tensor:
        logits = actor(batch.input_ids, batch.position_ids, batch.cu_seqlens_padded)
        return -cross_entropy(logits, batch.labels, reduction="none")

    def policy_loss(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return -(torch.exp(new - old) * advantages).sum()

    given = {"actor": actor, "logprobs": logprobs, "policy_loss": policy_loss}
    run(text, broker.trainers, **given, **optimizer_of(actor))


def of_page(text: str, broker: RunningBroker, attention: str | None, path: Path) -> None:
    """Run the files of the block's page in their order, from an empty folder; trainers make few updates."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", path / "cache")
        for name in written(FILES_OF[text], path):
            if name.endswith(".py"):
                code = (path / name).read_text()
                for before, after in (("num_workers=2", "num_workers=0"), ("max_steps=20", "max_steps=2")):
                    code = code.replace(before, after)
                (path / name).write_text(code)
                runpy.run_path(str(path / name))
        sys.modules.pop("data", None)


def of_evaluation(text: str, broker: RunningBroker, attention: str | None, path: Path) -> None:
    model = Tiny()

    def evaluate(batch: Any) -> float:
        return float(model(batch.input_ids, batch.position_ids, batch.cu_seqlens_padded).sum())

    run(text, broker.trainers, update=lambda step: None, evaluate=evaluate)


def as_pasted(text: str, broker: RunningBroker, attention: str | None, path: Path) -> None:
    run(text, broker.trainers)


class Flex(torch.nn.Module):
    """Attention by the block mask of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, block_mask: Any) -> torch.Tensor:
        x = self.embed(input_ids)[None, None]
        attended: Any = flex_attention(x, x, x, block_mask=block_mask)
        found: torch.Tensor = self.head(attended[0, 0])
        return found


def of_shared_prompts(text: str, broker: RunningBroker, attention: str | None, path: Path) -> None:
    """Samples share their prompt; the tokens of an answer change no other answer."""
    settings = shown_config("grpo_tree") | {"state_dir": str(path / "state")}
    model, draw = Flex(), torch.Generator().manual_seed(0)
    with running_broker(settings) as own:
        with streampack.Producer(own.producers, stream="rollouts") as rollouts:
            for _ in range(4):
                prompt = torch.randint(8, (24,), generator=draw)
                answers = [torch.cat([prompt, torch.randint(8, (9,), generator=draw)]) for _ in range(4)]
                values = {"loss_mask": [1] * 33, "advantages": [1.0] * 33, "logprobs": [0.0] * 33}
                rollouts.send_group([{"input_ids": each, **values} for each in answers], share="prefix")
            rollouts.end_of_batch(0)
        run(text, own.trainers, model=model, loss_fn=None, **optimizer_of(model))


Runner = Callable[[str, RunningBroker, str | None, Path], None]
ALL = ("sdpa", "eager", "flex_attention")
FILES_OF = {
    "streampack.local(Counting(), ": "docs/migrate/from-dataloader.md",
    'PackedSFTTrainer("model", ': "docs/migrate/from-trl-packing.md",
}
"""Pages whose files run one after another, by a text of the block that trains on packs."""
TABLE: dict[str, tuple[Runner, tuple[str | None, ...]]] = {
    "logits = model(batch.input_ids, batch.position_ids, batch.cu_seqlens_padded)": (by_boundaries, (None,)),
    "streampack.local(texts, budget=8192": (as_pasted, (None,)),
    "logits = gpt(batch.input_ids, batch.attention_mask)": (of_padded_rows, ALL),
    "loss = llama(**batch": (of_transformers, ALL),
    "loss = vlm(**batch": (of_images, ("sdpa", "eager")),
    "eval_loader=valid": (by_a_trainer, ("sdpa", "eager")),
    "trainer.train(resume_from_checkpoint=last)": (by_a_trainer, ("sdpa", "eager")),
    "logprobs(actor, batch)": (of_log_probs, (None,)),
    "evaluate(batch) for batch in valid": (of_evaluation, (None,)),
    "block_mask=batch.block_mask)\n        logprobs": (of_shared_prompts, ("flex_attention",)),
    **dict.fromkeys(FILES_OF, (of_page, (None,))),
}
"""A text of each block, what runs it, and the attention of its model; None is the block's own."""
ALONE = (
    "attend(q, k, v, block_mask=batch.block_mask)", "streampack.varlen_attention(*qkv(batch), batch)",
    "worker.train(batch, loss_fn", "TextTrainer(parse_args", "strategy.train_step(",
    "media = streampack.Media(processor=folder)", 'tokenizer={"processor": folder}', "groups = streampack.cp_groups()",
    "HybridSchedule(config)", 'connect(order="dp", device=device)', "accelerator.register_for_checkpointing(loader)",
)  # fmt: skip
"""Texts of blocks with tests of their own: they call functions, or losses are compared with those of the framework."""
NO_PACKS = ("trl_grpo.install(trainer)", "collate_fn=padded", 'SFTTrainer("model", args, train_dataset=')
"""Texts of blocks whose models get no packs of a loader; TRL's loss on them is in ``test_frameworks_grpo``.

The blocks of other loaders run with their page.
"""


@pytest.mark.filterwarnings("ignore")  # of flex attention without a compiler
@pytest.mark.parametrize(
    ("text", "attention"), [(text, kind) for text, (_, kinds) in TABLE.items() for kind in kinds], ids=str
)
def test_a_call_on_a_page_keeps_samples_apart(
    text: str, attention: str | None, broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMPACK_ENDPOINT", broker.trainers)
    torch.manual_seed(0)
    stance = "force_eager" if attention == "flex_attention" else "default"  # the kernel takes a minute to compile
    with torch.compiler.set_stance(stance), watched(attention) as watch:
        TABLE[text][0](text, broker, attention, tmp_path)
    assert watch.tested > 0


def test_the_test_fails_where_samples_see_each_other(broker: RunningBroker, tmp_path: Path) -> None:
    """A model that attends over the whole pack, and one of transformers that keeps a cache."""

    class Whole(Tiny):
        def forward(self, ids: torch.Tensor, positions: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
            return super().forward(ids, positions, bounds[[0, -1]])

    text, whole = next(iter(TABLE)), Whole()
    with pytest.raises(AssertionError, match="Whole: outputs of other samples move"), watched():
        run(text, broker.trainers, model=whole, **optimizer_of(whole))
    llama = tiny_llama()
    name = "cache" if "cache" in signature(llama.forward).parameters else "past_key_values"  # up to transformers 5.23
    cached = block("loss = llama(**batch").code.replace("llama(**batch", f"llama(**batch, {name}=new()")
    from transformers import DynamicCache

    from streampack.views.isolation.hf_dependence import inside

    names = {"streampack": streampack, "llama": llama, "new": DynamicCache, **optimizer_of(llama)}
    with pytest.raises(AssertionError, match="LlamaForCausalLM: outputs of other samples move"), watched(), inside():
        exec(compile(cached.replace(HERE, broker.trainers), "broken", "exec"), names)


@pytest.mark.filterwarnings("ignore")  # of flex attention without a compiler
def test_flex_attention_on_a_page_keeps_samples_apart(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of a vlm_sample change. The block attends for one pack of several samples."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 256, 8).unbind(0)
    connect = streampack.connect

    @contextmanager
    def one_pack(*args: Any, **given: Any) -> Iterator[list[Any]]:
        with connect(*args, **given) as loader:
            yield [next(batch for batch in loader if batch.num_samples > 1)]

    monkeypatch.setattr(streampack, "connect", one_pack)
    with torch.compiler.set_stance("force_eager"):
        first = run(ALONE[0], broker.trainers, q=q, k=k, v=v)
        begin, end = first["batch"].cu_seqlens_padded[:2].tolist()
        own = torch.zeros(256, dtype=torch.bool)
        own[begin:end] = True
        k, v = (torch.where(own[:, None], -each, each) for each in (k, v))
        second = run(ALONE[0], broker.trainers, q=q, k=k, v=v)
    assert second["batch"].sample_ids.tolist() == first["batch"].sample_ids.tolist()
    moved = (first["out"] - second["out"]).abs().amax((0, 1, 3))
    assert float(moved[own].max()) > 0.1
    assert float(moved[~own].max()) == 0


def test_attention_by_boundaries_on_a_page_keeps_samples_apart(broker: RunningBroker) -> None:
    torch.manual_seed(0)
    embed, linear = torch.nn.Embedding(257, 24), torch.nn.Linear(8, 257)
    seen: list[tuple[torch.Tensor, View]] = []

    def run_once(change: bool) -> tuple[torch.Tensor, View]:
        def qkv(batch: Any) -> Any:
            ids = exchanged(batch)[0] if change else batch.input_ids  # type: ignore[index]
            seen.append((ids, batch))
            return embed(ids).view(-1, 3, 2, 4).unbind(1)

        def head(attended: torch.Tensor) -> torch.Tensor:
            raise _Found(linear(attended.flatten(1)))

        with pytest.raises(_Found) as found:
            run(ALONE[1], broker.trainers, qkv=qkv, head=head)
        return found.value.outputs, seen[-1][1]

    (first, batch), (second, again) = run_once(False), run_once(True)
    assert batch.sample_ids.tolist() == again.sample_ids.tolist()
    change = exchanged(batch)
    assert change is not None
    moved = (first - second).detach().abs().amax(1)
    assert float(moved[change[1]].max()) > 0
    assert float(moved[~change[1]].max()) == 0


class _Found(Exception):
    """Ends a block with the outputs of its first batch."""

    def __init__(self, outputs: torch.Tensor) -> None:
        self.outputs = outputs


def shown_config(name: str) -> dict[str, Any]:
    """Return the broker.yaml of an example."""
    found: dict[str, Any] = yaml.safe_load((ROOT / f"examples/{name}.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def served() -> Iterator[RunningBroker]:
    with serving() as running:
        yield running


SCRIPTS: dict[str, tuple[str | None, ...]] = {
    "plain_torch": (None,), "stateful_dataloader": (None,), "torch_distributed": (None,), "sft": (None,),
    "hf_trainer": ("sdpa", "eager"), "trl_sft": ("sdpa", "eager"), "lightning_module": (None,),
    "megatron_external": (None,), "torchtitan_trainer": (None,), "vlm": ("sdpa", "eager"),
    "accelerate_loop": (None,),
    "dpo": (None,), "grpo": (None,), "grpo_tree": (None,), "rl_loop": (None,), "dynamic_cp": (None,),
}  # fmt: skip
"""Examples, and the attention of their models; None is the example's own."""
PUSHED = ("dpo", "grpo", "grpo_tree", "rl_loop")


@pytest.mark.parametrize(("name", "attention"), [(name, kind) for name, kinds in SCRIPTS.items() for kind in kinds])
def test_an_example_keeps_samples_apart(
    name: str, attention: str | None, served: RunningBroker, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        own = served
        if name in PUSHED:
            config = shown_config(name)
            own = stack.enter_context(running_broker(config | {"state_dir": str(tmp_path / "state")}))
        elif name == "dynamic_cp":
            feeds = {"train": {"cp": "dynamic", "rank_tokens": 128}}
            own = stack.enter_context(serving({"shape": "exact"}, feeds=feeds, planned_mesh={"dp": 1}))
        environment = {
            "STREAMPACK_ENDPOINT": own.trainers, "STREAMPACK_PRODUCERS": own.producers, "PYTHONPATH": str(ROOT),
            "LEAKS_ATTENTION": attention or "", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", "RANK": "0",
            "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
        }  # fmt: skip
        script = str(ROOT / f"examples/{name}.py")
        arguments = {"sft": ["3"], "dynamic_cp": ["3"], "rl_loop": ["train"]}.get(
            name, [] if name in PUSHED else [str(tmp_path), "3"]
        )
        if name == "vlm":
            arguments = [*colored_chats(tmp_path, 24), "--budget", "256", "--packs", "1"]
        if name == "rl_loop":
            generator = Command([script, "generate"], 1, 2, "tests.integration.scripts", environment, tmp_path)
            stack.callback(generator.wait)
            stack.callback(generator.kill)
        done = forked("tests.docs.leaks", script, *arguments, environment=environment, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (tested,) = re.findall(r"^tested (\d+)$", done.stdout, re.MULTILINE)
    assert int(tested) > 0, done.stdout + done.stderr


def test_every_block_and_example_that_calls_a_model_is_tested() -> None:
    texts = [*TABLE, *ALONE, *NO_PACKS]
    missing = [
        str(each)
        for each in BLOCKS
        if each.language == "python" and CALLS.search(each.code) and not any(text in each.code for text in texts)
    ]
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py") if CALLS.search(path.read_text())}
    assert missing == []
    assert scripts == set(SCRIPTS)
