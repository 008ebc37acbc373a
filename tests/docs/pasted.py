"""Models and settings with which code of the pages runs."""

from __future__ import annotations

from typing import Any

import torch

from tests.docs.pages import BLOCKS

CODE = [block for block in BLOCKS if block.language == "python" and block.reason is None]
SETTINGS: dict[str, Any] = {
    "tokens": "uint16",
    "rules": {"budget": 256, "window": {"samples": 32}, "step": {"packs": 2}},
    "streams": {"web": {"weight": 0.7}, "code": {"weight": 0.3}, "val": {}},
    "fields": {"advantages": {"dtype": "float32", "align": "target", "default": 1}},
    "feeds": {"train": {"streams": ["web", "code"]}, "valid": {"streams": ["val"]}},
}
VOCABULARY = 257
SAMPLES = 400
VALID = 30


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # here: seconds, for every worker that collects

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Tiny(torch.nn.Module):
    """A model that keeps packed samples apart by their boundaries: attention over each alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 16)
        self.places = torch.nn.Embedding(256, 16)
        self.head = torch.nn.Linear(16, VOCABULARY)
        self.config = {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1,
            "vocab_size": VOCABULARY,
        }  # fmt: skip

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids) + self.places(position_ids)
        pieces = [
            torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0]
            for x in hidden.split(cu_seqlens.diff().tolist())
        ]
        logits: torch.Tensor = self.head(torch.cat(pieces))
        return logits
