"""One file of weights, hashed beside whatever else the loading does."""

import hashlib
import threading
from pathlib import Path

from gpu_worker.models.errors import LoadError


class WeightFile:
    """Reads the file through once, in a thread of its own: that also has it in the page cache before it is needed.

    Hashing and reading leave Python's lock free, so on a second core they cost nothing. The thread is a daemon: a
    loading that fails does not wait for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = b""
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._hash, name=f"hash-{path.name}", daemon=True)
        self._thread.start()

    def digest(self) -> bytes:
        """64 bytes over the content, waited for. Raises LoadError if the file cannot be read."""
        self._thread.join()
        if self._error is not None:
            raise LoadError(self.path, f"cannot be read: {self._error.strerror}") from self._error
        return self._digest

    def _hash(self) -> None:
        try:
            with self.path.open("rb") as file:
                self._digest = hashlib.file_digest(file, "blake2b").digest()
        except OSError as error:
            self._error = error
