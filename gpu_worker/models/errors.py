"""The errors of loading a model: LoadError, and what of it is no fault of the checkpoint, PoolTooSmall."""

from pathlib import Path

MOST_CHARACTERS = 400  # of a name or a problem: both may quote a damaged file


class LoadError(Exception):
    """A checkpoint that cannot be served: says which file, which tensor (if one) and what was expected instead.

    Always one line that can be printed, whatever the file holds.
    """

    def __init__(self, file: Path, problem: str, *, tensor: str | None = None) -> None:
        where = f"{file}, tensor {_shown(tensor)}" if tensor else str(file)
        super().__init__(f"{where}: {_shown(problem)}")
        self.file = file
        self.tensor = tensor
        self.problem = problem


class PoolTooSmall(LoadError):
    """The checkpoint can be served, but settings leave it no room. The text begins with the variable to change."""

    def __str__(self) -> str:
        return self.problem


def _shown(text: str) -> str:
    short = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in short)
