"""From the client's arguments to protobuf requests; the asynchronous and the synchronous client share it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypedDict, get_type_hints

from shoal.answer import Message, Tool
from shoal.gateway.v1 import gateway_pb2 as pb
from shoal.types.v1 import types_pb2

# A conversation: one question, or turns, each a Message or a mapping with "role" and "content".
Conversation = str | Iterable[Message | Mapping[str, str]]
Prompt = str | Sequence[int]


class Options(TypedDict, total=False):
    """What may be said about an answer. What is not said is the mesh's default (see types.proto, SamplingParams).

    `model` unsaid is the client's own; `timeout_s` covers the whole answer, waiting in the queue included.
    """

    model: str
    timeout_s: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    top_logprobs: int
    json_schema: str
    regex: str
    grammar: str
    stop: str | Sequence[str]
    n: int
    priority: Literal["high", "normal", "batch"]
    session_id: str
    client_request_id: str


class ChatOptions(Options, total=False):
    """`tool_choice` is "auto", "none", "required" or a tool's name."""

    tools: Sequence[Tool]
    tool_choice: str


_SAMPLING = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_PRIORITIES = {
    "high": types_pb2.PRIORITY_HIGH,
    "normal": types_pb2.PRIORITY_NORMAL,
    "batch": types_pb2.PRIORITY_BATCH,
}


def chat_request(conversation: Conversation, options: ChatOptions) -> pb.ChatRequest:
    """A conversation. Raises TypeError for an option that does not exist, ValueError for a value protobuf refuses."""
    _check(options, ChatOptions)
    turns = [Message("user", conversation)] if isinstance(conversation, str) else conversation
    tools = options.get("tools", ())
    return pb.ChatRequest(
        model=options.get("model", ""),
        messages=[_message(turn) for turn in turns],
        options=_options(options),
        tools=[pb.Tool(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in tools],
        tool_choice=options.get("tool_choice", ""),
    )


def generate_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """A prompt as text or as token ids. Raises as chat_request."""
    _check(options, Options)
    request = pb.GenerateRequest(model=options.get("model", ""), options=_options(options))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokens.ids.extend(prompt)
    return request


def _message(turn: Message | Mapping[str, str]) -> pb.ChatMessage:
    if not isinstance(turn, Message):
        unknown = turn.keys() - {"role", "content", "name", "tool_call_id"}
        if unknown or "role" not in turn:
            raise TypeError(f"a turn has role, content, name and tool_call_id; this one has {sorted(turn)}")
        turn = Message(turn["role"], turn.get("content"), (), turn.get("tool_call_id", ""), turn.get("name", ""))
    calls = [pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in turn.tool_calls]
    return pb.ChatMessage(
        role=turn.role, content=turn.content, tool_calls=calls, tool_call_id=turn.tool_call_id, name=turn.name
    )


def _check(options: Options, allowed: type[Options]) -> None:
    unknown = options.keys() - get_type_hints(allowed).keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    structure = options.keys() & {"json_schema", "regex", "grammar"}
    if len(structure) > 1:
        raise ValueError(f"give one of {', '.join(sorted(structure))}: an answer has one structure")
    if options.get("priority", "normal") not in _PRIORITIES:
        raise ValueError(f"priority is one of {', '.join(_PRIORITIES)}, not {options['priority']!r}")


def _options(options: Options) -> pb.Options:
    stop = options.get("stop", ())
    sampling = {name: value for name, value in options.items() if name in _SAMPLING}
    return pb.Options(
        client_request_id=options.get("client_request_id", ""),
        sampling=types_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
        stop=[stop] if isinstance(stop, str) else stop,
        session_id=options.get("session_id", ""),
        n=options.get("n"),
        priority=_PRIORITIES[options["priority"]] if "priority" in options else types_pb2.PRIORITY_UNSPECIFIED,
    )
