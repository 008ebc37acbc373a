"""The types of a broker's status: every field is typed and described."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from streampack_services.broker import status
from streampack_services.broker.causes.waiting_for import WaitingFor
from streampack_services.broker.ranks import rank_status
from streampack_services.broker.status import BrokerStatus, FeedRules
from streampack_services.figure import Figure, gauge

from streampack.core.model.rules import Rules
from tests.blank import blank

STRUCTS = [
    each
    for module in (status, rank_status)
    for each in vars(module).values()
    if inspect.isclass(each) and issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
]


def parts(kind: Any) -> set[Any]:
    """Return a type and all types in it."""
    return {kind}.union(*map(parts, get_args(kind)))


@pytest.mark.parametrize("struct", STRUCTS)
def test_no_field_is_any(struct: type[msgspec.Struct]) -> None:
    for name, kind in get_type_hints(struct).items():
        assert not parts(kind) & {Any, object, dict, list, tuple}, name


@pytest.mark.parametrize("module", [status, rank_status])
def test_every_field_is_described(module: ModuleType) -> None:
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            hints = get_type_hints(getattr(module, node.name), include_extras=True)
            for field, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
                if isinstance(field, ast.AnnAssign):
                    told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    hint = hints[ast.unparse(field.target)]
                    declared = any(isinstance(each, Figure) for each in getattr(hint, "__metadata__", ()))
                    assert told or declared, f"{node.name}: {ast.unparse(field)}"


def test_a_figure_over_a_method_cannot_be_shown_because_the_page_would_have_no_value() -> None:
    with pytest.raises(TypeError, match="fill it in the reporter"):
        gauge("wait_ratio", "Share of time.", shown=True)(lambda struct: 0.5)


def test_structs_are_frozen_and_read_back_as_they_were() -> None:
    assert all(struct.__struct_config__.frozen for struct in STRUCTS)
    before = blank(BrokerStatus, feeds={"train": blank(status.FeedStatus)})
    assert msgspec.json.decode(msgspec.json.encode(before), type=BrokerStatus) == before


def test_rules_of_a_later_broker_with_more_keys_are_read() -> None:
    tree = msgspec.to_builtins(Rules(budget=4096)) | {"digest": "ab", "a_later_rule": 1}
    assert msgspec.convert(tree, FeedRules).budget == 4096


@pytest.mark.parametrize(
    ("waiting", "text"),
    [
        (WaitingFor(reason="peers", detail="no rank is attached", stream=None, batch=False),
         "waiting for trainers: no rank is attached"),
        (WaitingFor(reason="failed", detail="the rules were changed", stream=None, batch=False),
         "the rules were changed"),
        (WaitingFor(reason="stream", detail="the end of the batch", stream="web", batch=True),
         "waiting for the end of the batch"),
    ],
)  # fmt: skip
def test_a_wait_is_one_line(waiting: WaitingFor, text: str) -> None:
    assert waiting.text == text
