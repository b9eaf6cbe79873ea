"""The gRPC API's messages in our own words and back; the HTTP twin is gateway/http/bodies.py."""

import json
from collections.abc import Sequence
from typing import Any

from gateway.request import Asked, ChoiceFinished, Completed, Delta, Event, Request, Route, Started, TokenInfo
from mesh.clients.usage import usage_to_proto
from mesh.errors import InvalidRequest
from mesh.sampling import from_proto
from shoal.gateway.v1 import gateway_pb2
from shoal.types.v1 import types_pb2

_PRIORITIES = {0: "normal", 1: "high", 2: "normal", 3: "batch"}


def asked_to_generate(message: gateway_pb2.GenerateRequest) -> Asked:
    prompt = message.WhichOneof("prompt")
    return Asked(
        route=Route.GENERATE,
        model=message.model,
        text=message.text if prompt == "text" else None,
        prompt_ids=list(message.tokens.ids) if prompt == "tokens" else None,
        **_options(message.options),
    )


def asked_to_chat(message: gateway_pb2.ChatRequest) -> Asked:
    if message.tool_choice not in ("", "auto", "none"):
        raise InvalidRequest("tool_choice must be 'auto' or 'none'", field="tool_choice")
    return Asked(
        route=Route.CHAT,
        model=message.model,
        messages=[_message(turn) for turn in message.messages],
        tools=None if message.tool_choice == "none" else _tools(message.tools),
        **_options(message.options),
    )


def _options(options: gateway_pb2.Options) -> dict[str, Any]:
    sampling = options.sampling
    return {
        "sampling": from_proto(sampling),
        "max_tokens": sampling.max_tokens if sampling.HasField("max_tokens") else None,
        "stop": list(options.stop),
        "choices": options.n if options.HasField("n") else 1,
        "priority": _PRIORITIES.get(options.priority, str(options.priority)),
        "session_id": options.session_id,
        "client_request_id": options.client_request_id,
    }


def _message(turn: gateway_pb2.ChatMessage) -> dict[str, Any]:
    """In OpenAI's JSON shape, as gateway/prompt/messages.py reads it; what is empty in protobuf is absent there."""
    message: dict[str, Any] = {"role": turn.role}
    if turn.HasField("content"):
        message["content"] = turn.content
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if value := getattr(turn, name):
            message[name] = value
    return message


def _tools(tools: Sequence[gateway_pb2.Tool]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": _parameters(f"tools[{index}].function.parameters", tool.parameters),
            },
        }
        for index, tool in enumerate(tools)
    ]


def _parameters(path: str, text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", field=path) from None


def response_of(event: Event, request: Request) -> gateway_pb2.GenerateResponse:
    """One event as the stream's next message."""
    if isinstance(event, Delta):
        delta = gateway_pb2.Delta(choice=event.choice, text=event.text, token_ids=event.ids)
        if event.logprobs:
            delta.logprobs.extend(map(_logprob, event.logprobs))
        return gateway_pb2.GenerateResponse(delta=delta)
    if isinstance(event, ChoiceFinished):
        reason = types_pb2.FinishReason.ValueType(event.reason)
        finished = gateway_pb2.ChoiceFinished(choice=event.choice, reason=reason)
        return gateway_pb2.GenerateResponse(finished=finished)
    if isinstance(event, Started):
        return gateway_pb2.GenerateResponse(started=_started(event, request))
    return gateway_pb2.GenerateResponse(completed=_completed(event))


def _started(event: Started, request: Request) -> gateway_pb2.Started:
    return gateway_pb2.Started(
        request_id=event.request_id,
        client_request_id=request.client_request_id,
        model=event.model,
        created_unix_s=event.created_unix_s,
        simulated=event.simulated,
    )


def _completed(event: Completed) -> gateway_pb2.Completed:
    return gateway_pb2.Completed(
        usage=usage_to_proto(event.usage), queue_ms=event.queue_ms, attempts=event.attempts, worker=event.worker
    )


def _logprob(info: TokenInfo) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(
        token_id=info.token_id,
        logprob=info.logprob,
        text=info.text,
        raw=info.raw,
        top=[_logprob(top) for top in info.top],
    )
