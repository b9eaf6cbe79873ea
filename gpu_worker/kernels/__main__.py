"""`python -m gpu_worker.kernels`: compile the kernels for this machine, so that no worker has to as it starts.

`python -m gpu_worker.kernels FOLDER`: build them for kinds of processors instead, for machines without a compiler; they
are looked for in `built/` beside this file.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_worker.kernels.library import KINDS, NO_COMPILER, NoKernels, built, compile_into, compilers, flags_for


def main() -> int:
    """The exit code: 1 where there can be none, with the reason."""
    try:
        for file in [built()] if len(sys.argv) < 2 else portable(Path(sys.argv[1])):
            print(file)
    except NoKernels as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


def portable(folder: Path) -> Iterator[Path]:
    """Libraries for kinds of processors, in `folder`. Raises NoKernels."""
    compiler = next(compilers(), None)
    if compiler is None:
        raise NoKernels(NO_COMPILER)
    for kind, features in KINDS.items():
        file = folder / f"shoal-{kind}.so"
        compile_into(file, compiler, flags_for(features))
        yield file


if __name__ == "__main__":
    sys.exit(main())
