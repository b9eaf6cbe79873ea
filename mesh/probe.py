"""A container's health check: `python -m mesh.probe HOST:PORT [--live] [--service NAME]`.

Exit code 0 if grpc.health.v1 says SERVING there, else 1 and one line that says why. It is started every few seconds in
each container, so it imports little: no settings, no server. With SHOAL_TLS_DIR it speaks TLS, as whichever identity
the folder holds, to whichever service of the mesh's CA it meets: health is open to all of them.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.tls import ADVICE, IDENTITIES, Paths, Tls, TlsError

# A name that grpc.health.v1 calls SERVING as long as the process answers at all: liveness, apart from readiness.
LIVENESS = "live"
TIMEOUT_S = 2.0


def check(address: str, service: str, timeout_s: float, tls_dir: str) -> str:
    """Why `service` at `address` is not SERVING; empty if it is. Asks once, within `timeout_s`."""
    try:
        with _channel(address, tls_dir, timeout_s) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    except (TlsError, OSError) as error:
        return str(error)
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "" if serving else str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(address: str, tls_dir: str, timeout_s: float) -> grpc.Channel:
    if not tls_dir:
        return grpc.insecure_channel(address)
    tls = _any_identity(Path(tls_dir))
    name = _name_of_peer(address, tls, timeout_s)
    return grpc.secure_channel(address, tls.channel_credentials(), options=[("grpc.ssl_target_name_override", name)])


def _any_identity(folder: Path) -> Tls:
    """One that the folder holds. Raises TlsError."""
    for identity in IDENTITIES:
        if Paths.of(folder, identity).key.exists():
            return Tls(folder, identity)
    raise TlsError(f"{folder}: holds no key of {', '.join(IDENTITIES)}; {ADVICE}")


def _name_of_peer(address: str, tls: Tls, timeout_s: float) -> str:
    """The name in the certificate that is shown there and that the CA signed. Raises OSError."""
    context = tls.http_client_context()
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection,
        context.wrap_socket(connection) as secured,
    ):
        names = (secured.getpeercert() or {}).get("subjectAltName", ())
    return next((str(name[1]) for name in names if name[0] == "DNS"), host)


def main(arguments: list[str]) -> int:
    """The process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m mesh.probe", description="Ask a Shoal service how it does.")
    parser.add_argument("address", metavar="HOST:PORT", help="where its gRPC server listens")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--live", action="store_true", help="whether the process answers, not whether it can work")
    asked.add_argument("--service", default="", metavar="NAME", help="one service instead of the whole server")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, metavar="S", help="(default: %(default)g)")
    given = parser.parse_args(arguments)
    if not given.address.rpartition(":")[2].isdigit():
        parser.error(f"{given.address}: is not HOST:PORT")
    service = LIVENESS if given.live else given.service
    problem = check(given.address, service, given.timeout_s, os.environ.get("SHOAL_TLS_DIR", ""))
    if problem:
        print(f"{given.address}: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
