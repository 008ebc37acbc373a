"""Figures of the site: the committed files are those that the script draws."""

from __future__ import annotations

from xml.etree import ElementTree

from docs.generate import figures


def test_every_figure_is_the_one_that_the_script_draws() -> None:
    drawn = figures.all_figures()
    assert set(drawn) == {path.stem for path in figures.ASSETS.glob("*.svg")}
    for name, svg in drawn.items():
        assert (figures.ASSETS / f"{name}.svg").read_text() == svg, "python -m docs.generate.figures"
        ElementTree.fromstring(svg)
