"""``streampack export``: what it fills in, what it refuses, and that an installed package has all of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from streampack_services.broker.memory_peak import peak
from streampack_services.broker.memory_plan import plan
from streampack_services.export import FILES, IMAGE, PLACES, RUN
from streampack_services.export_limits import limit_gib

from streampack.config.config_files import read_broker, read_producer
from tests.integration.commands.manifests import Tree, exported
from tests.integration.running import in_process, the_error, write

ROOT = Path(__file__).parents[3]
FILLED = {"image": "other:1", "namespace": "other", "prefix": "/other", "run": "other"}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's broker.yaml."""
    return write(
        tmp_path / "mine.yaml",
        {"run": "sft-8b", "memory": "3GiB", "listen": {"http": "127.0.0.1:1", "token_file": "/run/mine.token"},
         "state_dir": "x", "rules": {"budget": 4096}, "streams": {"code": {}}},
    )  # fmt: skip


@pytest.mark.parametrize("what", [name for name, place in PLACES.items() if "config" in place.options])
def test_ones_own_configuration_takes_the_examples_place_but_for_where_things_are(
    what: str, mine: Path, tmp_path: Path
) -> None:
    folder = exported(what, tmp_path / "out", "-c", mine)
    found = {path: read_broker(path) for path in folder.rglob("broker.yaml")}
    assert found
    for path, config in found.items():
        assert (config.run, config.rules.budget, list(config.streams)) == ("sft-8b", 4096, ["code"])
        assert config.listen.http != "127.0.0.1:1"
        assert config.listen.token_file == "/run/mine.token", "nobody is let in who was not"
        assert config.state_dir != "x", path
    text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert RUN not in text.replace("my-run reads", "")
    limit = limit_gib(read_broker(mine))
    words = {"k8s": f"memory: {limit}Gi", "compose": f"&broker-memory {limit}g", "systemd": f"MemoryMax={limit}G"}
    assert words.get(what, "") in text


@pytest.mark.parametrize("what", ["k8s", "compose", "systemd", "slurm"])
def test_no_word_of_the_user_s_own_files_is_filled_in(what: str, mine: Path, tmp_path: Path) -> None:
    """``memory: 3GiB`` holds what stands for a container's memory, paths and callables may hold the other words."""
    path = f"/opt/streampack/{RUN}/namespace: default/{IMAGE}"
    streams = {"code": {"source": "text", "shards": path}}
    producer = write(tmp_path / "producers.yaml", {"broker": "tcp://x:1", "streams": streams})
    options = [f"--{name}={value}" for name, value in FILLED.items() if name in PLACES[what].options]
    folder = exported(what, tmp_path / "out", "-c", mine, "-p", producer, *options)
    found = {name: list(folder.rglob(name)) for name in ("broker.yaml", "producer.yaml")}
    assert all(found.values())
    assert {read_broker(path).memory for path in found["broker.yaml"]} == {"3GiB"}
    assert {read_broker(path).run for path in found["broker.yaml"]} == {"other"}
    assert {str(read_producer(path).streams["code"].shards) for path in found["producer.yaml"]} == {path}


@pytest.mark.parametrize("what", ["k8s", "compose"])
@pytest.mark.parametrize("key", ["keys", "token_file"])
def test_a_container_sees_no_relative_path(what: str, key: str, tmp_path: Path) -> None:
    config = write(tmp_path / "mine.yaml", {"listen": {key: "x/y"}, "streams": {"code": {}}})
    line = the_error(in_process("export", what, tmp_path / "none", "-c", config), 2)
    assert f"{config}: listen.{key} is the relative path x/y, but the exported broker runs in a container" in line
    assert not (tmp_path / "none").exists()


def test_a_standby_gets_the_places_addresses_and_keeps_what_it_does_on_loss(tmp_path: Path) -> None:
    standby = {"arbiter": "/shared/x", "name": "a", "on_loss": "go_on", "takeover_s": 20}
    config = write(tmp_path / "mine.yaml", {"state_dir": "x", "streams": {"web": {}}, "standby": standby})
    folder = exported("k8s", tmp_path / "k8s", "-c", config)
    found = {path.parent.name: read_broker(path).standby for path in folder.rglob("broker.yaml")}
    assert found["sidecar"] is found["standalone"] is None
    two = found["standby"]
    assert two is not None
    assert (two.arbiter, two.name, two.on_loss, two.takeover_s) == (
        "kubernetes:///streampack-active", None, "go_on", 20,
    )  # fmt: skip
    said = in_process("export", "compose", tmp_path / "compose", "-c", config).stdout
    assert "has a standby, whose addresses and arbiter are left out: this place has one host" in said
    kept = exported("systemd", tmp_path / "systemd", "-c", config) / "broker.yaml"
    assert read_broker(kept).standby == read_broker(config).standby


def test_export_names_settings_that_will_not_work_there(mine: Path, tmp_path: Path) -> None:
    numbers = itertools.count()
    text: dict[str, Any] = {"source": "text", "shards": ["/data/a", "data/*.txt"]}
    rows: dict[str, Any] = {"source": "jsonl", "path": "s3://x/y", "tokenizer": {"file": "/models/m"}}
    near = write(tmp_path / "near.yaml", {"streams": {"code": text | {"shards": ["/data/a", "/data/*.txt"]}}})
    far = write(tmp_path / "far.yaml", {"streams": {"code": rows}})

    def warned(what: str, *options: str | Path) -> list[str]:
        said = in_process("export", what, tmp_path / f"x{next(numbers)}", "--json", *options).stdout
        return list(json.loads(said)["warnings"])

    def unsent(name: str, config: str | Path) -> str:
        return (
            f"no producer sends the stream {name} of {config}, so the broker waits for it. Write in producer.yaml, "
            f'under streams: {name}: {{source: jsonl, shards: "/data/{name}/*.jsonl"}}'
        )

    def unknown(whose: str | Path, name: str, config: str | Path) -> str:
        return (
            f"{whose} sends the stream {name}, which {config} does not have. Write there, under streams: {name}: {{}}"
        )

    assert warned("k8s") == []
    of_example = unknown("the producer.yaml of the example", "web", mine)
    token = "kubectl create secret generic streampack-http --from-file=http.token=/run/mine.token"
    no_token = (
        f"{mine}: listen.token_file is /run/mine.token, which the Pods do not have. Write token_file: "
        f"/etc/streampack-keys/http.token, and run {token}"
    )
    assert warned("k8s", "-c", mine) == [of_example, unsent("code", mine), no_token]
    its_config = "the broker.yaml of the example"
    assert warned("slurm", "-p", near) == [unknown(near, "code", its_config), unsent("web", its_config)]
    for what in ("k8s", "slurm"):
        for tree, key, path in (
            ({"streams": {"code": text}}, "streams.code.shards", "data/*.txt"),
            ({"streams": {"code": rows}, "tokenizer": {"file": "models/m"}}, "tokenizer.file", "models/m"),
        ):
            relative = write(tmp_path / "relative.yaml", tree)
            line = the_error(in_process("export", what, tmp_path / "none", "-c", mine, "-p", relative), 2)
            assert f"{relative}: {key} is the relative path {path}, but exported producers run elsewhere" in line
            assert not (tmp_path / "none").exists()
    assert warned("k8s", "-c", mine, "-p", near) == [no_token]
    assert warned("slurm", "-c", mine, "-p", far) == []
    assert f"warning: {of_example}" in in_process("export", "slurm", tmp_path / "y", "-c", mine).stdout


def test_options_are_filled_in_everywhere(tmp_path: Path) -> None:
    options = ("--image", "registry:5000/streampack:1.0", "--namespace", "training", "--run", "sft")
    folder = exported("k8s", tmp_path, *options)
    text = "".join(path.read_text() for path in folder.rglob("*.yaml"))
    assert IMAGE not in text
    assert RUN not in text
    assert text.count("image: registry:5000/streampack:1.0") == 12
    assert text.count("namespace: training") == 9
    assert text.count("run: sft") == 3


def test_a_container_may_take_a_brokers_peak_and_what_compiling_takes(tmp_path: Path) -> None:
    for mib in range(1024, 2049, 64):
        path = write(tmp_path / "broker.yaml", {"memory": f"{mib}MiB", "streams": {"code": {}}})
        config = read_broker(path)
        most = peak(config, plan(config), mean_tokens=None).total
        assert 512 << 20 <= (limit_gib(config) << 30) - most < (1 << 30) + (512 << 20)


def test_nothing_is_written_over_unless_it_is_asked_for(tmp_path: Path) -> None:
    exported("slurm", tmp_path)
    (tmp_path / "steps.sbatch").write_text("mine")
    (tmp_path / "run.sbatch").unlink()
    assert "exists already. Choose another folder" in the_error(in_process("export", "slurm", tmp_path), 2)
    assert not (tmp_path / "run.sbatch").exists()
    exported("slurm", tmp_path, "--force")
    assert (tmp_path / "steps.sbatch").read_text() == (FILES / "slurm/steps.sbatch").read_text()
    assert (tmp_path / "steps.sbatch.old").read_text() == "mine"
    assert exported("slurm", tmp_path), "the same files are no difference"


def test_edits_of_an_earlier_export_are_kept(tmp_path: Path) -> None:
    """A folder that an older version has written, with a Job that the user has put there, and with a file of theirs."""
    kubernetes = exported("k8s", tmp_path)
    job, limits, notes = kubernetes / "sidecar/job.yaml", kubernetes / "relays/daemonset.yaml", kubernetes / "notes.txt"
    for path in (job, limits, notes):
        path.write_text("first")
    line = the_error(in_process("export", "k8s", tmp_path), 2)
    assert f"{limits} and 1 more file exist already. Choose another folder, or overwrite with --force" in line
    for text in ("first", "second"):
        for path in (job, limits):
            path.write_text(text)
        result = in_process("export", "k8s", tmp_path, "--force", "--json")
        (warning,) = json.loads(result.stdout)["warnings"]
        assert warning.startswith(f"{limits} and 1 more file had other contents, kept as NAME.old")
    assert job.read_text() == (FILES / "kubernetes/sidecar/job.yaml").read_text()
    assert [path.read_text() for path in sorted(job.parent.glob("job.yaml.old*"))] == ["first", "second"]
    assert notes.read_text() == "first"
    limits.unlink()
    limits.mkdir()
    assert "exists already" in the_error(in_process("export", "k8s", tmp_path), 2)


PRODUCER: dict[str, Any] = {
    "key_file": "/srv/p.key",
    "tokenizer": {"file": "/models/llama"},
    "streams": {
        "web": {"source": "parquet", "shards": ["/mnt/{0..9}/a.parquet", "s3://x/y", "/data", "file:///data/w"]},
        "books": {"source": "jsonl", "path": "/home/u/books.jsonl"},
        "made": {"source": "python", "path": "mine.rows:all"},
    },
}
LISTEN = {"keys": "/srv/keys", "token_file": "/srv/http.token"}


@pytest.mark.parametrize(
    ("what", "lines"),
    [
        ("k8s", {
            "streams.web.shards is /mnt/{0..9}/a.parquet": "- {name: data, mountPath: /mnt, readOnly: true}",
            "streams.books.path is /home/u/books.jsonl": "- {name: data, mountPath: /home/u, readOnly: true}",
            "tokenizer.file is /models/llama": "- {name: data, mountPath: /models/llama, readOnly: true}",
            "key_file is /srv/p.key": "Remove the line",
            "streams.made.path is in the Python module mine.rows": "COPY mine* /var/lib/streampack/",
            "producer.yaml needs tokenizers, parquet, remote": "'streampack[service,tokenizers,parquet,remote] @ ",
            "listen.keys is /srv/keys": "Write keys: /etc/streampack-keys",
            "listen.token_file is /srv/http.token": "--from-file=http.token=/srv/http.token",
        }),
        ("compose", {
            "streams.web.shards is /mnt/{0..9}/a.parquet": "under volumes of producer: - /mnt:/mnt:ro",
            "streams.books.path is /home/u/books.jsonl": "- /home/u:/home/u:ro",
            "tokenizer.file is /models/llama": "- /models/llama:/models/llama:ro",
            "key_file is /srv/p.key": "under volumes of producer: - /srv/p.key:/srv/p.key:ro. Its user is 10001",
            "streams.made.path is in the Python module mine.rows": "COPY mine* /var/lib/streampack/",
            "listen.keys is /srv/keys": "under volumes of broker: - /srv/keys:/srv/keys:ro. Its user is 10001",
            "listen.token_file is /srv/http.token": "- /srv/http.token:/srv/http.token:ro",
        }),
        ("systemd", {
            "streams.books.path is /home/u/books.jsonl": "ProtectHome=tmpfs and BindReadOnlyPaths=/home/u",
            "key_file is /srv/p.key": "LoadCredential=producers.key:/srv/p.key",
            "listen.keys is /srv/keys": "LoadCredential=broker.key:/srv/keys/broker.key",
            "listen.token_file is /srv/http.token": "LoadCredential=http.token:/srv/http.token",
        }),
        ("slurm", {}),
    ],
)  # fmt: skip
def test_export_names_what_a_place_does_not_see_and_the_line_to_write(
    what: str, lines: dict[str, str], tmp_path: Path
) -> None:
    config = write(tmp_path / "mine.yaml", {"listen": LISTEN, "streams": {"web": {}, "books": {}, "made": {}}})
    producer = write(tmp_path / "producer.yaml", PRODUCER)
    said = in_process("export", what, tmp_path / "out", "--json", "-c", config, "-p", producer)
    warnings = json.loads(said.stdout)["warnings"]
    assert len(warnings) == len(lines), warnings
    for start, line in lines.items():
        assert [line in each for each in warnings if start in each] == [True], (start, warnings)
    if what == "compose":
        text = (tmp_path / "out/docker/Dockerfile").read_text()
        assert 'STREAMPACK="streampack[service,tokenizers,parquet,remote]' in text


@pytest.mark.parametrize(
    ("streams", "sources", "said"),
    [
        ({"web": {}}, None, ["the producer.yaml of the example sends the stream web, since --produce names no file"]),
        ({"rl": {"pushed": True}}, None, ["programs push every stream"]),
        ({"web": {}, "rl": {"pushed": True}}, {"web": {}}, []),
        ({"rl": {"pushed": True}}, {"rl": {}}, ["has a source for the stream rl, which programs push"]),
    ],
)
def test_streams_without_a_producer_are_named_unless_programs_push_them(
    streams: Tree, sources: Tree | None, said: list[str], tmp_path: Path
) -> None:
    rest = {"state_dir": "x", "merge": "arrival"} if any(each.get("pushed") for each in streams.values()) else {}
    options: list[str | Path] = ["-c", write(tmp_path / "mine.yaml", rest | {"streams": streams})]
    if sources is not None:
        tree = {name: {"source": "jsonl", "shards": "/data/*.jsonl"} for name in sources}
        options += ["-p", write(tmp_path / "p.yaml", {"streams": tree})]
    warnings = json.loads(in_process("export", "k8s", tmp_path / "out", "--json", *options).stdout)["warnings"]
    assert len(warnings) == len(said), warnings
    assert all(text in warning for text, warning in zip(said, warnings, strict=True))


def test_a_step_beyond_the_memory_of_relays_is_named(tmp_path: Path) -> None:
    large = {"memory": "256GiB", "rules": {"budget": 1 << 20, "step": {"packs": 1024}}, "streams": {"web": {}}}
    config = write(tmp_path / "mine.yaml", large)
    said = json.loads(in_process("export", "k8s", tmp_path / "out", "--json", "-c", config).stdout)["warnings"]
    assert f"a step of {config} has up to 4.0 GiB, but relays have --memory 2GiB" in said[-1]


def test_export_lists_the_files_that_it_writes(tmp_path: Path) -> None:
    result = in_process("export", "alerts", tmp_path / "new", "--json")
    said = json.loads(result.stdout)
    assert set(said) == {"files", "next", "warnings"}
    assert said["warnings"] == []
    assert sorted(map(Path, said["files"])) == sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert "rule_files" in said["next"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("helm",), "expected one of docker, compose, k8s"),
        (("alerts", "--image", "x"), "The export alerts does not have the option --image."),
        (("k8s", "--run", "a b"), "--run: got 'a b'"),
        (("systemd", "--run", "a/../b"), "--run: got 'a/../b'"),
        (("k8s", "--namespace", "Training"), "--namespace: got 'Training'"),
        (("slurm", "--prefix", "venv"), "--prefix: got 'venv', expected an absolute path"),
        (("slurm", "--config", "none.yaml"), "none.yaml"),
    ],
)
def test_an_export_that_cannot_be_is_refused_in_one_line(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said in the_error(in_process("export", words[0], tmp_path / "out", *words[1:]), 2)
    assert not (tmp_path / "out").exists()


def test_the_name_of_a_run_that_no_unit_and_no_job_can_have_is_refused(tmp_path: Path) -> None:
    config = write(tmp_path / "mine.yaml", {"run": "sft\nrm -rf x", "streams": {"code": {}}})
    error = the_error(in_process("export", "slurm", tmp_path / "out", "-c", config), 2)
    assert "--run: got 'sft\\nrm -rf x', expected letters" in error
    assert not (tmp_path / "out").exists()
