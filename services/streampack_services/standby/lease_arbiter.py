"""The arbiter of a Kubernetes cluster: a Lease object, which keeps the newest entry.

The API server changes an object only if the caller names its newest ``resourceVersion``, and creates each name once. So
an entry of a number can be written once, as in a folder. Older entries are gone, and nobody asks for them.

The process is a Pod, whose service account may create Leases, and read and change this one. The entry is JSON in an
annotation. ``holderIdentity`` and ``leaseTransitions`` show its active broker and its number to people.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from streampack.core.standby.arbiter_entries import Entry
from streampack.errors import ConfigError, UserError
from streampack_services.standby.arbiter import ArbiterUnreachable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Files of the Pod's service account: ``token``, ``ca.crt``, ``namespace``."""
ENTRY, PROBE = "streampack/entry", "streampack/probe"
TIMEOUT_S = 5.0
MOST_BYTES = 1 << 20
"""Most bytes of an answer."""
_TRIES = 8
_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_WHERE = re.compile(rf"kubernetes://(?P<namespace>{_NAME})?/(?P<name>{_NAME})")


class LeaseArbiter:
    """The entries of one run in a Lease.

    Args:
        where: ``kubernetes://NAMESPACE/NAME``; without the namespace, it is that of the Pod.
        server: Host and port of the API server. Default: as KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT say.
        account: Folder with the files of the service account.
        timeout_s: Seconds after which the API server counts as unreachable.

    Raises:
        ConfigError: ``where`` is not of this form.
        UserError: The process does not run in a Pod with a service account.
    """

    def __init__(
        self, where: str, *, server: tuple[str, int] | None = None, account: Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        match = _WHERE.fullmatch(where)
        if match is None:
            raise ConfigError(
                f"standby.arbiter: got {where}, expected kubernetes://NAMESPACE/NAME with the name of a Lease, or "
                f"kubernetes:///NAME for the Pod's own namespace"
            )
        self.where = where
        self._account, self._timeout_s = account or ACCOUNT, timeout_s
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            if server is None:
                if not host:
                    raise FileNotFoundError(2, "KUBERNETES_SERVICE_HOST is not set")
                server = (host, int(port))
            namespace = match["namespace"] or (self._account / "namespace").read_text().strip()
            self._context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise UserError(
                f"standby.arbiter: {where} cannot be used: {reason}. Run the broker in a Pod with "
                f"`automountServiceAccountToken: true`"
            ) from None
        self._server = server
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = match["name"]
        self._lease = f"{self._leases}/{self._name}"

    def newest(self) -> Entry | None:
        """Return the newest entry; None if there is none. Raises ArbiterUnreachable, UserError."""
        lease = self._get()
        return None if lease is None else self._entry(lease)

    def create(self, entry: Entry) -> Entry:
        """Write an entry unless one of its number, or a newer one, exists; return the newest entry.

        Raises ArbiterUnreachable, UserError.
        """
        for _ in range(_TRIES):
            lease = self._get()
            newest = None if lease is None else self._entry(lease)
            number = 0 if newest is None else newest.number
            if newest is not None and number >= entry.number:
                return newest
            if number + 1 != entry.number:
                raise UserError(
                    f"standby.arbiter: the newest entry of {self.where} is {number}, expected {entry.number - 1}. "
                    f"Someone has deleted or restored the Lease. Stop both brokers before you start the run again"
                )
            written = _empty(self._name) if lease is None else lease
            written["metadata"].setdefault("annotations", {})[ENTRY] = msgspec.json.encode(entry).decode()
            written["spec"] = {"holderIdentity": entry.active, "leaseTransitions": min(number + 1, 2**31 - 1)}
            if self._put(written):
                return entry
        raise ArbiterUnreachable(f"{self.where}: others changed the Lease at each of {_TRIES} tries")

    def probe(self) -> None:
        """Prove that the API server rejects a second Lease of this name, and a change of an old one. Raises UserError.

        It uses the Lease itself, because the service account may change no other.
        """
        try:
            for _ in range(_TRIES):
                lease = self._get()
                if lease is None:
                    self._put(_empty(self._name))
                    continue
                self._entry(lease)
                lease["metadata"].setdefault("annotations", {})[PROBE] = uuid.uuid4().hex
                if not self._put(lease):
                    continue  # another broker's probe came first
                second = dict(lease["metadata"], annotations=lease["metadata"]["annotations"] | {PROBE: "second"})
                if not self._put(lease | {"metadata": second}) and not self._put(_empty(self._name)):
                    return
                raise UserError(
                    f"standby.arbiter: {self.where} let the same version be changed twice, so it could give the run "
                    f"two active brokers. Use the API server of the cluster"
                )
            raise ArbiterUnreachable(f"{self.where}: others changed the Lease at each of {_TRIES} tries")
        except ArbiterUnreachable as error:
            raise UserError(
                f"standby.arbiter: {error}. The Pod's service account must be allowed to create Leases, and to get and "
                f"update this one; see rbac.yaml of `streampack export k8s`"
            ) from None

    def _get(self) -> dict[str, Any] | None:
        """Return the Lease; None if there is none. Raises ArbiterUnreachable."""
        status, content = self._ask("GET", self._lease)
        if status == 404:
            return None
        if status != 200 or not isinstance(content.get("metadata"), dict):
            raise self._refused("GET", status, content)
        return content

    def _put(self, lease: dict[str, Any]) -> bool:
        """Write the Lease; return False if it has changed, or exists already. Raises ArbiterUnreachable."""
        new = "resourceVersion" not in lease["metadata"]
        method = "POST" if new else "PUT"
        status, content = self._ask(method, self._leases if new else self._lease, lease)
        if status not in (200, 201, 409) and (new or status != 404):
            raise self._refused(method, status, content)
        return status in (200, 201)

    def _entry(self, lease: dict[str, Any]) -> Entry | None:
        """Return the entry of a Lease; None if there is neither entry nor holder.

        Raises UserError for an entry that cannot be decoded.
        """
        text = (lease["metadata"].get("annotations") or {}).get(ENTRY)
        if text is None and not (lease.get("spec") or {}).get("holderIdentity"):
            return None
        try:
            return msgspec.json.decode(text or "", type=Entry)
        except (msgspec.DecodeError, msgspec.ValidationError, TypeError) as error:
            raise UserError(
                f"standby.arbiter: the entry in {self.where} cannot be read: {error}. Each run needs a Lease of its own"
            ) from None

    def _refused(self, method: str, status: int, content: dict[str, Any]) -> ArbiterUnreachable:
        """Return the error for an answer that is not expected."""
        return ArbiterUnreachable(
            f"{self.where}: the API server answers {status} to {method}: {content.get('message', '')}"
        )

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Return status and content of the API server's answer. Raises ArbiterUnreachable."""
        host, port = self._server
        connection = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._context)
        try:
            token = (self._account / "token").read_text().strip()  # the kubelet renews it
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
            if body is not None:
                headers["Content-Type"] = "application/json"
            content = None if body is None else json.dumps(body)
            connection.request(method, urlsplit(path).path, content, headers)
            answer = connection.getresponse()
            raw = answer.read(MOST_BYTES)
            tree = json.loads(raw) if raw else {}
            return answer.status, tree if isinstance(tree, dict) else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            raise ArbiterUnreachable(f"{self.where}: {method} at {host}:{port} failed: {reason}") from None
        finally:
            connection.close()


def _empty(name: str) -> dict[str, Any]:
    """Return a Lease without an entry."""
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": {}}
