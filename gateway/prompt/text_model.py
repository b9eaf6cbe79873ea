"""What the gateway knows of a model: its tokenizer, its chat template, its context. No weights."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.prompt.control import ControlTokens
from gateway.prompt.detokenizer import ByteDetokenizer, Detokenizer, TokenTexts, WindowDetokenizer
from gateway.prompt.messages import Message, Tool
from gateway.prompt.template import ChatTemplate
from gateway.prompt.vocabulary import Vocabulary
from mesh.errors import InvalidRequest
from mesh.models import ModelFolder

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Up to here a text is encoded sooner than another thread takes over.
SHORT_CHARACTERS = 2_000
# transformers writes 1e30 where nobody set a length.
_LONGEST_CONTEXT = 1 << 31


@dataclass(frozen=True, kw_only=True, repr=False)
class TextModel:
    """Prompts in, text out. Safe to share by all requests and threads of a process. Encoding takes from microseconds to
    seconds: gateway/prompt/offload.py.

    `context_tokens`: prompt plus answer may not pass it. `longest_token`: the most UTF-8 bytes of text that one token
    can stand for. `has_tools`: the chat template takes tools. `template` is None for a model without one.
    """

    name: str
    vocab_size: int
    context_tokens: int
    longest_token: int
    tokenizer_digest: bytes
    vocabulary: Vocabulary
    template: ChatTemplate | None
    leading_ids: tuple[int, ...]
    _control: ControlTokens
    _texts: TokenTexts | None

    @classmethod
    def load(cls, folder: ModelFolder) -> "TextModel":
        """Reads the tokenizer and its configuration: a second or so, so do it in a thread. Raises InvalidRequest (field
        `model`) that says which file is wrong.
        """
        vocabulary = Vocabulary.load(folder.tokenizer)
        config = _json(folder, "tokenizer_config.json")
        names = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
        source = _template_source(folder, config)
        return cls(
            name=folder.name,
            vocab_size=vocabulary.full.get_vocab_size(),
            context_tokens=_context_tokens(folder, config),
            longest_token=vocabulary.longest_token,
            tokenizer_digest=folder.tokenizer_digest(),
            vocabulary=vocabulary,
            template=ChatTemplate(source, names) if source is not None else None,
            leading_ids=_leading_ids(vocabulary, config, names.get("bos_token")),
            _control=ControlTokens(vocabulary.stand_ins),
            _texts=_token_texts(vocabulary),
        )

    @property
    def has_tools(self) -> bool:
        """Whether the chat template takes tools."""
        return self.template is not None and self.template.has_tools

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), context_tokens: int | None = None
    ) -> list[int]:
        """The prompt that asks for the next assistant turn. Control ids appear only where the template puts them.

        Raises InvalidRequest where the template does not take the conversation, the model no tools, or where
        `context_tokens` (None = the model's own) could never hold it.
        """
        most_bytes = self._most_bytes(context_tokens)
        # Twice: what is sent before the work on it begins, and what the template made of it before tokenizing.
        _check_size("messages", (message.content for message in messages), most_bytes)
        text = self._chat_text(messages, tools)
        _check_size("messages", (text,), most_bytes)
        return self._encode(text)

    def encode_text(self, text: str, context_tokens: int | None = None) -> list[int]:
        """A raw prompt, which is never parsed for control tokens, after the ids that begin every text (BOS, if any)."""
        _check_size("prompt", (text,), self._most_bytes(context_tokens))
        return [*self.leading_ids, *self._encode(text)]

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """For one choice that goes on where `prompt_ids` end."""
        if self._texts is None:
            return WindowDetokenizer(self.vocabulary.full, prompt_ids)
        return ByteDetokenizer(self._texts)

    def token_text(self, token: int) -> tuple[str, bytes]:
        """A token by itself, for log-probabilities: its text (U+FFFD for part of a character) and its exact bytes."""
        table = self.vocabulary.bytes_of
        if table is None:
            text = str(self.vocabulary.full.decode([token], skip_special_tokens=False))
            return text, text.encode()
        raw = table[token] if token < len(table) else b""
        return raw.decode(errors="replace"), raw

    def _most_bytes(self, context_tokens: int | None) -> int:
        return self.longest_token * (self.context_tokens if context_tokens is None else context_tokens)

    def _chat_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The rendered conversation, control tokens as stand-ins."""
        if self.template is None:
            raise InvalidRequest(f"{self.name} has no chat template; ask for a completion instead", field="messages")
        if tools and not self.template.has_tools:
            raise InvalidRequest(f"{self.name}'s chat template takes no tools", field="tools")
        texts: list[str] = []

        def noted(text: str) -> str:
            texts.append(text)
            return text

        variables = self.template.variables(messages, tools, noted)
        guard = self._control.guard(texts, self.template.source)
        if guard is not None:
            variables = self.template.variables(messages, tools, guard)
        return self._control.marked(self.template.render(variables), guard)

    def _encode(self, marked: str) -> list[int]:
        if len(marked) <= SHORT_CHARACTERS:
            short: list[int] = self.vocabulary.inert.encode(marked, add_special_tokens=False).ids
            return short
        # Not `encode`, which keeps the interpreter to itself (offload.py).
        [encoding] = self.vocabulary.inert.encode_batch_fast([marked], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def _token_texts(vocabulary: Vocabulary) -> TokenTexts | None:
    """None where tokens have no bytes of their own."""
    table = vocabulary.bytes_of
    if table is None:
        return None
    return TokenTexts.of([b"" if index in vocabulary.special else raw for index, raw in enumerate(table)])


def _check_size(field: str, texts: Iterable[str], most_bytes: int) -> None:
    """Tokenizing costs a second for some megabytes; that a text cannot fit is known from its length in bytes."""
    size = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    if size > most_bytes:
        raise InvalidRequest(
            f"{field}: {size} bytes of text, and this model's context can never hold more than {most_bytes}",
            field=field,
            code="context_length_exceeded",
        )


def _json(folder: ModelFolder, name: str) -> dict[str, Any]:
    """A JSON object of the folder; {} where there is no such file."""
    path = folder.path / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", field="model") from error
    return value if isinstance(value, dict) else {}


def _token_text(token: Any) -> str | None:
    """A special token is written as its text or as an object with it."""
    return token.get("content") if isinstance(token, Mapping) else token


def _template_source(folder: ModelFolder, config: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja` if there is one, else the configuration's; of several named ones, "default"."""
    beside = folder.path / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        return next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return source


def _context_tokens(folder: ModelFolder, config: Mapping[str, Any]) -> int:
    for length in (config.get("model_max_length"), _json(folder, "config.json").get("max_position_embeddings")):
        if isinstance(length, int | float) and 0 < length < _LONGEST_CONTEXT:
            return int(length)
    raise InvalidRequest(f"{folder.tokenizer_config} names no model_max_length", field="model")


def _leading_ids(vocabulary: Vocabulary, config: Mapping[str, Any], bos_token: str | None) -> tuple[int, ...]:
    """BOS where `add_bos_token` says so; where it says nothing, where the tokenizer itself puts one."""
    bos = vocabulary.full.token_to_id(bos_token) if bos_token else None
    if bos is None:
        return ()
    adds = config.get("add_bos_token")
    if adds is None:
        adds = vocabulary.full.encode("").ids[:1] == [bos]
    return (bos,) if adds else ()
