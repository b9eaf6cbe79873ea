"""`python -m gpu_worker.kernels [FOLDER]`: build the kernels for kinds of processors, for machines without a compiler.

Into `built/` beside this file, where they are looked for, or into FOLDER to be copied there.
"""

import sys
from pathlib import Path

from gpu_worker.kernels.library import KINDS, PREBUILT, NoKernels, compile_into, compilers


def main() -> int:
    """The exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PREBUILT
    compiler = next(compilers(), None)
    if compiler is None:
        print(
            "no C++ compiler was found: install g++ or clang++, or `pip install ziglang`, or set CXX", file=sys.stderr
        )
        return 1
    for kind, (flags, _) in KINDS.items():
        try:
            compile_into(folder / f"shoal-{kind}.so", compiler, flags)
        except NoKernels as error:
            print(error, file=sys.stderr)
            return 1
        print(folder / f"shoal-{kind}.so")
    return 0


if __name__ == "__main__":
    sys.exit(main())
