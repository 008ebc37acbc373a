"""Pictures of the live page: ``python -m tests.screenshots DIR``.

Real brokers serve 4 and 512 ranks. 30,000 ranks are simulated: their broker forms no step.

The pictures of ``docs/how-to/observe.md`` are ``page-4-ranks-light.png`` and ``page-512-ranks-dark.png``, in ``docs/``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.integration.simulated_ranks import simulated
from tests.integration.watched import large, small, watched
from tests.integration.watching.chromium import Browser

WINDOWS = {"": (1440, 900), "-phone": (390, 844)}


def main(folder: Path, seconds: float = 25) -> None:
    """Write them all."""
    folder.mkdir(parents=True, exist_ok=True)
    browser = Browser()
    try:
        with watched({"streams": {"web": {}}, "rules": {"budget": 4096, "step": {"packs": 8}}}) as broker:
            take(browser, broker.url, folder, "empty", 2)
        with tempfile.TemporaryDirectory() as state, small(Path(state)) as broker:
            take(browser, broker.url, folder, "4-ranks", seconds)
        with large(512) as broker:
            take(browser, broker.url, folder, "512-ranks", seconds)
        with simulated(30_000, [17, *range(80, 88)]) as url:
            take(browser, url, folder, "30000-ranks", 2)
    finally:
        browser.close()


def take(browser: Browser, url: str, folder: Path, name: str, seconds: float) -> None:
    """Of one broker, in both themes, on both screens, after so many seconds."""
    time.sleep(seconds)
    for window, (width, height) in WINDOWS.items():
        for theme in ("light", "dark"):
            page = browser.page(url, width, height, dark=theme == "dark")
            shown = 1 if name == "empty" else 7  # the page knows the ranks' data wait after 5 s
            page.until(f"document.body.dataset.shown > {shown}")
            path = folder / f"page-{name}-{theme}{window}.png"
            page.screenshot(path)
            image = Image.open(path).convert("RGB")  # of 256 colors it is a third as large
            image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
            print(path, page.problems)
            page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
