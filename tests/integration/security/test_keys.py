"""Key folders: what is in the files, who can read them, and what a broker makes of a change."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.broker import authorization
from streampack_services.broker.authorization import new_key, read_allowed
from streampack_services.broker.serving import allowed_keys
from streampack_services.broker.serving.allowed_keys import Allowed
from streampack_services.daemons.broker import exposed

from streampack.core.protocol.rights import NO_RIGHTS, Rights
from streampack.errors import UserError
from streampack.transport import curve, ipc_files, secret_files
from streampack.transport.curve import public_of
from streampack.transport.keys import find_key, load_key
from streampack.transport.secret_files import write_secret
from tests.integration.running import in_process, until

BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
BOB_PUBLIC = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
"""RFC 7748, section 6.1."""


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMPACK_KEY_FILE", raising=False)


def key_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_public_key_is_that_of_the_standard() -> None:
    assert public_of(BOB) == BOB_PUBLIC


def test_a_key_file_is_read_as_it_was_always_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"name: rank-3\nsecret: {BOB}\nbroker: {BOB_PUBLIC}\n"
    key = load_key(key_file(tmp_path / "k", text))
    assert (key.name, key.secret, key.broker, key.public) == ("rank-3", BOB, BOB_PUBLIC, BOB_PUBLIC)
    assert key.text() == text
    assert BOB not in repr(key) + str(key) + f"{[key]}"
    assert find_key(None) is None
    monkeypatch.setenv("STREAMPACK_KEY_FILE", str(tmp_path / "k"))
    assert find_key(None) == key
    assert find_key("") is None


@given(st.one_of(st.text(max_size=200), st.sampled_from([f"name: a\nsecret: {BOB}\n", f"secret: {BOB}", f"- {BOB}"])))
def test_a_file_that_is_no_key_is_refused_and_not_shown(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "no.key"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError) as refused:
        load_key(path)
    assert str(path) in str(refused.value)
    assert BOB not in str(refused.value)


@pytest.mark.parametrize(
    ("owner", "mode", "good"),
    [
        ("me", 0o600, True), ("me", 0o400, True), ("me", 0o440, False), ("me", 0o644, False), ("me", 0o604, False),
        ("me", 0o660, False), ("me", 0o602, False), ("root", 0o440, True), ("root", 0o444, False),
        ("root", 0o460, False), ("other", 0o600, False),
    ],
)  # fmt: skip
def test_a_secret_that_others_could_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, mode: int, good: bool
) -> None:
    path = key_file(tmp_path / "k", f"name: a\nsecret: {BOB}\nbroker: {BOB_PUBLIC}\n", 0o600)
    found = list(path.stat())
    found[stat.ST_MODE] = stat.S_IFREG | mode
    found[stat.ST_UID] = {"me": os.geteuid() or 1000, "root": 0, "other": 4242}[owner]
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result(found))
    monkeypatch.setattr(os, "geteuid", lambda: found[stat.ST_UID] if owner == "me" else 1000)
    if good:
        assert load_key(path).name == "a"
        return
    with pytest.raises(UserError, match=r"other users can access|belongs to user 4242") as refused:
        load_key(path)
    assert BOB not in str(refused.value)


def test_a_path_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UserError, match="is not a regular file"):
        load_key(tmp_path / "pipe")
    with pytest.raises(UserError, match="Is a directory"):
        load_key(tmp_path)


def test_keys_are_made_for_their_users_alone_and_say_what_they_may(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    before = os.umask(0)
    try:
        made = in_process("keys", "new", folder, "tokenizers", "--role", "producer", "--stream", "web")
        in_process("keys", "new", folder, "rank-3", "--role", "trainer", "--feed", "train", "--rank", "dp=3")
    finally:
        os.umask(before)
    assert made.returncode == 0, made.stderr
    assert "tokenizers.key to the host of tokenizers" in made.stdout
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["allowed.yaml", "broker.key", "rank-3.key", "tokenizers.key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    broker, rank, tokens = (load_key(folder / f"{name}.key") for name in ("broker", "rank-3", "tokenizers"))
    assert broker.broker == broker.public == rank.broker == tokens.broker
    assert len({broker.secret, rank.secret, tokens.secret}) == 3
    secrets = [key.secret for key in (broker, rank, tokens)]
    assert not any(secret in (folder / "allowed.yaml").read_text() + made.stdout for secret in secrets)
    assert authorization.rights_of(read_allowed(folder), broker) == {
        tokens.public: Rights("tokenizers", "producer", streams=("web",)),
        rank.public: Rights("rank-3", "trainer", feeds=("train",), ranks={"dp": 3}),
        broker.public: Rights("broker", "any"),
    }
    in_process("keys", "new", folder, "nodes", "--role", "relay", "--feed", "train", "--host", "gpu0", "--host", "gpu1")
    nodes = load_key(folder / "nodes.key").public
    of_nodes = Rights("nodes", "relay", feeds=("train",), hosts=("gpu0", "gpu1"))
    assert authorization.rights_of(read_allowed(folder), broker)[nodes] == of_nodes
    shown = in_process("keys", "list", folder)
    assert "host gpu0" in shown.stdout
    assert "feed train, dp_rank=3" in shown.stdout
    assert f'"key": "{rank.public}"' in in_process("keys", "list", folder, "--json").stdout


def test_keys_that_are_made_at_once_are_all_allowed(tmp_path: Path) -> None:
    names = [f"rank-{number}" for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: new_key(tmp_path / "keys", name, "trainer", {}), names))
    found = read_allowed(tmp_path / "keys")
    assert set(found) == set(names)
    assert all(load_key(tmp_path / "keys" / f"{name}.key").public == found[name].key for name in names)


def test_a_key_that_is_revoked_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    for name in ("a", "b", "a.b"):
        new_key(tmp_path / "keys", name, "trainer", {})
    file = tmp_path / "keys" / "allowed.yaml"
    file.write_text(file.read_text() + "# by hand\n")
    before = read_allowed(tmp_path / "keys")
    assert in_process("keys", "revoke", tmp_path / "keys", "a").returncode == 0
    assert read_allowed(tmp_path / "keys") == {name: before[name] for name in ("b", "a.b")}
    assert "# by hand" in file.read_text()
    again = in_process("keys", "revoke", tmp_path / "keys", "a")
    assert again.returncode == 2
    assert "expected one of: b, a.b" in again.stderr


@pytest.mark.parametrize("words", [("list",), ("list", "--json"), ("revoke", "a")])
def test_a_folder_that_has_no_keys_is_not_one_that_lets_nobody_in(words: tuple[str, ...], tmp_path: Path) -> None:
    refused = in_process("keys", words[0], tmp_path / "kyes", *words[1:])
    assert refused.returncode == 2
    assert "kyes has no allowed.yaml. Pass a folder that" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("x", "--role", "tester"), "expected one of: producer, trainer, relay"),
        (("broker", "--role", "trainer"), "got name 'broker'"),
        (("../x", "--role", "trainer"), "got name '../x'"),
        (("yes", "--role", "trainer"), "got name 'yes'"),
        (
            ("x", "--role", "trainer", "--stream", "a"),
            "got streams for a trainer, expected no streams, which only a producer can have",
        ),
        (
            ("x", "--role", "producer", "--rank", "dp=1"),
            "got ranks for a producer, expected no ranks, which only a trainer or relay can have",
        ),
        (
            ("x", "--role", "trainer", "--host", "gpu0"),
            "got hosts for a trainer, expected no hosts, which only a relay can have",
        ),
        (("x", "--role", "trainer", "--rank", "dp3"), "--rank is 'dp3'. Pass an axis and a rank"),
        (("x", "--role", "trainer", "--rank", "ep=3"), "got 'ep', expected some of dp, cp, tp, pp"),
        (("there", "--role", "trainer"), "'there' already has a key"),
    ],
)
def test_a_key_that_cannot_be_is_not_made(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    new_key(tmp_path, "there", "trainer", {})
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    refused = in_process("keys", "new", tmp_path, *arguments)
    assert refused.returncode == 2
    assert expected in refused.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def watched(folder: Path) -> Allowed:
    return Allowed(folder, lambda: None)


def looked_after_by_us(folder: Path) -> Allowed:
    """Its thread has ended."""
    minding = watched(folder)
    minding.close()
    return minding


def test_a_broker_sees_who_may_come_while_it_runs(tmp_path: Path) -> None:
    new_key(tmp_path, "a", "trainer", {})
    a = load_key(tmp_path / "a.key").public
    minding = watched(tmp_path)
    try:
        assert minding.admits(a, "here")
        assert minding.rights(a.encode() + b"\0\1\2\3\4") == Rights("a", "trainer")
        new_key(tmp_path, "b", "producer", {"streams": ["web"]})
        b = load_key(tmp_path / "b.key").public
        until(lambda: minding.admits(b, "here"))
        assert not minding.take_changed_keys()
        authorization.revoke(tmp_path, "a")
        until(lambda: not minding.admits(a, "here"))
        assert minding.rights(a.encode() + b"\0\1\2\3\4") is NO_RIGHTS
        assert minding.take_changed_keys() == [a.encode()]
    finally:
        minding.close()


@pytest.mark.parametrize(
    "damage",
    [
        "", "half: {key: ", "a: {role: trainer}", "a: {key: 00, role: trainer}", "- a", "1: 2", None, "mode",
        f"a: {{key: {BOB_PUBLIC}, role: trainer, feeds: []}}", f"a: {{key: {BOB_PUBLIC}, role: producer, streams: []}}",
    ],
)  # fmt: skip
def test_a_list_that_cannot_be_read_changes_nothing(
    tmp_path: Path, damage: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    new_key(tmp_path, "a", "trainer", {})
    minding = looked_after_by_us(tmp_path)
    file = tmp_path / "allowed.yaml"
    if damage is None:
        file.unlink()
    elif damage == "mode":
        file.chmod(0o666)
    else:
        file.write_text(damage)
    minding.reload_if_changed()
    minding.reload_if_changed()
    assert "The previously allowed keys stay allowed" in caplog.text
    assert minding.admits(load_key(tmp_path / "a.key").public, "here")
    assert not minding.take_changed_keys()


def test_a_list_that_is_being_written_shuts_nobody_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        new_key(tmp_path, name, "trainer", {})
    file, whole = tmp_path / "allowed.yaml", (tmp_path / "allowed.yaml").read_text()
    minding = looked_after_by_us(tmp_path)
    for end in range(len(whole)):
        file.write_text(whole[:end])
        minding.reload_if_changed()
        assert minding.num_keys == 2
    file.write_text(whole[: whole.index("b:")])
    minding.reload_if_changed()
    minding.reload_if_changed()
    assert minding.num_keys == 1


def test_a_key_is_revoked_although_connections_take_every_descriptor(tmp_path: Path) -> None:
    """The list was not read, and not tried again."""
    new_key(tmp_path, "gone", "trainer", {})
    minding = looked_after_by_us(tmp_path)
    authorization.revoke(tmp_path, "gone")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 8, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        minding.reload_if_changed()
        minding.reload_if_changed()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert minding.num_keys == 0


def test_a_list_that_could_not_be_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file did not change, but the reason that it could not be read has passed. The log has one line of it."""
    new_key(tmp_path, "gone", "trainer", {})
    minding = looked_after_by_us(tmp_path)
    authorization.revoke(tmp_path, "gone")
    with monkeypatch.context() as patch:
        patch.setattr(secret_files, "_exposed", lambda *_: "cannot be checked now")
        for _ in range(4):
            minding.reload_if_changed()
        assert minding.num_keys == 1
    assert caplog.text.count("cannot reload the allowed keys") == 1
    minding.reload_if_changed()
    assert minding.num_keys == 0


@pytest.mark.parametrize("key", ["none", "a peer's"])
def test_a_folder_without_a_brokers_key_is_refused(tmp_path: Path, key: str) -> None:
    new_key(tmp_path, "a", "trainer", {})
    (tmp_path / "broker.key").unlink()
    if key != "none":
        (tmp_path / "a.key").rename(tmp_path / "broker.key")
    with pytest.raises(UserError, match=r"has no broker.key. Create|is the key of a peer. Replace this file"):
        watched(tmp_path)


def test_a_secret_is_never_written_over(tmp_path: Path) -> None:
    write_secret(tmp_path / "s", "first")
    with pytest.raises(UserError, match="got an existing file"):
        write_secret(tmp_path / "s", "second")
    assert (tmp_path / "s").read_text() == "first"


HERE = {"producers": "tcp://127.0.0.1:7401", "trainers": "tcp://[::1]:7402"}
THERE = {"producers": "tcp://127.0.0.1:7401", "trainers": "tcp://0.0.0.0:7402"}


@pytest.mark.parametrize(
    ("endpoints", "http", "keys", "token", "said"),
    [
        (HERE, "127.0.0.1:7400", False, False, []),
        (HERE, "localhost:0", False, False, []),
        (HERE, "[::1]:0", False, False, []),
        (THERE, "127.0.0.1:7400", True, False, []),
        (THERE, "127.0.0.1:7400", False, True, ["the addresses for trainers can send or read samples"]),
        (HERE, "0.0.0.0:7400", True, False, ["anyone who can connect to 0.0.0.0:7400 can read the run's status"]),
        (HERE, "node0:7400", True, True, []),
        (THERE, "[::]:7400", False, False, ["set listen.keys", "set listen.token_file"]),
    ],
)
def test_a_broker_says_what_others_could_do(
    endpoints: dict[str, str], http: str, keys: bool, token: bool, said: list[str]
) -> None:
    found = exposed(endpoints, http, keys, token)
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True))


@pytest.mark.parametrize(("mode", "said"), [(0o700, False), (0o755, False), (0o1777, False), (0o777, True)])
def test_a_folder_where_others_could_put_a_socket_is_said(tmp_path: Path, mode: int, said: bool) -> None:
    tmp_path.chmod(mode)
    found = exposed({"producers": f"ipc://{tmp_path}/socket"}, "127.0.0.1:1", False, False)
    assert [f"the folder of ipc://{tmp_path}/socket" in line for line in found] == [True] * said


def test_a_folder_that_somebody_else_owns_serves_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat(tmp_path)
    found: list[Any] = list(real)
    found[stat.ST_UID] = 4242
    monkeypatch.setattr(Path, "stat", lambda *_, **__: os.stat_result(found))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="got a folder of user 4242, who could replace the socket"):
        ipc_files.lock(f"ipc://{tmp_path}/socket")


def test_the_lock_of_an_address_is_its_users_alone_and_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "linked.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot listen on"):
        ipc_files.lock(f"ipc://{tmp_path}/linked")
    assert (tmp_path / "precious").read_text() == "kept"
    with ipc_files.lock(f"ipc://{tmp_path}/socket"):
        assert stat.S_IMODE((tmp_path / "socket.lock").stat().st_mode) == 0o600


def test_a_broker_that_is_gone_says_nothing_and_leaves_no_socket_open(tmp_path: Path) -> None:
    """One that is left open is a ResourceWarning, and so a failure."""
    assert curve._mechanism(f"ipc://{tmp_path}/gone") == ""
    assert curve._mechanism("tcp://127.0.0.1:1") == ""


def test_a_key_whose_connections_are_cut_again_and_again_is_not_let_in_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(allowed_keys, "time", SimpleNamespace(monotonic=lambda: clock.now))
    for name in ("attacker", "honest"):
        new_key(tmp_path / "keys", name, "trainer", {})
    keys = [load_key(tmp_path / "keys" / f"{name}.key").public for name in ("attacker", "honest")]
    door = Allowed(tmp_path / "keys", lambda: None)
    try:
        for cuts in range(1, allowed_keys.CUTS + 1):
            assert door.admits(keys[0], "10.0.0.1")
            door.note_cut(keys[0].encode() + b"peer%d" % cuts, "of a flood")
        assert [door.admits(key, "10.0.0.1") for key in keys] == [False, True]
        assert "blocked key 'attacker' for 60 s" in caplog.text
        assert door.refused == 1
        clock.now += allowed_keys.SHUT_OUT_S
        assert door.admits(keys[0], "10.0.0.1")
    finally:
        door.close()
