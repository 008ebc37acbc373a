"""docs/reference/dependencies.md: every package that streampack needs, where, why, and under which license.

    python -m tests.dependencies_page > docs/reference/dependencies.md

``test_release`` compares the page with what this prints.
"""

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
# Package: where it is used; why it is used, or why our own code stands beside it.
USES = {
    "pillow": (
        "`streampack.sources.files.image_files`, `streampack.media.processor`",
        "Sizes of images from their first bytes, and their pixels.",
    ),
    "av": ("`streampack.sources.files.video_files`", "Headers of videos, and their frames. It brings FFmpeg."),
    "numpy": ("everywhere", "Lengths, tokens and packs are arrays."),
    "pyzmq": ("`streampack.transport`", "ZeroMQ sockets over TCP and ipc, CURVE keys. No other folder imports it."),
    "msgspec": (
        "`streampack.wire`, `streampack.config`, `/status`",
        "Typed structs, their msgpack encoding on the wire and in the log, and the JSON schema of the configuration.",
    ),
    "PyYAML": ("`streampack.config`", "broker.yaml and producer.yaml."),
    "awscrt": (
        "`streampack.wire.checksums`",
        (
            "CRC-32C of messages. It is the fastest under a permissive license. `crc_kernels` computes the checksums of "
            "many short samples in one pass, where a call for each costs 12 to 15 ms a million tokens."
        ),
    ),
    "numba": ("`streampack.core.jit`", "Compiled kernels of packers, merge and tensors. Plain Python runs without it."),
    "starlette": ("`streampack_services.http`", "Routes of the page, `/status`, `/metrics` and `/control`."),
    "uvicorn": ("`streampack_services.http`", "HTTP server. `http_limits` adds limits on connections and heads."),
    "typer": ("`streampack_services.cli`", "The `streampack` command."),
    "rich": ("`streampack_services`", "Tables, `streampack top`, progress bars."),
    "prometheus-client": (
        "`streampack_services.http.metrics`",
        (
            "Process metrics; its parser checks our exposition in tests. Our own writer renders the broker's metrics: "
            "512 ranks take 8 ms a scrape, 102 ms with the package's collector."
        ),
    ),
    "torch": ("`streampack.views`, `.integrations`, `.training`", "Tensors for trainers. The services never load it."),
    "tokenizers": ("`streampack.tokenizers.tokenizer_json`", "tokenizer.json files."),
    "jinja2": ("`streampack.tokenizers.chat_template`", "Chat templates, in Jinja's sandbox."),
    "transformers": ("`streampack.integrations.hf`", "The Trainer that PackedTrainerMixin extends."),
    "accelerate": ("`streampack.integrations.hf`", "The Trainer's gradient accumulation."),
    "datasets": ("`streampack.integrations.hf`", "Trainer's datasets. Saved datasets are read with pyarrow alone."),
    "trl": ("examples", "SFTTrainer."),
    "lightning": ("`streampack.integrations.lightning`", "PackedDataModule."),
    "ray": ("`streampack.integrations.ray`", "Actors that run the daemons, Ray Train and Ray Data."),
    "pyarrow": ("`streampack.sources.formats`", "Parquet and Arrow files."),
    "backports.zstd": ("`streampack.sources.files`", "Zstandard shards, before Python 3.14."),
    "fsspec": ("`streampack.sources.files`", "URLs; `remote` adds ranged reads and a bounded cache."),
    "flash-attn": ("`streampack.training`", "Attention inside each sample, on GPUs."),
}
OWN = """## Own code in place of a package

| what | in place of | why |
|---|---|---|
| tar reader (`sources.formats.tar`) | webdataset, tarfile | Seeks to any sample by an index, so that a resume reads no byte twice; damaged files are named by file and offset. |
| chat masks (`tokenizers.chat`) | transformers' templates | Finds what the model must learn in templates without `{% generation %}`; tests compare its ids with transformers. |
| log (`streampack_services.log`) | a database | One sequential write and one sync a group of steps; a torn tail is cut, any other damage is refused. |
| ledger (`streampack_services.ledger`) | a query over the log | SQLite index of the log; it can always be rebuilt from the log. |
| shared memory (`transport.shared_memory`) | multiprocessing.shared_memory | Memory without a name that could leak; tokens of one host skip the socket. |
| metrics writer (`http.metrics`) | prometheus-client's collector | One pass over the status; see above. |
| simulation (`tests/simulation`) | a cluster | Runs the pure core through thousands of crashes a minute, the same each time. |
"""


def license_of(name: str) -> str:
    """Return the license that an installed package declares: its SPDX expression, or else its classifier."""
    found = dict(metadata.metadata(name).json)
    named = [str(line).split(" :: ")[-1] for line in found.get("classifier", []) if "License ::" in str(line)]
    text = str(found.get("license_expression") or "") or "; ".join(named) or str(found.get("license") or "unknown")
    short = {
        "MIT License": "MIT",
        "BSD License": "BSD",
        "ISC License (ISCL)": "ISC",
        "Apache Software License": "Apache-2.0",
        "Apache 2.0 License": "Apache-2.0",
    }
    return short.get(text, text.splitlines()[0])


def closure(extra: str) -> set[str]:
    """Return the canonical names of all packages that ``streampack[extra]`` installs."""
    found, left = set[str](), [Requirement(f"streampack[{extra}]" if extra else "streampack")]
    while left:
        wanted = left.pop()
        key = f"{canonicalize_name(wanted.name)}[{','.join(sorted(wanted.extras))}]"
        if key in found:
            continue
        found.add(key)
        requires = own(wanted.extras) if wanted.name == "streampack" else metadata.requires(wanted.name) or []
        for requirement in map(Requirement, requires):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": each}) for each in ("", *wanted.extras)):
                left.append(requirement)
    return {key.partition("[")[0] for key in found} - {"streampack"}


def own(extras: set[str]) -> list[str]:
    """Return streampack's own requirements with these extras, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *optional]


def named() -> dict[str, str]:
    """Return the packages that pyproject.toml names for users, with the extras that bring each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {Requirement(line).name: "always" for line in project["dependencies"]}
    for extra, lines in project["optional-dependencies"].items():
        for name in (Requirement(line).name for line in lines if extra != "dev" and extra != "docs"):
            if name != "streampack" and found.get(name) != "always":
                found[name] = f"{found[name]}, `{extra}`" if name in found else f"`{extra}`"
    return found


def page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Dependencies\n",
        "`pip install streampack` installs what a trainer needs beside torch; `streampack[service]` adds the command and",
        "the daemons. `python -m tests.dependencies_page > docs/reference/dependencies.md` writes this page.\n",
        "| package | extra | used in | why | license |",
        "|---|---|---|---|---|",
    ]
    for name, extra in named().items():
        where, why = USES[name]
        declared = "BSD-3-Clause" if name == "flash-attn" else license_of(name)  # it needs a GPU to be installed
        lines.append(f"| {name} | {extra} | {where} | {why} | {declared} |")
    lines += ["", OWN, "## All packages that `streampack[service]` installs\n", "| package | license |", "|---|---|"]
    lines += [f"| {name} | {license_of(name)} |" for name in sorted(closure("service"))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
