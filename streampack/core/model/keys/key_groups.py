"""``Keys``: the base of structs that share configuration keys.

A key that several structs have is declared in a group, which is a struct of keys. Structs with the key have the group
among their bases. msgspec cannot mix several structs, and lists the fields of a base first. ``Keys`` therefore copies
the keys of groups into each struct, in the order that the file, its errors and the records have. At run time such a
struct is therefore no subclass of its groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, get_args

import msgspec
from msgspec import NODEFAULT, Meta, StructMeta
from msgspec.structs import FieldInfo


class KeysMeta(StructMeta):
    """Metaclass of ``Keys``. A struct's option ``listed`` names keys in their order, and other keys follow.

    The option ``unset`` has further groups. Their keys are None by default; the value is then that of the key at the
    group's path in ``unset``. A struct with one group and no option inherits as usual.
    """

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], listed: str = "",
        unset: Mapping[type, str] = MappingProxyType({}), **options: Any,
    ) -> KeysMeta:  # fmt: skip
        groups: list[Any] = [base for base in bases if isinstance(base, KeysMeta) and base.__struct_fields__]
        if not listed and len(groups) < 2:
            return super().__new__(mcls, name, bases, namespace, **options)
        inherited = {field.name: field for group in (*groups, *unset) for field in msgspec.structs.fields(group)}
        own = namespace.get("__annotations__", {})
        types: dict[str, Any] = {key: field.type for key, field in inherited.items()} | own
        defaults = {key: _default(field) for key, field in inherited.items() if key not in own and not field.required}
        for group, path in unset.items():
            for key in group.__struct_fields__:  # type: ignore[attr-defined]
                kind, meta = get_args(types[key])
                types[key] = Annotated[kind | None, Meta(description=f"{meta.description}. Default: `{path}.{key}`")]
                defaults[key] = None
        order = [*listed.split(), *(key for key in types if key not in listed.split())]
        content = defaults | namespace | {"__annotations__": {key: types[key] for key in order}}
        return super().__new__(mcls, name, (Keys,), content, **options)


def _default(field: FieldInfo) -> Any:
    """Return the default of a field as a struct declares it."""
    return field.default if field.default is not NODEFAULT else msgspec.field(default_factory=field.default_factory)


class Keys(msgspec.Struct, metaclass=KeysMeta, frozen=True, forbid_unknown_fields=True):
    """Base of groups of keys, and of the structs that have them: unknown keys are errors."""


def values_of(settings: Keys, group: type[Keys]) -> dict[str, Any]:
    """Return the values that ``settings`` has for the keys of ``group``."""
    return {key: getattr(settings, key) for key in group.__struct_fields__}
