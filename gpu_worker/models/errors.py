"""The one error of loading a model."""

from pathlib import Path


class LoadError(Exception):
    """A checkpoint that cannot be served: says which file, which tensor (if one) and what was expected instead."""

    def __init__(self, file: Path, problem: str, *, tensor: str | None = None) -> None:
        where = f"{file}, tensor {tensor}" if tensor else str(file)
        super().__init__(f"{where}: {problem}")
        self.file = file
        self.tensor = tensor
        self.problem = problem
