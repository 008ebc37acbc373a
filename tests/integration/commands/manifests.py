"""Manifests of two brokers, and where trainers look for them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from tests.integration.running import in_process

Tree = dict[str, Any]


def two_brokers(kubernetes: Path) -> Tree:
    """The StatefulSet of a broker and its standby."""
    (tree,), (patch,) = (loaded(kubernetes / f"{top}/statefulset.yaml") for top in ("standalone", "standby"))
    return dict(merged(tree, patch))


def patched(kubernetes: Path, folder: str, component: str) -> Tree:
    """The example's Job of a folder with a component patched in."""
    (job,), (patch,) = loaded(kubernetes / folder / "job.yaml"), loaded(kubernetes / f"components/{component}/job.yaml")
    return dict(merged(job, patch | {"metadata": {}}))


def every_kind(kubernetes: Path) -> dict[str, Tree]:
    """All that makes Pods, by the folder of the export that has it."""
    single = {"broker": "standalone/statefulset", "producers": "standalone/producers", "relays": "relays/daemonset"}
    found = {name: loaded(kubernetes / f"{path}.yaml")[0] for name, path in single.items()}
    found |= {name: patched(kubernetes, "trainers", name) for name in ("relay", "relay-of-node")}
    return found | {"standby": two_brokers(kubernetes), "sidecar": patched(kubernetes, "sidecar", "sidecar")}


def containers(pod: Tree) -> list[Tree]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def make_keys(kubernetes: Path) -> None:
    """Make the keys, as the component says."""
    text = (kubernetes / "components/keys/kustomization.yaml").read_text()
    lines = re.findall(r"^#   streampack (keys new .+)$", text, re.M)
    assert len(lines) == 4
    for words in map(shlex.split, lines):
        if not (made := kubernetes / "components/keys" / words[2] / f"{words[3]}.key").exists():
            result = in_process(*words[:2], made.parent, *words[3:])
            assert result.returncode == 0, result.stderr


def addresses(kubernetes: Path, folder: str) -> str:
    """The brokers' addresses for trainers and relays, of ``standalone`` or ``standby``."""
    (tree,) = loaded(kubernetes / folder / "kustomization.yaml")
    (made,) = (each for each in tree["configMapGenerator"] if each["name"] == "streampack-addresses")
    (literal,) = made["literals"]
    assert made["options"] == {"disableNameSuffixHash": True}, "Jobs of other kustomizations name it"
    return str(literal.removeprefix("trainers="))


def loaded(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def merged(tree: Any, patch: Any) -> Any:
    """As kustomize does it for a kind that it knows: lists of things with names are merged by name."""
    if isinstance(tree, dict) and isinstance(patch, dict):
        return tree | {key: merged(tree[key], value) if key in tree else value for key, value in patch.items()}
    if isinstance(tree, list) and tree and isinstance(tree[0], dict) and "name" in tree[0]:
        by_name = {each["name"]: each for each in tree}
        return list(merged(by_name, {each["name"]: each for each in patch}).values())
    return patch


def exported(what: str, folder: Path, *options: str | Path) -> Path:
    result = in_process("export", what, folder, *options)
    assert result.returncode == 0, result.stderr
    return folder
