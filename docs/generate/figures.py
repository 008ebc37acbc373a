"""Diagrams of the site as SVG."""

from __future__ import annotations


def all_figures() -> dict[str, str]:
    """Return the figures by name."""
    return {}
