"""Manifests of two brokers, and where trainers look for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.integration.running import in_process

Tree = dict[str, Any]


def two_brokers(kubernetes: Path) -> Tree:
    """The StatefulSet of a broker and its standby."""
    (tree,), (patch,) = (loaded(kubernetes / f"{top}/statefulset.yaml") for top in ("standalone", "standby"))
    return dict(merged(tree, patch))


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
