"""Measure the time of a tokenizer.json in streampack, against direct calls of ``tokenizers`` on the same texts.

The tokenizer is trained in the run (byte-level BPE on this repository's own files), so that nothing is downloaded.
Each way goes over all texts in turn, several times; the best time counts. One process, one thread, but for
``library, batches``: that one uses all cores, as ``processes:`` of producer.yaml would.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import arguments, head, say
from streampack.sources import TokenizerSettings, open_tokenizer
from streampack.tokenizers.token_ids import Encoded

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHARACTERS, TURNS = 4000, 6


def main() -> None:
    given = arguments(__doc__, "a tenth of the texts, once").parse_args()
    report = head("tokenizing")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), texts=200 if given.quick else 2000, times=1 if given.quick else 3)
    for name, row in found.items():
        print(f"{name:32} {row['tokens_per_s']:>12,.0f} tokens/s  {row['ratio']:.2f}")
    say(report | {"results": found}, given.json)


def measure(folder: Path, *, texts: int, times: int) -> dict[str, dict[str, float]]:
    """Tokens/s of each way, and its ratio to the library's ``encode``, text by text."""
    here = Path(__file__).resolve().parents[2]
    whole = "".join(path.read_text() for path in sorted(here.glob("**/*.py")) if ".venv" not in path.parts)
    cut = [whole[at : at + CHARACTERS] for at in range(0, len(whole) - CHARACTERS, CHARACTERS)]
    cut = (cut * (texts // len(cut) + 1))[:texts]
    library = train(cut[:200], folder)
    ours = open_tokenizer(TokenizerSettings(file=str(folder), eos_token="<|im_end|>", chat_template=TEMPLATE))
    size = CHARACTERS // TURNS
    parts = [[text[at : at + size] for at in range(0, size * TURNS, size)] for text in cut]
    chats = [[{"role": ("user", "assistant")[i % 2], "content": part} for i, part in enumerate(each)] for each in parts]
    written = ["".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat) for chat in chats]

    def batches() -> int:
        found = [library.encode_batch(cut[at : at + 64], add_special_tokens=False) for at in range(0, len(cut), 64)]
        return sum(len(each.ids) for batch in found for each in batch)

    ways: dict[str, Callable[[], int]] = {
        "library, text by text": lambda: sum(len(library.encode(text).ids) for text in cut),
        "library, batches of 64": batches,
        "streampack, texts": lambda: sum(num_tokens(ours.encode(text)) for text in cut),
        "library, chats already written": lambda: sum(len(library.encode(text).ids) for text in written),
        "streampack, chats with a mask": lambda: sum(num_tokens(ours.encode_chat(chat)) for chat in chats),
        "streampack, pairs with a mask": lambda: sum(
            num_tokens(ours.encode_pair(text[:size], text[size:])) for text in cut
        ),
    }
    for way in ways.values():
        way()  # caches of words fill
    best: dict[str, float] = {}
    for _ in range(times):
        for name, way in ways.items():
            begin = time.perf_counter()
            tokens = way()
            best[name] = max(best.get(name, 0.0), tokens / (time.perf_counter() - begin))
    base = best["library, text by text"]
    return {name: {"tokens_per_s": speed, "ratio": speed / base} for name, speed in best.items()}


def train(texts: list[str], folder: Path) -> Tokenizer:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    library.save(str(folder / "tokenizer.json"))
    return library


def num_tokens(encoded: Encoded | str) -> int:
    assert isinstance(encoded, Encoded), encoded
    return len(encoded.tokens)


if __name__ == "__main__":
    main()
