"""Measure what trainers behind slow links cost a broker: ``python -m benchmarks.attacks.slow_links --json``.

One rank at 1 MB/s, then sixteen at 0.4 MB/s each, over TCP through proxies that limit the rate. Reported of each: the
broker's resident memory before and at its peak, the share of the sent bytes that was useful, and the share of the
links' rate at which useful bytes came.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from tests.integration.faults.slow_links import read_slowly

RUNS = ((1, 1e6, 256), (16, 0.4e6, 512))
"""Ranks, bytes a second of each, packs of a step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="that the ranks of each run read")
    parser.add_argument("--memory", default="256MiB", help="of the broker, in MiB")
    parser.add_argument("--drain", type=float, default=60.0, help="seconds in which what is on its way may arrive")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rows = []
    for ranks, rate, packs in RUNS:
        found = read_slowly(ranks, rate, options.seconds, options.memory, packs, options.drain)
        rows.append(asdict(found) | {"useful": found.useful, "link_use": found.link_use})
        print(
            f"{ranks} ranks at {rate / 1e6:g} MB/s: broker {found.before_bytes >> 20} -> {found.most_bytes >> 20} MiB, "
            f"sent {found.sent_bytes / 1e6:.0f} MB, useful {found.useful:.3f}, of the links {found.link_use:.3f}",
            file=sys.stderr,
        )
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
