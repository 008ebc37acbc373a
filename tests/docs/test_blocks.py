"""Blocks of the README and of ``docs/`` that are not Python: commands have their options, YAML and JSON their keys."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from streampack_services.check.check import json_schema
from streampack_services.cli.main import app

from tests.docs.pages import BLOCKS, ROOT, Block

LANGUAGES = {"python", "bash", "yaml", "json", "toml", "text", "promql", "dockerfile", "ini", ""}
OF_THE_SHELL = {"do", "done", "until", "while", "for", "if", "then", "fi", "export", "cd", "mkdir", "kill", "sleep",
                "cat", "cp", "rm", "source", "head", "tail", "ls", "diff", "echo", "git"}  # fmt: skip
OF_OTHERS = {"curl", "jq", "grep", "prometheus", "promtool", "docker", "kubectl", "helm", "systemctl", "sbatch", "srun",
             "torchrun", "accelerate", "openssl", "nvidia-smi", "chmod", "scp", "ssh", "tar", "journalctl", "sudo",
             "sed", "tensorboard"}  # fmt: skip
ISOLATION = "tests/docs/test_isolation.py"
"""It runs each block that calls a model, on any page."""
NOT_RUN = 15
"""Blocks that may stand there without running, at most."""
_COMMAND: Any = typer.main.get_command(app)


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and block.reason is None]


def runs_elsewhere(block: Block) -> bool:
    """If a file of tests runs the block, which names the block's page."""
    file = ROOT / (block.reason or "")
    return block.reason == ISOLATION or (file.suffix == ".py" and block.page in file.read_text())


def test_every_block_says_its_language_and_why_it_does_not_run() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []
    reasons = [block.reason for block in BLOCKS if block.reason is not None and not runs_elsewhere(block)]
    assert len(reasons) <= NOT_RUN
    assert [reason for reason in reasons if len(reason.split()) < 3] == []


def commands(code: str) -> list[list[str]]:
    """Return the simple commands of a shell text, as words, without redirections' signs and variables before them."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^\$ ", "", code, flags=re.MULTILINE))
    lines = re.sub(r"<<-?\s*'?(\w+)'?(.*?)\n(.*?)\n\1$", r"\2", lines, flags=re.DOTALL | re.MULTILINE)
    found: list[list[str]] = [[]]
    for line in lines.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        for word in lexer:
            if set(word) <= set(";&|"):
                found.append([])
            elif found[-1] or not re.match(r"\w+=", word):
                found[-1].append(word)
        found.append([])
    return [_plain(words) for words in found if words]


def _plain(words: list[str]) -> list[str]:
    before = ("until", "do", "then", "if", "while", "srun", "nohup", "exec", "sudo")
    while len(words) > 1 and (words[0] in before or words[0].startswith("-")):
        words = words[1:]
    cut = next((i for i, word in enumerate(words) if set(word) <= set("<>")), len(words))
    return words[: cut - (cut < len(words) and words[cut - 1] == "2")]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "bash"], ids=str)
def test_commands_are_as_the_page_says(block: Block) -> None:
    for words in commands(block.code):
        match words:
            case ["streampack", *rest]:
                parse(rest)
            case ["make", *targets]:
                made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
                assert {name for name in targets if "=" not in name} <= made
            case [python, "-m", "streampack", *rest] if python.startswith("python"):
                parse(rest)
            case ["python" | "python3", file, *_] if not file.startswith("-") and "/" in file:
                assert (ROOT / file).exists(), file
            case ["pip" | "uv", *rest]:
                extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                named = [name for word in rest for name in re.findall(r"(?:streampack|\.)\[([\w,-]+)\]", word)]
                assert {extra for names in named for extra in names.split(",")} <= set(extras)
            case [name, *_]:
                known = OF_THE_SHELL | OF_OTHERS | {"python", "python3"}
                assert name in known or name.endswith(("/activate", ".sh", "/run")) or "/bin/" in name, words


def parse(words: list[str]) -> None:
    """Parse a command's options and arguments as the command line does, without running it."""
    command = _COMMAND
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"streampack has no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if words not in (["--help"], ["-h"], ["--version"]):
        command.make_context("streampack", list(words))


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_has_keys_and_values_of_the_schema(block: Block) -> None:
    """Each key at the top is one of broker.yaml or of producer.yaml; a part of a file needs no other keys."""
    definitions = json_schema()["$defs"]
    for each in definitions.values():
        each.pop("required", None)
    files = [
        jsonschema.Draft202012Validator(definitions[kind] | {"$defs": definitions})
        for kind in ("BrokerConfig", "ProducerConfig")
    ]
    for key, value in yaml.safe_load(block.code).items():
        errors = [[error.message for error in file.iter_errors({key: value})] for file in files]
        assert not all(errors), (key, errors)


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_is_json(block: Block) -> None:
    json.loads(block.code)
