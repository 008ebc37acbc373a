"""The arguments of ``local`` and ``connect`` agree with the configuration keys, and with their types for checkers."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import Parameter, getdoc, signature
from typing import Any, get_type_hints

import pytest

from streampack.client.connect import ConnectOptions, connect
from streampack.config.daemon_settings import MEMORY
from streampack.config.rules_settings import RulesSettings
from streampack.config.service_settings import Limits
from streampack.config.stream_settings import StreamSettings
from streampack.core.model.keys.keyword_arguments import defaults_of
from streampack.core.model.keys.planning_keys import RunKeys
from streampack.local import LocalArguments, LocalOptions, local
from streampack.sources.settings import SourceSettings

OTHER_FORM = {"align", "limits", "fields", "source"}
"""Arguments of ``local`` that take other values than the key of the same name."""


@pytest.mark.parametrize(
    ("function", "options", "inherited", "apart"),
    [(connect, ConnectOptions, dict, {"format"}), (local, LocalOptions, ConnectOptions, {"client"})],
)
def test_options_for_type_checkers_are_the_keyword_arguments(
    function: Callable[..., Any], options: Any, inherited: Any, apart: set[str]
) -> None:
    hints, keyword_kinds = get_type_hints(function), (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
    names = {name for name, each in signature(function).parameters.items() if each.kind in keyword_kinds} - apart
    own = {name: hint for name, hint in get_type_hints(options).items() if name not in get_type_hints(inherited)}
    assert own == {name: hints[name] for name in names}


def test_defaults_of_local_are_those_of_the_keys() -> None:
    settings = (StreamSettings(), RulesSettings(), RunKeys(), SourceSettings("jsonl"))
    keys = {name: getattr(each, name) for each in settings for name in each.__struct_fields__}
    keys |= {"chunk": Limits().chunk, "memory": MEMORY}
    defaults = {name: each.default for name, each in signature(local).parameters.items()}
    shared = defaults.keys() & keys.keys() - OTHER_FORM
    assert len(shared) > 15
    assert {name: defaults[name] for name in shared} == {name: keys[name] for name in shared}


@pytest.mark.parametrize(("function", "options"), [(connect, ConnectOptions), (local, LocalArguments)])
def test_help_has_each_argument_with_its_default(function: Callable[..., Any], options: type[Any]) -> None:
    shown = {name: each.default for name, each in signature(function).parameters.items()}
    assert defaults_of(options).items() <= shown.items()
    entries = re.findall(r"^    (\w+): ", getdoc(function) or "", flags=re.MULTILINE)
    assert [name for name in entries if name in shown] == list(shown)


def test_an_argument_that_is_a_key_has_the_text_of_the_key() -> None:
    assert "    seed: Random seed for the order of shards and samples" in (getdoc(local) or "")
    assert "``packs``" in (getdoc(local) or "").partition("    samples: ")[2].partition("    padded: ")[0]


def test_a_wrong_name_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(TypeError, match=r"connect\(\) got an unexpected keyword argument 'prefech'.*mean 'prefetch'"):
        connect("tcp://127.0.0.1:1", prefech=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nonsense'$"):
        connect("tcp://127.0.0.1:1", nonsense=3)  # type: ignore[call-overload]
