"""Ray's version, checked before any other module of this folder imports Ray."""

from __future__ import annotations

from importlib import metadata

from streampack.errors import UserError

MAJOR = 2
"""Major version of Ray with which this folder works."""


def check_ray() -> None:
    """Raise UserError if Ray is not installed, or has another major version."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise UserError(
            f"got no package 'ray', expected Ray {MAJOR}. Install it: pip install 'streampack[ray]'"
        ) from None
    if version.partition(".")[0] != str(MAJOR):
        raise UserError(f"got Ray {version}, expected Ray {MAJOR}. Install it: pip install 'streampack[ray]'")


check_ray()
