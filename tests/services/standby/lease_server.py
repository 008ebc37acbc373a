"""The part of Kubernetes' API server that keeps Leases, as a real HTTPS server on loopback.

Objects have a ``resourceVersion``, which each change raises. A POST of a name that exists gets 409, as a PUT of an old
version does. Faults can be asked for: errors, silence, a lost answer, a server that keeps no versions.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.integration.programs import program

PREFIX = "/apis/coordination.k8s.io/v1/namespaces/"
TOKEN = "a-token"


class LeaseServer:
    """The server's objects and its faults.

    Attributes:
        status: Answer every request with this status, unless it is 0.
        lost_answers: Requests from now on that are carried out, but not answered.
        silent: Answer nothing.
        versions: False: accept changes of old versions, too.
        asked: Methods of all requests.
    """

    def __init__(self, port: int, account: Path) -> None:
        self.port, self.account = port, account
        self.leases: dict[str, dict[str, Any]] = {}
        self.status = self.lost_answers = 0
        self.silent, self.versions = False, True
        self.asked: list[str] = []
        self._version = 41
        self._lock = threading.Lock()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def answer(self, method: str, path: str, token: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The status and the object that answer a request."""
        with self._lock:
            self.asked.append(method)
            if self.status:
                return self.status, _failure(self.status, "as asked for")
            if token != f"Bearer {TOKEN}":
                return 401, _failure(401, "Unauthorized")
            namespace, _, rest = path.removeprefix(PREFIX).partition("/")
            name = rest.removeprefix("leases").lstrip("/") or body["metadata"]["name"]
            key = f"{namespace}/{name}"
            there = self.leases.get(key)
            if method == "POST":
                return self._keep(key, body, 201) if there is None else (409, _failure(409, f"{key} exists"))
            if there is None:
                return 404, _failure(404, f"{key} not found")
            if method == "PUT":
                same = body["metadata"].get("resourceVersion") == there["metadata"]["resourceVersion"]
                return self._keep(key, body, 200) if same or not self.versions else (409, _failure(409, "has changed"))
            return 200, there

    def _keep(self, key: str, body: dict[str, Any], status: int) -> tuple[int, dict[str, Any]]:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self.leases[key] = body
        return status, body


def _failure(status: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "message": message, "code": status}


@contextmanager
def lease_server(folder: Path, host: str = "127.0.0.1", port: int = 0) -> Iterator[LeaseServer]:
    """A server, and the files of a service account of the namespace ``training``, in ``folder``."""
    account = folder / "serviceaccount"
    account.mkdir(parents=True)
    certificate, key = account / "ca.crt", folder / "server.key"
    subprocess.run(
        [program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kubernetes",
         "-addext", f"subjectAltName=IP:{host}", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    (account / "token").write_text(f"{TOKEN}\n")
    (account / "namespace").write_text("training")

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else {}
            while kept.silent:
                time.sleep(0.05)
            status, tree = kept.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            if kept.lost_answers:
                kept.lost_answers -= 1
                self.close_connection = True
                return
            content = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = do

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that has gone is no error here."""

    server = Server((host, port), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    kept = LeaseServer(server.server_address[1], account)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        kept.silent = False
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with lease_server(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])):
        threading.Event().wait()
