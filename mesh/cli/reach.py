"""How `shoal chat` gets to a gateway, and what to tell the user where it does not."""

import os
import socket
import ssl
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from mesh.cli.problem import Problem

if TYPE_CHECKING:
    from shoal import ClientTls

ANSWER_S = 1.0
# Where somebody listens it is worth waiting for what they speak, on a busy machine too.
LISTENER_S = 3.0


def gateway(given: str | None, ca: str | None) -> tuple[str, "ClientTls | None"]:
    """Address and trust: what was given, else the local mesh's. Raises Problem if no mesh is running."""
    from mesh.cli import state
    from shoal import ClientTls

    if given is not None:
        _check_port(given)
        address, folder = given.partition("://")[2] or given, os.environ.get("SHOAL_TLS_DIR", "")
        secure = given.startswith("https://")
    elif (mesh := state.running()) is not None:
        address, folder, secure = mesh.grpc_address, mesh.tls_dir, False
    else:
        raise Problem("no mesh is running", "start one with `shoal up`, or name a gateway with --grpc HOST:PORT")
    if ca:
        return address.rstrip("/"), ClientTls(ca=ca)
    if folder:
        return address.rstrip("/"), of_folder(Path(folder))
    return address.rstrip("/"), ClientTls() if secure else None


def _check_port(given: str) -> None:
    """Raise Problem for an address that names no port: gRPC would try one of its own."""
    host, _, port = (given.partition("://")[2] or given).rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise Problem(
            f"--grpc {given}: the port is missing", "write HOST:PORT, as `shoal status` shows it, or leave --grpc out"
        )


def of_folder(folder: Path) -> "ClientTls":
    """Trust the folder's CA, and be the operator where the folder can prove it."""
    from mesh.tls import OPERATOR, Paths
    from shoal import ClientTls

    paths = Paths.of(folder, OPERATOR)
    if paths.key.exists():
        return ClientTls(ca=paths.ca, certificate=paths.certificate, key=paths.key)
    return ClientTls(ca=paths.ca)


def answers(address: str, tls: "ClientTls | None", timeout_s: float = ANSWER_S) -> bool:
    """Whether a gRPC server is there: then what failed is what it said, not the way to it."""
    import grpc

    if tls is None:
        channel = grpc.insecure_channel(address)
    else:
        channel = grpc.secure_channel(address, tls.credentials(), options=tls.options())
    with channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            return False
    return True


def why_not(address: str, tls: "ClientTls | None", message: str) -> Problem:
    """What to tell of an address where no gRPC server answers us."""
    nobody = Problem(f"no gateway answers at {address}: {message}", "start a mesh with `shoal up`")
    if not _somebody_listens(address):
        return nobody
    if speaks_http(address) or speaks_tls(address, "http/1.1"):
        return Problem(
            f"{address} is an HTTP port, and chat speaks gRPC",
            "name the gateway's gRPC address with --grpc HOST:PORT (`shoal status` shows it), or leave --grpc out",
        )
    secure = speaks_tls(address)
    if tls is None and secure:
        return Problem(f"{address} speaks TLS", "name its CA with --ca FILE, or SHOAL_TLS_DIR=FOLDER")
    if tls is not None and secure:
        return Problem(
            f"{address} and we do not trust each other: {message}",
            f"did {tls.ca or 'a public CA'} sign its certificate, for this host? Does it ask for ours (SHOAL_TLS_DIR)?",
        )
    if tls is not None and answers(address, None, LISTENER_S):
        return Problem(f"{address} speaks no TLS", "leave out --ca, https:// and SHOAL_TLS_DIR")
    return nobody


def _somebody_listens(address: str) -> bool:
    try:
        with _connection(address):
            return True
    except (OSError, ValueError):
        return False


def _connection(address: str) -> socket.socket:
    """Raises OSError or ValueError."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=LISTENER_S)


def speaks_http(address: str) -> bool:
    """Whether plain HTTP is spoken there."""
    import http.client

    try:
        with closing(http.client.HTTPConnection(address, timeout=LISTENER_S)) as connection:
            connection.request("GET", "/")
            connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    return True


def speaks_tls(address: str, protocol: str = "h2") -> bool:
    """Whether `protocol` is spoken there inside TLS, by whomever."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([protocol])
    try:
        with _connection(address) as connection, context.wrap_socket(connection) as secured:
            return secured.selected_alpn_protocol() == protocol
    except (OSError, ValueError):
        return False
