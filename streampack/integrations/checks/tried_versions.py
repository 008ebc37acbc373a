"""Versions of frameworks that the adapters were tried with, and a check of the internals that an adapter uses.

An adapter declares its version once, and calls ``check`` before it patches the framework or relies on it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from streampack.errors import UserError

log = logging.getLogger("streampack.integrations")


@dataclass(frozen=True)
class Tried:
    """A package of a framework, and its version that an adapter was tried with; others were tried, too."""

    package: str
    version: str
    also: tuple[str, ...] = ()

    def check(self, owner: Any, *names: str) -> None:
        """Raise UserError unless ``owner`` has all attributes; warn once if another version is installed."""
        if missing := [name for name in names if not hasattr(owner, name)]:
            self._refuse(f"{_name_of(owner)} has no {', '.join(missing)}")
        self.warn()

    def warn(self) -> None:
        """Warn once if another version is installed."""
        _warn_once(self)

    def check_parameters(self, theirs: Any, ours: Any) -> None:
        """Raise UserError unless a function or class has the parameters of the one that replaces it."""
        got, expected = (list(inspect.signature(each).parameters) for each in (theirs, ours))
        if got != expected:
            self._refuse(f"{_name_of(theirs)} takes {', '.join(got)} in place of {', '.join(expected)}")

    def _refuse(self, why: str) -> None:
        raise UserError(
            f"got {self.package} {_installed(self.package)}, whose {why}, expected {self.package} {self.version}, with "
            f"which this adapter was tried. Install it: pip install '{self.package}=={self.version}'"
        )


@functools.cache
def _warn_once(tried: Tried) -> None:
    """Warn if the installed version is not the tried one."""
    installed = _installed(tried.package)
    if installed.partition("+")[0] not in (tried.version, *tried.also):
        log.warning(
            "%s %s was not tried with this version of streampack, %s was. If losses look wrong, install that version: "
            "pip install '%s==%s'",
            tried.package, installed, tried.version, tried.package, tried.version,
        )  # fmt: skip


def _installed(package: str) -> str:
    """Return the installed version of a package, such as that of a checkout without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def _name_of(owner: Any) -> str:
    """Return the name of a module, class or function, or of an object's class."""
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or type(owner).__qualname__)
