"""Arbiters: of many writers of one entry one wins, nothing half written is read, and each failure says what it is."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streampack_services.standby.arbiter import Arbiter, ArbiterUnreachable
from streampack_services.standby.file_arbiter import FileArbiter, Folder, ObjectStore
from streampack_services.standby.lease_arbiter import ENTRY, LeaseArbiter
from streampack_services.standby.open_arbiter import open_arbiter

from streampack.core.standby.arbiter_entries import Entry
from streampack.errors import ConfigError, UserError
from tests.services.standby import racing
from tests.services.standby.lease_server import LeaseServer, lease_server

KINDS = ("folder", "store", "lease")


def entry(number: int, active: str = "a", **fields: Any) -> Entry:
    return Entry(number=number, epoch=number, active=active, process=f"{active}-1", log_id="log", members=(active,),
                 **fields)  # fmt: skip


class Forgetful(MemoryFileSystem):
    """A store that knows no conditional write: the last one counts."""

    protocol = "forgetful"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        super().pipe_file(path, value, mode="overwrite")


fsspec.register_implementation("forgetful", Forgetful, clobber=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeaseServer]:
    with lease_server(tmp_path_factory.mktemp("kubernetes")) as found:
        yield found


@pytest.fixture
def cluster(server: LeaseServer) -> LeaseServer:
    server.leases.clear()
    server.asked.clear()
    server.status, server.lost_answers, server.silent, server.versions = 0, 0, False, True
    return server


def lease(cluster: LeaseServer, timeout_s: float = 5.0, where: str = "kubernetes:///my-run") -> LeaseArbiter:
    return LeaseArbiter(where, server=cluster.address, account=cluster.account, timeout_s=timeout_s)


@pytest.fixture
def fresh(tmp_path: Path, cluster: LeaseServer) -> Callable[[str], Arbiter]:
    """Opens the arbiter of a kind again, as another process would."""
    url = f"memory://{tmp_path}"

    def opened(kind: str) -> Arbiter:
        if kind == "lease":
            return lease(cluster)
        if kind == "store":
            return FileArbiter(ObjectStore(url), url)
        return FileArbiter(Folder(tmp_path / "arbiter"), "arbiter")

    return opened


# All kinds


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_is_written_once_and_the_newest_is_read(kind: str, fresh: Callable[[str], Arbiter]) -> None:
    arbiter = fresh(kind)
    arbiter.probe()
    assert arbiter.newest() is None
    assert arbiter.create(entry(1)) == entry(1)
    assert fresh(kind).create(entry(1, "b")) == entry(1)
    assert fresh(kind).create(entry(1)) == entry(1), "a writer whose answer was lost asks again"
    for number in range(2, 12):
        assert fresh(kind).create(entry(number, "b", alone=True)) == entry(number, "b", alone=True)
    arbiter.probe()
    assert arbiter.newest() == entry(11, "b", alone=True)


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_one_of_many_writers_of_one_entry_wins(kind: str, fresh: Callable[[str], Arbiter]) -> None:
    names = [f"host{number}" for number in range(12)]
    arbiters = {name: fresh(kind) for name in names}
    ready = threading.Barrier(len(names))

    def write(name: str, number: int) -> Entry:
        ready.wait()
        return arbiters[name].create(entry(number, name))

    with ThreadPoolExecutor(len(names)) as pool:
        for number in range(1, 6):
            found = list(pool.map(write, names, [number] * len(names)))
            assert len(set(found)) == 1, "each of them learns who has won"
            assert fresh(kind).newest() == found[0]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.booleans()), max_size=12))
def test_the_newest_entry_is_the_one_that_won_whatever_two_hosts_do(
    kind: str, moves: list[tuple[str, int, bool]], fresh: Callable[[str], Arbiter], cluster: LeaseServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Against a list: an entry of a number that is taken loses, the next one wins."""
    folder = tmp_path_factory.mktemp("moves")
    cluster.leases.clear()
    url = f"memory://{folder}"
    arbiter: Arbiter = lease(cluster)
    if kind != "lease":
        arbiter = FileArbiter(Folder(folder) if kind == "folder" else ObjectStore(url), url)
    written: list[Entry] = []
    for name, ahead, alone in moves:
        number = len(written) + ahead
        if number < 1:
            continue
        wanted = entry(number, name, alone=alone)
        if ahead:
            written.append(wanted)
        assert arbiter.create(wanted) == written[-1]
        assert arbiter.newest() == written[-1]


# Folders and object stores


def test_exactly_one_of_many_processes_wins(tmp_path: Path) -> None:
    words = [sys.executable, "-m", racing.__name__, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([*words, name, "40"], **pipes) for name in "abc"]
    won = [number for racer in racers for number in racer.communicate("go\n", timeout=100)[0].split()]
    assert sorted(map(int, won)) == list(range(1, 41))


def test_an_entry_that_is_half_written_is_never_seen(tmp_path: Path) -> None:
    arbiter = FileArbiter(Folder(tmp_path), "here")
    arbiter.create(entry(1))
    (tmp_path / ".0000000002.json.f00").write_text('{"number": 2, "ep')  # a writer was killed here
    (tmp_path / "0000000002.json.tmp").write_text("")
    assert arbiter.newest() == entry(1)
    assert arbiter.create(entry(2, "b")) == entry(2, "b")


def test_readers_see_whole_entries_while_others_write(tmp_path: Path) -> None:
    arbiter = FileArbiter(Folder(tmp_path), "here")
    over = threading.Event()

    def write() -> None:
        for number in range(1, 60):
            arbiter.create(entry(number, address="x" * 1900))
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = [0]
    while not over.is_set():
        newest = arbiter.newest()
        if newest is not None:
            assert newest.number >= seen[-1]
            seen.append(newest.number)
    writer.join()
    assert len(set(seen)) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_that_cannot_be_read_is_an_error_with_its_place(
    kind: str, fresh: Callable[[str], Arbiter], tmp_path: Path, cluster: LeaseServer
) -> None:
    arbiter = fresh(kind)
    arbiter.create(entry(1))
    if kind == "folder":
        (tmp_path / "arbiter" / "0000000002.json").write_text("{}")
    elif kind == "store":
        fsspec.filesystem("memory").pipe_file(f"{tmp_path}/0000000002.json", b"{}")
    else:
        cluster.leases["training/my-run"]["metadata"]["annotations"][ENTRY] = "{}"
    with pytest.raises(UserError, match=r"standby\.arbiter: .*entry .*cannot be read: .*number.* Each run needs a "):
        arbiter.newest()


def test_a_store_that_overwrites_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="let the same name be written twice, so it could give the run two active"):
        open_arbiter(f"forgetful://{tmp_path}")
    open_arbiter(f"memory://{tmp_path}")


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for where in (str(tmp_path / "file" / "x"), f"file://{tmp_path}/file"):
        with pytest.raises(UserError, match=r"standby\.arbiter: .* cannot be used: .* Choose a folder that both"):
            open_arbiter(where)
    with pytest.raises(ConfigError, match=r"standby\.arbiter: nothing://x cannot be opened"):
        open_arbiter("nothing://x")


def test_a_folder_that_has_gone_is_unreachable(tmp_path: Path) -> None:
    arbiter = FileArbiter(Folder(tmp_path / "x"), "the folder")
    (tmp_path / "x").rmdir()
    for ask in (arbiter.newest, lambda: arbiter.create(entry(1))):
        with pytest.raises(ArbiterUnreachable, match="the folder: No such file"):
            ask()


def test_a_stores_own_errors_make_it_unreachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"
    arbiter = FileArbiter(ObjectStore(url), url)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(MemoryFileSystem, "ls", fails)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fails)
    for ask in (arbiter.newest, lambda: arbiter.create(entry(1))):
        with pytest.raises(ArbiterUnreachable, match="RuntimeError: no credentials"):
            ask()
    with pytest.raises(UserError, match="cannot be used: RuntimeError: no credentials"):
        arbiter.probe()


# Leases


def test_a_lease_shows_people_who_is_active(cluster: LeaseServer) -> None:
    arbiter = lease(cluster)
    for number, name in ((1, "a"), (2, "b")):
        arbiter.create(entry(number, name))
    (kept,) = cluster.leases.values()
    assert kept["kind"] == "Lease"
    assert kept["spec"] == {"holderIdentity": "b", "leaseTransitions": 2}
    assert msgspec.json.decode(kept["metadata"]["annotations"][ENTRY], type=Entry) == entry(2, "b")
    assert list(cluster.leases) == ["training/my-run"], "in the Pod's own namespace"
    lease(cluster, where="kubernetes://other/x").create(entry(1))
    assert list(cluster.leases) == ["training/my-run", "other/x"]


def test_fields_that_others_wrote_into_the_lease_stay(cluster: LeaseServer) -> None:
    arbiter = lease(cluster)
    arbiter.probe()
    cluster.leases["training/my-run"]["metadata"]["labels"] = {"team": "x"}
    arbiter.create(entry(1))
    arbiter.probe()
    assert cluster.leases["training/my-run"]["metadata"]["labels"] == {"team": "x"}
    assert arbiter.newest() == entry(1)


def test_an_entry_whose_answer_was_lost_is_found_when_it_is_asked_for_again(cluster: LeaseServer) -> None:
    arbiter = lease(cluster)
    arbiter.create(entry(1))
    arbiter._get()
    cluster.answer, whole = _losing_puts(cluster), cluster.answer  # type: ignore[method-assign]
    with pytest.raises(ArbiterUnreachable, match=r"PUT at 127\.0\.0\.1:\d+ failed"):
        arbiter.create(entry(2))
    cluster.answer = whole  # type: ignore[method-assign]
    assert arbiter.create(entry(2, "b")) == entry(2), "it was written"
    assert arbiter.create(entry(2)) == entry(2)


def _losing_puts(cluster: LeaseServer) -> Callable[..., Any]:
    carry_out = cluster.answer

    def answer(method: str, *rest: Any) -> Any:
        cluster.lost_answers += method == "PUT"
        return carry_out(method, *rest)

    return answer


def test_a_late_entry_learns_of_a_newer_one(cluster: LeaseServer) -> None:
    """The Lease keeps the newest alone: whoever asks for an older one is told who is active now."""
    arbiter = lease(cluster)
    for number in (1, 2, 3):
        arbiter.create(entry(number))
    assert arbiter.create(entry(2, "b")) == entry(3)


def test_a_lease_that_went_back_takes_no_entry(cluster: LeaseServer) -> None:
    arbiter = lease(cluster)
    for number in (1, 2, 3):
        arbiter.create(entry(number))
    cluster.leases.clear()
    with pytest.raises(UserError, match=r"is 0, expected 3\. Someone has deleted or restored the Lease"):
        arbiter.create(entry(4))
    assert cluster.leases == {}


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_a_server_that_refuses_is_unreachable(cluster: LeaseServer, status: int) -> None:
    arbiter = lease(cluster)
    cluster.status = status
    for ask in (arbiter.newest, lambda: arbiter.create(entry(1))):
        with pytest.raises(ArbiterUnreachable, match=f"the API server answers {status} to GET: as asked for"):
            ask()
    with pytest.raises(UserError, match=r"must be allowed to create Leases.* rbac.yaml"):
        arbiter.probe()


def test_a_silent_server_is_unreachable_in_time(cluster: LeaseServer) -> None:
    arbiter = lease(cluster, timeout_s=0.3)
    cluster.silent = True
    begin = time.monotonic()
    with pytest.raises(ArbiterUnreachable, match="timed out"):
        arbiter.newest()
    assert time.monotonic() - begin < 3.0
    cluster.silent = False


def test_a_server_that_is_gone_or_another_one_is_unreachable(cluster: LeaseServer, tmp_path: Path) -> None:
    with pytest.raises(ArbiterUnreachable, match="Connection refused"):
        LeaseArbiter("kubernetes:///x", server=("127.0.0.1", 1), account=cluster.account).newest()
    with lease_server(tmp_path) as other, pytest.raises(ArbiterUnreachable, match=r"[Cc]ertificate"):
        LeaseArbiter("kubernetes:///x", server=other.address, account=cluster.account).newest()


def test_a_renewed_token_is_read_again(cluster: LeaseServer) -> None:
    arbiter, token = lease(cluster), cluster.account / "token"
    kept = token.read_text()
    try:
        token.write_text("old")
        with pytest.raises(ArbiterUnreachable, match="answers 401"):
            arbiter.newest()
    finally:
        token.write_text(kept)
    assert arbiter.newest() is None


def test_a_server_without_versions_is_refused(cluster: LeaseServer) -> None:
    cluster.versions = False
    with pytest.raises(UserError, match="let the same version be changed twice"):
        lease(cluster).probe()


def test_probes_of_many_at_once_succeed_and_change_no_entry(cluster: LeaseServer) -> None:
    lease(cluster).create(entry(1))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: lease(cluster).probe(), range(6)))
    assert lease(cluster).newest() == entry(1)


def test_a_lease_of_another_program_is_refused(cluster: LeaseServer) -> None:
    lease(cluster).probe()
    cluster.leases["training/my-run"]["spec"]["holderIdentity"] = "controller-0"
    with pytest.raises(UserError, match="Each run needs a Lease of its own"):
        lease(cluster).probe()


@pytest.mark.parametrize("where", ["kubernetes://", "kubernetes://x", "kubernetes://x/", "kubernetes://X/y",
                                   "kubernetes://x/y/z", "kubernetes:///a?b"])  # fmt: skip
def test_a_place_that_names_no_lease_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match="expected kubernetes://NAMESPACE/NAME"):
        open_arbiter(where)


def test_outside_a_pod_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cluster: LeaseServer) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UserError, match=r"KUBERNETES_SERVICE_HOST is not set\. Run the broker in a Pod with"):
        open_arbiter("kubernetes:///x")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(cluster.port))
    with pytest.raises(UserError, match=r"No such file or directory\. Run the broker in a Pod with"):
        LeaseArbiter("kubernetes:///x", account=tmp_path)
    assert LeaseArbiter("kubernetes:///x", account=cluster.account).newest() is None


def test_answers_that_are_no_objects_are_unreachable(cluster: LeaseServer) -> None:
    arbiter = lease(cluster)
    arbiter.create(entry(1))
    cluster.leases["training/my-run"] = json.loads("[]")
    with pytest.raises(ArbiterUnreachable):
        arbiter.newest()
