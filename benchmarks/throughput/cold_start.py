"""Measure the time to the first pack on a machine without compiled kernels, and once they are there.

``local``: a new process imports streampack and takes steps of 2,000 chats from ``streampack.local``, with the default
window and budget. ``run``: ``streampack run`` starts a broker, a producer and a trainer over 2,000 texts. ``cold``: no
kernel is compiled. ``warm``: all are. Columns, in seconds from the start of the process, or as said:

    first   until the first pack is in the loop
    steps   of the next 200 steps, or packs of ``run``
    cpu     of the processors, without the process that compiles in the background

``--other FOLDER`` measures the checkout there in turns with this one; it needs a ``.venv``, as this one does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

LOCAL = """
import json, os, resource, sys, time
import streampack
chats = [{"messages": [{"role": "user", "content": f"Question {n}: " + "why " * (n * 7 % 60)},
                       {"role": "assistant", "content": "because " * (1 + n * 13 % 90)}]} for n in range(2000)]
with streampack.local(chats, tokenizer="bytes", format="numpy", repeat=True) as loader:
    steps = loader.steps()
    next(steps)
    first = time.time()
    for _ in range(200):
        next(steps)
    last = time.time()
print(json.dumps({"first": first - float(os.environ["BEGAN"]), "steps": last - first}), flush=True)
"""
TRAIN = """
import json, os, time
import streampack
with streampack.connect(format="numpy") as loader:
    packs = iter(loader)
    next(packs)
    first = time.time()
    for _ in range(200):
        next(packs)
    last = time.time()
print(json.dumps({"first": first - float(os.environ["BEGAN"]), "steps": last - first}), flush=True)
"""
BROKER = """
run: cold
rules: {budget: 8192, step: {packs: 4}}
streams: {web: {repeat: true}}
"""
PRODUCER = "streams: {web: {source: jsonl, shards: web.jsonl}}\n"
MOST_S = 300.0
"""Seconds for which kernels are compiled at most."""


def measure(root: Path, what: str, cache: Path) -> dict[str, float]:
    """Run ``local`` or ``run`` of the checkout ``root`` once, with compiled kernels in the folder ``cache``."""
    python = root / ".venv" / "bin" / "python"
    folder = tempfile.mkdtemp(dir=cache.parent)  # stays, because the process that compiles goes on there
    Path(folder, "train.py").write_text(LOCAL if what == "local" else TRAIN)
    command = [str(python), "train.py"]
    if what == "run":
        rows = "".join(json.dumps({"text": "word " * (1 + n * 7 % 300)}) + "\n" for n in range(2000))
        for name, text in {"web.jsonl": rows, "broker.yaml": BROKER, "producer.yaml": PRODUCER}.items():
            Path(folder, name).write_text(text)
        command = [
            str(python.with_name("streampack")), "run", "-c", "broker.yaml", "-p", "producer.yaml", "--", *command
        ]  # fmt: skip
    before = os.times()
    environment = {"NUMBA_CACHE_DIR": str(cache), "XDG_RUNTIME_DIR": folder, "BEGAN": str(time.time())}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, check=True,
    )  # fmt: skip
    after = os.times()
    line = next(each for each in done.stdout.splitlines() if '"first"' in each)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {**json.loads(line[line.index("{") :]), "cpu": cpu}


def wait_for_compiler() -> None:
    """Wait until no process compiles kernels any more."""
    for _ in range(int(MOST_S)):
        if subprocess.run(["pgrep", "-f", "streampack.kernels.helper"], stdout=subprocess.DEVNULL).returncode:
            return
        time.sleep(1)
    raise TimeoutError(f"kernels are not compiled after {MOST_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each; the median is printed")
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of stdout")
    options = parser.parse_args()
    roots = {"this": Path(__file__).resolve().parents[2]}
    if options.other is not None:
        roots["other"] = options.other.resolve()
    rows: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="sp-kernels-") as caches:
        for _ in range(options.rounds):
            for what in ("local", "run"):
                for name, root in roots.items():
                    cache = Path(caches, name)
                    shutil.rmtree(cache, ignore_errors=True)
                    for heat in ("cold", "warm"):
                        rows.setdefault((name, what, heat), []).append(measure(root, what, cache))
                        wait_for_compiler()
    medians: list[dict[str, Any]] = []
    print(f"{'checkout':9}{'':6}{'':6}{'first':>7}{'steps':>7}{'cpu':>7}")
    for (name, what, heat), runs in rows.items():
        middle = {key: round(median(run[key] for run in runs), 2) for key in ("first", "steps", "cpu")}
        print(f"{name:9}{what:6}{heat:6}{middle['first']:7.2f}{middle['steps']:7.2f}{middle['cpu']:7.2f}")
        medians.append({"checkout": name, "what": what, "heat": heat, **middle, "runs": runs})
    if options.json:
        print(json.dumps({"rounds": options.rounds, "rows": medians}))


if __name__ == "__main__":
    main()
