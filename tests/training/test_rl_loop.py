"""``examples/rl_loop.py`` in two processes, of which each is killed, and the broker too: the loop goes on."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import yaml

import streampack
from tests.integration.forked import Command
from tests.integration.frameworks.example_runs import EXAMPLES
from tests.integration.running import PATIENCE_S, RunningBroker, folder
from tests.integration.running import streampack as command

STEPS, VOCAB, LENGTH = 40, 8, 12


def settings(path: Path) -> dict[str, Any]:
    """Return the example's settings, with addresses and a state_dir under ``path``."""
    sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "rl_loop.yaml").read_text())
    return found | {"listen": {**sides, "http": "127.0.0.1:0"}, "state_dir": str(path / "state")}


class Role:
    """A process of the example, which is started again when it was killed."""

    def __init__(self, path: Path, name: str, broker: RunningBroker, file: Path = EXAMPLES / "rl_loop.py") -> None:
        self.path, self.name, self.file = path, name, file
        self.environment = {
            "STREAMPACK_ENDPOINT": broker.trainers, "STREAMPACK_PRODUCERS": broker.producers,
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        with (self.path / f"{self.name}.log").open("a") as log:
            output = log.fileno()
            words = [str(self.file), self.name]
            self.process = Command(words, output, output, "tests.integration.scripts", self.environment, self.path)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        return (self.path / f"{self.name}.log").read_text()


def trained(role: Role) -> list[int]:
    """Number of each step that was printed."""
    return [json.loads(line)["step"] for line in role.said.splitlines() if line.startswith("{")]


def expected_reward(weights: Path) -> float:
    """Return the policy's exact expected reward over all prompts and lengths of answers.

    Rewards of single steps would not do: the generator sends the prompts more often that are not learned yet.
    """
    model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB))
    model.load_state_dict(torch.load(weights))
    tokens = torch.arange(VOCAB)
    with torch.no_grad():
        follows = model(tokens).softmax(-1)
    distance = (tokens[:, None] - tokens).abs() / VOCAB  # [prompt, token]
    probability, lost, rewards = torch.eye(VOCAB), torch.zeros(VOCAB), torch.zeros(VOCAB)  # of each prompt's next token
    for length in range(1, LENGTH + 1):
        probability = probability @ follows
        lost += (probability * distance).sum(1)
        rewards += 1 - lost / length
    return float(rewards.mean()) / LENGTH


def test_the_loop_goes_on_whoever_is_killed() -> None:
    rng = random.Random(7)
    with folder() as path:
        config = settings(path)
        broker = RunningBroker(path, config)
        trainer, generator = Role(path, "train", broker), Role(path, "generate", broker)
        try:
            for victim in itertools.chain(["train", "generate", "broker", "train", "generate"], itertools.repeat("")):
                before, deadline = len(trained(trainer)), time.monotonic() + PATIENCE_S
                while len(trained(trainer)) < before + rng.randint(3, 5) and trainer.process.poll() is None:
                    assert time.monotonic() < deadline, trainer.said + generator.said + broker.said
                    assert generator.process.poll() in (None, 0), generator.said
                    time.sleep(0.05)
                if victim == "broker":
                    broker.kill()
                    broker = RunningBroker(path, config)
                elif victim:
                    role = trainer if victim == "train" else generator
                    role.kill()
                    role.start()
                elif trainer.process.poll() is not None:
                    break
            assert trainer.process.wait(PATIENCE_S) == 0, trainer.said
            assert generator.process.wait(PATIENCE_S) == 0, generator.said
            steps = trained(trainer)
            assert sorted(set(steps)) == list(range(STEPS))
            assert len(steps) < STEPS + 5, "a trainer that is killed trains at most the step again that it was at"
            with streampack.results(broker.trainers, start="oldest", timeout_s=PATIENCE_S) as results:
                reported = list(itertools.islice(results, STEPS))
            assert [step.step for step in reported] == list(range(STEPS)), "each step once"
            assert all(0 < float(step.values["reward"].mean()) <= 1 for step in reported)
            weights = path / "weights"
            assert expected_reward(weights / f"{STEPS}.pt") > expected_reward(weights / "0.pt") + 0.1, "it learns"
            assert len(list(weights.iterdir())) == STEPS + 1
            torch.load(path / "checkpoint.pt")
        finally:
            for role in (trainer, generator):
                role.kill()
            broker.kill()
        state = str(path / "state")
        assert json.loads(command("ledger", "verify", "--state-dir", state, "--json").stdout)["good"]


def test_rollouts_whose_rewards_never_come_stop_the_loop_for_seconds_only() -> None:
    """The generator is killed when its samples are durable, and nobody else knows their rewards."""
    lines = (EXAMPLES / "rl_loop.py").read_text()
    rewarding = "            reward = torch.stack("
    assert lines.count(rewarding) == 1
    killing = "            if version == 4 and not os.path.exists('killed'):\n"
    killing += (
        "                rollouts.flush()\n"  # the broker has the samples: otherwise their numbers are used again
    )
    killing += "                os.mkdir('killed')\n                os.kill(os.getpid(), 9)\n"
    with folder() as path:
        config = settings(path)
        broker = RunningBroker(path, config)
        (path / "killed.py").write_text(lines.replace(rewarding, killing + rewarding))
        trainer, generator = Role(path, "train", broker), Role(path, "generate", broker, path / "killed.py")
        try:
            assert generator.process.wait(PATIENCE_S) == -9, generator.said
            generator.start()
            assert trainer.process.wait(PATIENCE_S) == 0, trainer.said
            assert generator.process.wait(PATIENCE_S) == 0, generator.said
            assert trained(trainer) == [*range(STEPS)]
            assert (
                f"within {config['rules']['late_timeout_s']} s (late_timeout_s); 16 samples are dropped" in broker.said
            )
        finally:
            for role in (trainer, generator):
                role.kill()
            broker.kill()
