"""Measure the time to the first step of a run with hundreds of streams, and the broker's memory by then.

It writes JSON lines files, starts ``streampack run`` with a broker, a producer and one rank, and prints one JSON line:
seconds until the rank has its first step, seconds for 30 more, and the most memory of the broker so far, in MiB.

    python benchmarks/scale/many_streams.py --streams 600 --files 10 --rows 20
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

TRAIN = """
import json, os, time
from pathlib import Path
import streampack
def broker_mib():
    sizes = [0]
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            command = (status.parent / "cmdline").read_bytes()
            if os.environ["SIGN"].encode() in (status.parent / "environ").read_bytes() and b"\\0broker\\0" in command:
                sizes.append(int(status.read_text().partition("VmHWM:")[2].split()[0]) // 1024)
        except OSError:
            continue
    return max(sizes)
with streampack.connect(format="numpy", timeout_s=900, stall_timeout_s=900) as loader:
    steps = loader.steps()
    next(steps)
    first, mib = time.time(), broker_mib()
    for _ in range(30):
        next(steps)
    seconds = {"first_s": first - float(os.environ["BEGAN"]), "next_30_s": time.time() - first}
    print("RESULT", json.dumps({**seconds, "broker_mib": mib}), flush=True)
"""


def write_streams(folder: Path, streams: int, files: int, rows: int, memory: str) -> None:
    """Write the files of all streams, broker.yaml and producer.yaml."""
    names = [f"s{number:04d}" for number in range(streams)]
    text = "word " * 200
    for stream, name in enumerate(names):
        (folder / name).mkdir()
        for file in range(files):
            lengths = [20 + (stream * 7 + file * 13 + row * 29) % 900 for row in range(rows)]
            lines = "".join(json.dumps({"text": text[:length]}) + "\n" for length in lengths)
            (folder / name / f"{file:04d}.jsonl").write_text(lines)
    broker = {
        "run": "many", "memory": memory, "rules": {"budget": 8192, "step": {"packs": 8}},
        "streams": {name: {"repeat": True} for name in names},
    }  # fmt: skip
    sources = {name: {"source": "jsonl", "shards": f"{folder}/{name}/*.jsonl"} for name in names}
    (folder / "broker.yaml").write_text(json.dumps(broker))
    (folder / "producer.yaml").write_text(json.dumps({"tokenizer": {"name": "bytes"}, "streams": sources}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=600)
    parser.add_argument("--files", type=int, default=10, help="files of each stream")
    parser.add_argument("--rows", type=int, default=20, help="rows of each file")
    parser.add_argument("--memory", default="16GiB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sp-streams-") as name:
        folder = Path(name)
        write_streams(folder, options.streams, options.files, options.rows, options.memory)
        (folder / "train.py").write_text(TRAIN)
        command = ["streampack", "run", "-c", "broker.yaml", "-p", "producer.yaml", "--", "python", "train.py"]
        environment = {**os.environ, "BEGAN": str(time.time()), "SIGN": name}
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            check=True,
        )  # fmt: skip
    result = next(line for line in done.stdout.splitlines() if "RESULT" in line)
    print(json.dumps({**vars(options), **json.loads(result.partition("RESULT")[2])}))


if __name__ == "__main__":
    main()
