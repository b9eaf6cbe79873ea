"""`shoal certs`: a development CA and a certificate for each identity of the mesh, in one folder.

For trying things, and for machines of one's own. A production mesh takes its certificates from its own PKI: the same
files by the same names.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from mesh.cli.problem import Problem

DAYS = 365
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Folder = Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Where to. Default: certs in the cache folder.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="NAME", help="Name or address by which clients reach the gateway; repeat for more."),
]
Days = Annotated[int, typer.Option(min=1, max=3650, help="For how long they are valid.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the files that are there.")]


def command(folder: Folder = None, host: Hosts = None, days: Days = DAYS, force: Force = False) -> None:
    """Make certificates for TLS between all parts of a mesh, and the CA that signs them."""
    folder = (folder or default_folder()).absolute()
    made = make_set(folder, hosts=host or (), days=days, force=force)
    typer.echo(f"{folder}: {' '.join(path.name for path in made)}")
    typer.echo(
        f"""Valid for {days} days. To use them:

  SHOAL_TLS_DIR={folder} shoal up          (or, without DIR: shoal up --tls)
  SHOAL_TLS_DIR={folder} python -m gateway
  curl --cacert {folder / "ca.pem"} https://localhost:8000/v1/models

The .key files are secrets: each service needs ca.pem, its own .pem and its own .key, none needs ca.key."""
    )


def default_folder() -> Path:
    """Where `shoal up --tls` looks: SHOAL_TLS_DIR, or `certs` in the cache folder."""
    from mesh.models import cache_dir

    return Path(os.environ.get("SHOAL_TLS_DIR") or cache_dir() / "certs")


def make_set(folder: Path, *, hosts: Iterable[str] = (), days: float = DAYS, force: bool = False) -> list[Path]:
    """Write a CA and all identities. Raises Problem, having written nothing, if one of the files is there already."""
    from mesh.cli.authority import Authority, Validity
    from mesh.tls import GATEWAY, IDENTITIES

    valid = Validity.days(days)
    authority = Authority(valid)
    files = {"ca.pem": authority.pem, "ca.key": authority.key_pem}
    for identity in IDENTITIES:
        front = (*LOOPBACK, *hosts) if identity == GATEWAY else ()
        files[f"{identity}.pem"], files[f"{identity}.key"] = authority.issue(identity, valid, front)
    there = sorted(name for name in files if (folder / name).exists())
    if there and not force:
        raise Problem(f"{folder} holds {' '.join(there)}", "--force replaces them; another DIR leaves them alone")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return [_write(folder / name, content) for name, content in files.items()]
    except OSError as error:
        raise Problem(f"cannot write {error.filename}: {error.strerror}") from None


def _write(path: Path, content: bytes) -> Path:
    """In one move; a key is its owner's alone from the first byte on."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    mode = 0o600 if path.suffix == ".key" else 0o644
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    return part.replace(path)
