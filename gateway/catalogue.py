"""Which models this gateway can speak for, and which of them workers serve now.

Joins the models whose tokenizer is loaded here with what the schedulers tell of workers. A worker with another
tokenizer than ours serves us nothing, whatever name it goes by.
"""

from collections.abc import Mapping

from gateway.prompt.text_model import TextModel
from mesh.blocks import namespace
from mesh.clients.load import ModelView, model_views
from mesh.clients.scheduler import Schedulers
from mesh.errors import InvalidRequest


class Catalogue:
    """`texts` by served name. Views are made anew only when the schedulers have news."""

    def __init__(self, texts: Mapping[str, TextModel], schedulers: Schedulers) -> None:
        self._texts = dict(texts)
        self._schedulers = schedulers
        self._digests = {name: text.tokenizer_digest for name, text in texts.items()}
        self._version = -1
        self._views: dict[str, ModelView] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every model that this gateway can speak for, served now or not."""
        return tuple(self._texts)

    def text(self, name: str) -> TextModel:
        """Raises InvalidRequest (model_not_found) for a name that is not ours."""
        text = self._texts.get(name)
        if text is None:
            known = ", ".join(self._texts)
            raise InvalidRequest(
                f"the model {name!r} does not exist here; there is {known}", field="model", code="model_not_found"
            )
        return text

    def serving(self) -> dict[str, ModelView]:
        """The models that at least one healthy worker serves now, by name."""
        if self._version != self._schedulers.version:
            self._version = self._schedulers.version
            self._views = model_views(self._schedulers.replicas, self._digests)
        return self._views

    def context_tokens(self, name: str) -> int:
        """The most tokens that prompt and answer may have together, on any worker that serves now."""
        view, own = self.serving().get(name), self.text(name).context_tokens
        return own if view is None else min(own, view.context_tokens)

    def namespace(self, name: str, salt: bytes) -> bytes:
        """Root of a prompt's chain keys (mesh/blocks.py); empty while no worker says which weights it has."""
        view = self.serving().get(name)
        return b"" if view is None else namespace(view.model_digest, self._digests[name], "", salt)

    def missing(self) -> list[str]:
        """What stands between this gateway and serving each of its models: empty = ready."""
        replicas = self._schedulers.replicas
        if not replicas:
            return ["no scheduler is connected"]
        if not any(view.settled and not view.draining for view in replicas):
            return ["no connected scheduler has settled"]
        serving = self.serving()
        return [f"no healthy worker serves {name}" for name in self._texts if name not in serving]
