"""A container's health check: `python -m mesh.probe HOST:PORT [--live] [--service NAME]`.

Exit code 0 if grpc.health.v1 says SERVING there, else 1 and one line that says why. It is started every few seconds in
each container, so it imports little: no settings, no server.
"""

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# A name that grpc.health.v1 calls SERVING as long as the process answers at all: liveness, apart from readiness.
LIVENESS = "live"
TIMEOUT_S = 2.0


def check(address: str, service: str, timeout_s: float) -> str:
    """Why `service` at `address` is not SERVING; empty if it is. Asks once, within `timeout_s`."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "" if serving else str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(arguments: list[str]) -> int:
    """The process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m mesh.probe", description="Ask a Shoal service how it does.")
    parser.add_argument("address", metavar="HOST:PORT", help="where its gRPC server listens")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--live", action="store_true", help="whether the process answers, not whether it can work")
    asked.add_argument("--service", default="", metavar="NAME", help="one service instead of the whole server")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help="seconds (default: %(default)g)")
    given = parser.parse_args(arguments)
    problem = check(given.address, LIVENESS if given.live else given.service, given.timeout)
    if problem:
        print(f"{given.address}: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
