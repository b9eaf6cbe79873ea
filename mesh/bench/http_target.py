"""An OpenAI-compatible server as a target: what a request to it says, and the connections that are kept to it."""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from mesh.bench.answer import Ask, Outcome
from mesh.bench.exchange import Exchange
from mesh.bench.refusal import why_not
from mesh.bench.report import CannotMeasure
from mesh.bench.target import TEMPERATURE, TargetOptions

CONNECT_TIMEOUT_S = 10.0
LOOKUP_TIMEOUT_S = 10.0
CLOSE_S = 2.0
MOST_LISTED_BYTES = 4 * 1024 * 1024
# A server may close a connection that idles, just when we send: those that have idled this long are not used again.
IDLE_S = 2.0


class HttpTarget:
    """One base URL, e.g. http://127.0.0.1:8000 (with or without /v1). Use it as `async with`.

    `keep`: outcomes hold what was streamed, for `text_of`.
    """

    def __init__(self, url: str, options: TargetOptions, *, keep: bool = False) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CannotMeasure(f"{url} is no URL: write http://host:port, or grpc://host:port for Shoal's gRPC")
        self._options = options
        self._keep = keep
        self._tls = ssl.create_default_context(cafile=options.ca) if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        path = parts.path.rstrip("/").removesuffix("/v1")
        route = "chat/completions" if options.api == "chat" else "completions"
        self._prefix = f"{path}/v1"
        self._head = self._request_head("POST", f"{self._prefix}/{route}", parts.netloc)
        self._lookup = self._request_head("GET", f"{self._prefix}/models", parts.netloc)
        self._idle: list[Exchange] = []
        self._open: set[Exchange] = set()

    async def __aenter__(self) -> "HttpTarget":
        return self

    async def __aexit__(self, *_: object) -> None:
        open_ones = list(self._open)
        for exchange in open_ones:
            exchange.close()
        if open_ones:
            await asyncio.wait([exchange.lost for exchange in open_ones], timeout=CLOSE_S)

    async def ask(self, ask: Ask, outcome: Outcome, gap: Callable[[float], None]) -> None:
        """One request to its end, whatever that is: failures are told in `outcome`."""
        outcome.raw = [] if self._keep else None
        body = msgspec.json.encode(self.body(ask))
        request = b"%b\r\ncontent-length: %d\r\n\r\n%b" % (self._head, len(body), body)
        try:
            async with asyncio.timeout(self._options.timeout_s):
                exchange = await self._connection()
                await exchange.ask(request, outcome, gap)
        except TimeoutError:
            outcome.fail("timeout", f"no end within {self._options.timeout_s:g} s")
            return
        except OSError as error:
            outcome.fail("connect", str(error))
            return
        outcome.check_whole(ask.output_tokens, exact=self._options.ignore_eos)
        if exchange.usable:
            self._idle.append(exchange)
        else:
            exchange.close()

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request's JSON."""
        options = self._options
        prompt: dict[str, Any] = (
            {"messages": [{"role": "user", "content": ask.prompt}]} if options.api == "chat" else {"prompt": ask.prompt}
        )
        ignore: dict[str, Any] = {"ignore_eos": True} if options.ignore_eos else {}
        return {
            "model": options.model,
            **prompt,
            "max_tokens": ask.output_tokens,
            "temperature": TEMPERATURE,
            "stream": True,
            "stream_options": {"include_usage": True},
            **ignore,
            **options.more,
        }

    async def _connection(self) -> Exchange:
        now = time.perf_counter()
        while self._idle:
            exchange = self._idle.pop()
            if exchange.usable and now - exchange.idle_since < IDLE_S:
                return exchange
            exchange.close()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, made = await loop.create_connection(Exchange, self._host, self._port, ssl=self._tls)
        self._open.add(made)
        made.lost.add_done_callback(lambda _: self._open.discard(made))
        return made

    def _request_head(self, method: str, path: str, host: str) -> bytes:
        key = f"\r\nauthorization: Bearer {self._options.api_key}" if self._options.api_key else ""
        return f"{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json{key}".encode()


def models_at(url: str, api_key: str | None = None, ca: str | None = None) -> list[dict[str, Any]]:
    """What GET /v1/models lists. Raises CannotMeasure if nothing that speaks OpenAI's API answers."""
    import http.client
    import urllib.request

    base = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(f"{base}/v1/models", headers=headers)
        trust = ssl.create_default_context(cafile=ca) if base.startswith("https") else None
        with urllib.request.urlopen(request, timeout=LOOKUP_TIMEOUT_S, context=trust) as answer:
            listed = msgspec.json.decode(answer.read(MOST_LISTED_BYTES), type=_Listed).data
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise why_not(base, error) from None
    if not listed:
        raise CannotMeasure(f"{base}/v1/models lists no model: is a worker up? Or name one with --model")
    return listed


class _Listed(msgspec.Struct):
    data: list[dict[str, Any]] | None
