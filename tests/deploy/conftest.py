"""The tests in compose/ build images and run containers for minutes: only `make compose-test` asks for them."""

import os

collect_ignore = [] if os.environ.get("COMPOSE_TEST") else ["compose"]
