"""What every Shoal service shares: settings, telemetry, server and client plumbing, errors, block keys.

Imports no service. Services import each other only through this package and the contract (`shoal`).
"""

import os

# Read when grpc is first imported, so it stands where every service passes before that. With these experiments of its
# core's, messages are handed through four threads more; without them, the thread that waits for events reads the
# sockets too. With grpcio 1.85 a streamed token costs a gateway 25 us in grpc.aio instead of 40, and a server 5 % less.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
