"""Tables of the keys of broker.yaml and producer.yaml, from the JSON schema of ``streampack check --schema``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from streampack_services.check.check import json_schema

Tree = dict[str, Any]
FEW_NEED = {
    "rules.leftovers", "rules.micro_batch_size", "rules.staleness.max_policy_lag", "rules.staleness.on_exceed",
    "rules.late_timeout_s", "rules.share",
    "rules.align.sample", "rules.align.pack",
    "rules.align.lcm", "rules.balance.a", "rules.balance.b", "rules.balance.group", "rules.balance.patience",
    "rules.step.min_samples", "rules.step.micro_batch_multiple", "rules.step.min_micro_batches", "rules.step.empty",
    "limits.peers", "limits.chunk", "steps_ahead", "drain_timeout_s", "tokenizer.date", "tokenizer.allow_special",
    "tokenizer.bos_token", "tokenizer.eos_token", "tokenizer.chat_template", "tokenizer.chat_template_kwargs",
    "tokenizer.roles", "streams.NAME.modes",
    "streams.NAME.missing_mask",
}  # fmt: skip
"""Keys by their paths."""


_AS_ABOVE = {"streams.NAME.tokenizer.", "feeds.NAME.stages.NAME."}
"""Structs whose keys are those of another struct in the table."""


def tables() -> str:
    """Return the tables, a section for each file."""
    definitions = json_schema()["$defs"]
    parts = list[str]()
    for file, kind in (("broker.yaml", "BrokerConfig"), ("producer.yaml", "ProducerConfig")):
        rows = list(_rows(definitions, definitions[kind]))
        sections = dict.fromkeys(path.rpartition(".")[0] for path, _ in rows if path not in FEW_NEED)
        parts.append(f"\n## {file}\n")
        for section in sections:
            section_rows = [row for path, row in rows if path.rpartition(".")[0] == section and path not in FEW_NEED]
            parts.append(_table(f"`{section}`" if section else f"At the top of {file}", section_rows))
        parts.append(_table("Keys that few runs need", [row for path, row in rows if path in FEW_NEED]))
    return "".join(parts)


def _table(title: str, rows: list[str]) -> str:
    return "\n".join([f"\n### {title}\n", "| key | values | default | meaning |", "|---|---|---|---|", *rows, ""])


def _rows(definitions: Tree, kind: Tree, path: str = "") -> Iterator[tuple[str, str]]:
    """The path and the row of each key of a struct, then of the structs in it."""
    nested: list[tuple[Tree, str]] = []
    for name, schema in kind["properties"].items():
        choices = schema.get("anyOf", [schema])
        below = [each["$ref"].rpartition("/")[2] for each in choices if "$ref" in each]
        named = [each["additionalProperties"]["$ref"].rpartition("/")[2] for each in choices
                 if "$ref" in (each.get("additionalProperties") or {})]  # fmt: skip
        named += [each["items"]["$ref"].rpartition("/")[2] for each in choices if "$ref" in (each.get("items") or {})]
        nested += [(definitions[each], f"{path}{name}.") for each in below]
        nested += [(definitions[each], f"{path}{name}.NAME.") for each in named]
        values = ", ".join(filter(None, map(_values, choices)))
        if values and not named:
            default = "" if schema.get("default") in (None, (), {}, "") else f"`{_yaml(schema['default'])}`"
            yield path + name, f"| `{path}{name}` | {values} | {default} | {schema['description']} |"
    for each, below_path in nested:
        if below_path not in _AS_ABOVE:
            yield from _rows(definitions, each, below_path)


def _values(schema: Tree) -> str:
    """Return the values that a key takes, in words. A struct has none: its keys have their own rows. Nor has null."""
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true`, `false`",
             "array": "list", "object": "mapping"}  # fmt: skip
    kind = words.get(schema.get("type", ""), "")
    bounds = [f"from {schema['minimum']}"] if "minimum" in schema else []
    bounds += [f"above {schema['exclusiveMinimum']:g}"] if "exclusiveMinimum" in schema else []
    most = schema.get("maximum")
    bounds += [f"to {most:,}".removesuffix(".0")] if most is not None and most < 2**31 else []
    return " ".join([kind, *bounds])


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
