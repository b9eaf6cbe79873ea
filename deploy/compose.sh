#!/bin/sh
# `deploy/compose.sh ARGUMENTS`: docker compose (v2) or docker-compose (1.29), whichever is here, run in this folder.
# Without arguments it only looks. Exit code 69 where containers cannot run at all, said in one line.
set -eu
cd "$(dirname "$0")"

cannot() {
    echo "no Docker engine: $1; containers cannot run here" >&2
    exit 69
}

command -v docker >/dev/null || cannot "there is no docker command"
why=$(docker info --format '{{.ServerVersion}}' 2>&1) || cannot "$(echo "$why" | tail -n 1)"
if docker compose version >/dev/null 2>&1; then
    compose="docker compose"
elif command -v docker-compose >/dev/null; then
    compose=docker-compose
else
    cannot "there is neither docker compose nor docker-compose"
fi
[ $# -eq 0 ] || exec $compose "$@"
