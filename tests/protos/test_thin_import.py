"""`import shoal` must need nothing but grpcio, protobuf and what those two bring."""

import subprocess
import sys

PROBE = """
import sys

ALLOWED = sys.stdlib_module_names | {"grpc", "google", "shoal", "typing_extensions"}

class OnlyThinDependencies:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED or name.startswith("google.rpc"):
            raise ModuleNotFoundError(f"the thin client wants {name}", name=name)
        return None

sys.meta_path.insert(0, OnlyThinDependencies())

import asyncio
import shoal

async def ask():
    async with shoal.Client("127.0.0.1:1", model="m") as client:
        try:
            await client.complete_chat("hi", temperature=0)
        except shoal.Unavailable as error:
            print("async", error.status.name)

asyncio.run(ask())
with shoal.SyncClient("127.0.0.1:1", model="m") as client:
    try:
        client.models()
    except shoal.Unavailable as error:
        print("sync", error.status.name)

from shoal.failure import failure_of
import grpc
packed = bytes.fromhex(sys.argv[1])
error = failure_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [("grpc-status-details-bin", packed)])
print(type(error).__name__, error.code, error.retry_after_s)

try:
    import pydantic
except ModuleNotFoundError as error:
    print("blocked", error.name)
"""


def test_the_client_and_its_errors_work_without_any_other_package():
    from mesh.errors import Overloaded, status_of

    packed = status_of(Overloaded("full", retry_after_s=1.5)).SerializeToString()
    ran = subprocess.run([sys.executable, "-c", PROBE, packed.hex()], capture_output=True, text=True, timeout=60)
    assert ran.stdout.split("\n") == [
        "async UNAVAILABLE",
        "sync UNAVAILABLE",
        "Overloaded no_room 1.5",
        "blocked pydantic",  # the blocker does block
        "",
    ], ran.stderr
