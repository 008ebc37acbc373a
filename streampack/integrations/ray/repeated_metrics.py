"""The broker's metrics, repeated through Ray, whose Prometheus service discovery finds only Ray's own targets.

Ray names them ``ray_streampack_...``. Metrics with a label for each rank, node or partition are left out: there may be
thousands. The broker's own ``/metrics`` has all of them.
"""

from __future__ import annotations

import contextlib
import re
import urllib.request

from ray.util.metrics import Gauge

EVERY_S = 10.0
"""Seconds between two looks at the broker's metrics, as between two scrapes."""
LEFT_OUT = frozenset({"rank", "node", "host", "partition", "le", "dp", "cp", "tp", "pp"})
"""Labels of metrics that are left out."""
_LINE = re.compile(r"^(streampack_\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class RepeatedMetrics:
    """Metrics of one service's broker as Ray's gauges, with the label ``service``."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._gauges: dict[str, Gauge] = {}

    def repeat(self, url: str) -> int:
        """Read the metrics of the broker at ``url``, and set Ray's gauges; return how many values were set."""
        text = ""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=EVERY_S) as answer:
            text = answer.read().decode()
        count = 0
        for name, labels, value in values_of(text):
            tags = labels | {"service": self._service}
            if name not in self._gauges:
                about = f"{name} of the broker"
                self._gauges[name] = Gauge(name, description=about, tag_keys=tuple(sorted(tags)))
            with contextlib.suppress(ValueError):  # a label that the first line of this metric did not have
                self._gauges[name].set(value, tags)
                count += 1
        return count


def values_of(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Return (name, labels, value) of each line of an exposition that is to be repeated."""
    values = []
    for line in text.splitlines():
        if (parsed := _LINE.match(line)) is None:
            continue
        labels = dict(_LABEL.findall(parsed[2] or ""))
        if not LEFT_OUT & labels.keys():
            values.append((parsed[1], labels, float(parsed[3])))
    return values
