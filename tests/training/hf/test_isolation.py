"""``model(**batch)`` keeps samples of a pack apart, in every family of models and with every way to call them.

A sample's tokens are changed; outputs of the other samples stay equal, to the bit where no experts are.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import streampack
from streampack.errors import UserError
from tests.integration.running import forked

hf: Any
"""``tests.training.hf.hf_trainers``, once tests run."""


@pytest.fixture(autouse=True, scope="module")
def _frameworks() -> None:
    global hf
    hf = import_module("tests.training.hf.hf_trainers")


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


ROWS = [list(range(1, 13)), list(range(20, 45)), list(range(50, 70))]
BUDGET = 64


def pack(rows: list[Any] | None = None, **settings: Any) -> Any:
    with streampack.local(rows or ROWS, **{"budget": BUDGET, "format": "hf", "shuffle": False, **settings}) as loader:
        return next(iter(loader))


def outputs(call: Callable[[Any], Any]) -> tuple[list[torch.Tensor], float]:
    """Return each sample's outputs by ``call``, in the order of ROWS, and how far those of other samples move.

    The first three tokens of the first sample change.
    """
    batches = pack(), pack([[91, 92, 93, *ROWS[0][3:]], *ROWS[1:]])
    found = []
    for batch in batches:
        result = call(batch)
        rows = getattr(result, "logits", None)
        rows = result.last_hidden_state if rows is None else rows
        parts = streampack.per_sample(rows.detach().float(), batch)
        numbers = batch.sample_ids[:, 1].tolist()
        found.append([part for _, part in sorted(zip(numbers, parts, strict=True), key=lambda each: each[0])])
    before, after = found
    moved = [float((one - two).abs().max()) for one, two in zip(before, after, strict=True)]
    assert moved[0] > 1e-3, "the changed sample itself moves"
    return before, max(moved[1:])


FAMILIES = [
    ("llama", {}, 0.0), ("mistral", {"sliding_window": 8}, 0.0), ("qwen2", {}, 0.0), ("qwen3", {}, 0.0),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 0.0), ("gpt2", {}, 0.0),
    ("gemma3_text", {"sliding_window": 8}, 0.0), ("llama4_text", {"attention_chunk_size": 8}, 1e-6),
    ("qwen3_moe", {"output_router_logits": True}, 1e-6), ("mixtral", {}, 1e-6), ("lfm2", {}, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("kind", "config", "within"), FAMILIES, ids=lambda value: str(value))
def test_samples_are_apart_and_have_their_own_outputs(kind: str, config: Any, within: float, attention: str) -> None:
    """Windows and chunks of attention, too, are those of a sample alone."""
    model = hf.tiny(kind, attention, **config).eval()
    found, moved = outputs(lambda batch: model(**batch))
    assert moved <= within
    with torch.no_grad():
        for row, logits in zip(ROWS, found, strict=True):
            torch.testing.assert_close(model(torch.tensor([row])).logits[0], logits, rtol=1e-5, atol=1e-5)


def checkpointed(model: Any, batch: Any) -> Any:
    model.train().activation_checkpointing_enable()
    found = model(**batch)
    found.loss.backward()
    return found


def in_half(model: Any, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch)


def without_gradients(model: Any, batch: Any) -> Any:
    with torch.inference_mode():
        return model(**batch)


def compiled(model: Any, batch: Any, **settings: Any) -> Any:
    made: Any = torch.compile(model, backend="eager", **settings)
    return made(**batch)


def compiled_in_place(model: Any, batch: Any) -> Any:
    model.compile(backend="eager")
    return model(**batch)


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "training": lambda model, batch: model.train()(**batch),
    "use_cache=False": lambda model, batch: model(**batch, use_cache=False),
    "use_cache=None": lambda model, batch: model(**batch, use_cache=None),
    "a dict": lambda model, batch: model(**dict(batch)),
    "tokens and positions alone": lambda model, batch: model(batch.input_ids, position_ids=batch.position_ids),
    "forward": lambda model, batch: model.forward(**batch),
    "the model without its head": lambda model, batch: model.model(**batch),
    "gradient checkpointing": checkpointed,
    "bfloat16": lambda model, batch: model.bfloat16()(**batch),
    "autocast": in_half,
    "inference mode": without_gradients,
    "compiled": compiled,
    "compiled as one graph": lambda model, batch: compiled(model, batch, fullgraph=True),
    "compiled in place": compiled_in_place,
    "a mask of the batch": lambda model, batch: model(**batch, attention_mask=own_mask(model, batch)),
}


def own_mask(model: Any, batch: Any) -> torch.Tensor:
    eager = model.config._attn_implementation == "eager"
    return streampack.block_causal_mask(batch, torch.float32 if eager else None)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("way", list(WAYS))
def test_every_way_to_call_a_model_keeps_samples_apart(way: str, attention: str) -> None:
    _, moved = outputs(lambda batch: WAYS[way](hf.llama(attn_implementation=attention), batch))
    assert moved == 0


@pytest.mark.filterwarnings("ignore")  # of flex attention without a compiler
@pytest.mark.parametrize("masks", [None, "flex"])
def test_flex_attention_keeps_samples_apart(masks: str | None) -> None:
    model = hf.llama(attn_implementation="flex_attention").eval()

    def call(batch: Any) -> Any:
        with torch.no_grad():
            return model(**batch, **({"attention_mask": streampack.block_mask(batch)} if masks else {}))

    assert outputs(call)[1] == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers warns of the name paged|sdpa
@pytest.mark.parametrize("attention", ["paged|sdpa", "paged|eager"])
def test_paged_attention_keeps_samples_apart_or_raises(attention: str) -> None:
    model = hf.llama(attn_implementation=attention)
    try:
        _, moved = outputs(lambda batch: model(**batch))
    except (ValueError, UserError) as error:  # of transformers up to 5.23, or of the test of the first call
        messages = ("without a paged attention cache", "samples of a pack affect each other")
        assert any(message in str(error) for message in messages)  # noqa: PT017
    else:
        assert moved == 0


def cache(kind: str, model: Any) -> Any:
    transformers: Any = import_module("transformers")
    if kind == "static":
        return transformers.StaticCache(model.config, max_cache_len=BUDGET)
    return transformers.DynamicCache(config=model.config)


WRONG: dict[str, tuple[Callable[[Any, Any], dict[str, Any]], str]] = {
    "use_cache": (lambda model, batch: {"use_cache": True}, "got use_cache=True with a pack, expected no cache"),
    "static": (lambda model, batch: {"past_key_values": cache("static", model)}, "got past_key_values with a pack"),
    "dynamic": (lambda model, batch: {"past_key_values": cache("dynamic", model)}, "got past_key_values with a pack"),
    "renamed": (lambda model, batch: {"cache": cache("dynamic", model)}, "got cache with a pack"),  # transformers 5.24
    "padding": (
        lambda model, batch: {"attention_mask": (~batch.padding_mask).long()[None]},
        r"got attention_mask of shape \[1, 64\] with a pack, expected none",
    ),
    "positions": (
        lambda model, batch: {"position_ids": torch.arange(BUDGET)[None]},
        "got position_ids that do not begin again at each sample",
    ),
    "no positions": (lambda model, batch: {"position_ids": None}, "got no position_ids"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("wrong", list(WRONG))
def test_arguments_that_would_let_samples_see_each_other_are_refused(
    wrong: str, attention: str, compiled: bool
) -> None:
    model, batch = hf.llama(attn_implementation=attention), pack()
    called = torch.compile(model, backend="eager") if compiled else model
    arguments, said = WRONG[wrong]
    with pytest.raises(UserError, match=said):
        called(**{**batch, **arguments(model, batch)})


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda model, batch: model(input_ids=batch.input_ids, labels=batch.labels),
        lambda model, batch: model(batch["input_ids"]),
        lambda model, batch: model(batch.input_ids, position_ids=torch.arange(BUDGET)[None]),
        lambda model, batch: model(batch.input_ids, attention_mask=torch.ones_like(batch.input_ids)),
    ],
)
def test_token_ids_of_a_pack_without_its_other_keys_are_refused(call: Any, compiled: bool, sent: bool) -> None:
    model, batch = hf.llama(), pack()
    called = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(UserError, match=r"got the input_ids of a pack without its other keys.*model\(\*\*batch\)"):
        call(called, pickle.loads(pickle.dumps(batch)) if sent else batch.to("cpu"))


def test_token_ids_of_a_pack_are_taken_with_an_own_mask_that_keeps_samples_apart() -> None:
    model, batch = hf.llama().eval(), pack()
    mask = streampack.block_causal_mask(batch)
    mask = mask if mask.ndim == 4 else mask[None, None]
    made = model(batch.input_ids, position_ids=batch.position_ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(made, model(**batch).logits)


@pytest.mark.parametrize(("first", "step", "refused"), [(20, 1, False), (7, 0, True), (0, 2, True)])
def test_own_positions_that_do_not_show_the_samples_are_refused(first: int, step: int, refused: bool) -> None:
    rows = [{"tokens": ids, "position_ids": [first + step * place for place in range(len(ids))]} for ids in ROWS]
    batch = pack(rows, tokens_key="tokens", fields={"position_ids": {"dtype": "int32"}})
    if not refused:
        assert hf.llama()(**batch).loss.isfinite()
        return
    with pytest.raises(UserError, match="got position_ids that do not begin again at each sample"):
        hf.llama()(**batch)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("kind", "attention"), [("opt", "sdpa"), ("bloom", "eager"), ("mamba", "eager")])
def test_a_model_in_which_samples_see_each_other_is_refused_at_each_call(
    kind: str, attention: str, compiled: bool
) -> None:
    model = hf.tiny(kind, attention)
    called = torch.compile(model, backend="eager") if compiled else model
    for _ in range(2):
        with pytest.raises(UserError, match="in which samples of a pack affect each other"):
            called(**pack())


def test_a_model_is_tested_once_and_again_with_another_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from streampack.views.isolation import hf_dependence

    tested: list[Any] = []
    check = hf_dependence.check

    def counted(*given: Any) -> None:
        tested.append(given)
        check(*given)

    monkeypatch.setattr(hf_dependence, "check", counted)
    model, batch = hf.llama(attn_implementation="sdpa"), pack()
    for _ in range(2):
        model(**batch)
    assert len(tested) == 1
    model.set_attn_implementation("eager")
    model(**batch)
    assert len(tested) == 2


def test_a_model_that_cannot_be_tested_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = hf.llama(), pack()
    length = 11  # tokens of the test's pack
    model.register_forward_pre_hook(lambda module, args, given: _refuse(given, length), with_kwargs=True)
    for _ in range(2):
        assert model(**batch).loss.isfinite()
    (said,) = [record.message for record in caplog.records if record.name == "streampack.hf"]
    assert said.startswith("LlamaForCausalLM was not tested for packs, because it cannot run a short pack of text")


def _refuse(given: dict[str, Any], length: int) -> None:
    if given["input_ids"].shape[1] == length:
        raise ValueError("too short")


def test_a_model_without_the_argument_use_cache_is_called_as_it_is() -> None:
    from transformers import LlamaPreTrainedModel

    class Plain(LlamaPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.inner = hf.llama().model

        def get_input_embeddings(self) -> Any:
            return self.inner.embed_tokens

        def forward(
            self, input_ids: Any, position_ids: Any, seq_idx: Any, cu_seq_lens_q: Any, cu_seq_lens_k: Any,
            max_length_q: Any, max_length_k: Any, labels: Any = None,
        ) -> Any:  # fmt: skip
            return self.inner(input_ids, position_ids=position_ids)

    model = Plain(hf.llama().config)
    assert outputs(lambda batch: model(**batch))[1] == 0


def test_calls_without_a_pack_are_left_alone() -> None:
    """They keep a cache, and generate with it."""
    model, row = hf.llama().eval(), torch.tensor([ROWS[0]])
    pack()
    assert model(row).past_key_values is not None
    made = model.generate(row, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert made.shape == (1, len(ROWS[0]) + 3)
    assert model(row, attention_mask=torch.ones_like(row), use_cache=True).past_key_values is not None


def test_a_batch_keeps_samples_apart_in_the_process_that_it_is_sent_to(tmp_path: Path) -> None:
    """That process has no loader."""
    (tmp_path / "sent").write_bytes(pickle.dumps((hf.llama(), pack(), pack([[91, 92, 93, *ROWS[0][3:]], *ROWS[1:]]))))
    code = f"""
import pickle, torch, transformers, streampack
model, one, two = pickle.loads(open({str(tmp_path / "sent")!r}, "rb").read())
print(float((model(**one).logits - model(**two).logits)[0, one.cu_seqlens_padded[1]:].abs().max()))
"""
    (tmp_path / "receive.py").write_text(code)
    done = forked("tests.integration.scripts", tmp_path / "receive.py")
    assert done.returncode == 0, done.stderr
    assert pack().sample_ids[0, 1] == 0
    assert float(done.stdout) == 0
