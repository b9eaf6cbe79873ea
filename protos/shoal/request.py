"""From the client's arguments to protobuf requests; the asynchronous and the synchronous client share it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypedDict

from shoal.answer import Message, Tool
from shoal.gateway.v1 import gateway_pb2 as pb
from shoal.types.v1 import types_pb2

# A conversation: one question, or turns, each a Message or a mapping with "role" and "content".
Conversation = str | Iterable[Message | Mapping[str, str]]
Prompt = str | Sequence[int]


class Options(TypedDict, total=False):
    """What may be said about an answer. What is not said is the mesh's default (see types.proto, SamplingParams)."""

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


_OWN = frozenset({"stop", "n", "priority", "session_id", "client_request_id"})
_PRIORITIES = {
    "high": types_pb2.PRIORITY_HIGH,
    "normal": types_pb2.PRIORITY_NORMAL,
    "batch": types_pb2.PRIORITY_BATCH,
}


def chat_request(
    model: str, conversation: Conversation, options: Options, tools: Iterable[Tool] = (), tool_choice: str = ""
) -> pb.ChatRequest:
    """A conversation. Raises TypeError for an option that does not exist, ValueError for a value protobuf refuses."""
    turns = [Message("user", conversation)] if isinstance(conversation, str) else conversation
    return pb.ChatRequest(
        model=model,
        messages=[_message(turn) for turn in turns],
        options=_options(options),
        tools=[pb.Tool(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in tools],
        tool_choice=tool_choice,
    )


def generate_request(model: str, prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """A prompt as text or as token ids. Raises as chat_request."""
    if isinstance(prompt, str):
        return pb.GenerateRequest(model=model, text=prompt, options=_options(options))
    return pb.GenerateRequest(model=model, tokens=pb.TokenIds(ids=prompt), options=_options(options))


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


def _options(options: Options) -> pb.Options:
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    stop = options.get("stop", ())
    sampling = {name: value for name, value in options.items() if name not in _OWN}
    message = pb.Options(
        client_request_id=options.get("client_request_id", ""),
        sampling=types_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
        stop=[stop] if isinstance(stop, str) else stop,
        session_id=options.get("session_id", ""),
        n=options.get("n"),
    )
    if "priority" in options:
        if options["priority"] not in _PRIORITIES:
            raise ValueError(f"priority is one of {', '.join(_PRIORITIES)}, not {options['priority']!r}")
        message.priority = _PRIORITIES[options["priority"]]
    return message
