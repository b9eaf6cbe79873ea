"""`shoal chat`: a conversation with the mesh, in the terminal.

One question on the command line gets one answer. Without one it is a conversation with a history; Ctrl-C stops the
answer that is being given, not the program.
"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mesh.cli import reach
from mesh.cli.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    import shoal
    from shoal.request import ChatOptions

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"
# By the request's field, what sets it here.
OPTIONS = {"model": "--model", "temperature": "--temperature", "max_tokens": "--max-tokens", "seed": "--seed"}

Question = Annotated[str | None, typer.Argument(help="Ask this and exit. Without it: a conversation.")]
CaFile = Annotated[
    str | None, typer.Option("--ca", metavar="FILE", help="Speak TLS and trust this CA. Default: as the mesh does.")
]
Address = Annotated[
    str | None,
    typer.Option(help="The gateway's gRPC address, HOST:PORT (not its HTTP port). Default: the running mesh's."),
]
ModelName = Annotated[str | None, typer.Option(help="Which model, where the mesh serves several.")]
System = Annotated[str | None, typer.Option(help="What the model is told about itself first.")]
# Small models wander at higher temperatures and may never end: reproducible and bounded unless asked otherwise.
Temperature = Annotated[
    float,
    typer.Option(help="0 always takes the likeliest token, so answers are reproducible; small models wander above."),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed gives the same answer.")]
ApiKey = Annotated[str | None, typer.Option(envvar="SHOAL_API_KEY", help="Sent where the mesh wants keys.")]


def command(
    question: Question = None,
    grpc: Address = None,
    ca: CaFile = None,
    model: ModelName = None,
    system: System = None,
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 1024,
    seed: Seed = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to the mesh. With a question: one answer. Without: a conversation."""
    import os

    from rich.console import Console

    # gRPC looks when it is imported. What goes wrong is told below, once and in words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import shoal

    options: ChatOptions = {"temperature": temperature, "max_tokens": max_tokens}
    if seed is not None:
        options["seed"] = seed
    address, tls = reach.gateway(grpc, ca)
    with _client(address, model, api_key, tls) as client:
        chat = Chat(client, Console(), system, options)
        try:
            if question is not None:
                chat.ask(question)
            else:
                converse(chat)
        except shoal.ShoalClientError as error:
            if isinstance(error, shoal.Unavailable) and not reach.answers(address, tls):
                raise reach.why_not(address, tls, error.message) from None
            raise Problem(error.message, _advice(error)) from None


def _client(address: str, model: str | None, api_key: str | None, tls: "shoal.ClientTls | None") -> "shoal.SyncClient":
    import shoal

    try:
        return shoal.SyncClient(address, model=model, api_key=api_key, tls=tls)
    except OSError as error:
        raise Problem(f"{error.filename}: {error.strerror}", "--ca names the PEM file of the mesh's CA") from None


class Chat:
    """One conversation: its turns, and how the next answer is asked for and shown."""

    def __init__(
        self, client: "shoal.SyncClient", console: "Console", system: str | None, options: "ChatOptions"
    ) -> None:
        self.console = console
        self._client = client
        self._options = options
        self._system = system
        self._turns: list[shoal.Message] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        from shoal import Message

        self._turns = [Message("system", self._system)] if self._system is not None else []

    def ask(self, question: str) -> str:
        """Ask, show the answer as it comes, remember both. Interrupted or failed, the question is forgotten again."""
        from mesh.cli.markdown_stream import sink_for
        from shoal import Message

        asked = Message("user", question)
        stream = self._client.chat([*self._turns, asked], **self._options)
        answer, cut = "", False
        with sink_for(self.console) as sink:
            for piece in stream:
                sink.add(piece.text)
                answer += piece.text
                cut = cut or piece.finish == "length"
        if cut and self.console.is_terminal:
            self.console.print(cut_words(stream.summary), style="dim", highlight=False)
        self._turns += [asked, Message("assistant", answer)]
        return answer


def cut_words(summary: "shoal.Summary | None") -> str:
    """What is said below an answer that has not come to its end."""
    tokens = f" at {summary.usage.completion_tokens} tokens" if summary is not None else ""
    return f"(cut{tokens}: --max-tokens allows more, as far as the model's context goes)"


def converse(chat: Chat) -> None:
    """Read, answer, repeat, until /exit or the end of input."""
    import shoal

    if sys.stdin.isatty():
        chat.console.print(HELP, style="dim", highlight=False)
    for line in lines():
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                chat.reset()
                chat.console.print("forgotten", style="dim")
            case _ if line.startswith("/"):
                chat.console.print(HELP, style="dim", highlight=False)
            case _:
                try:
                    chat.ask(line)
                except KeyboardInterrupt:
                    chat.console.print("(stopped)", style="dim")
                except (shoal.InvalidRequest, shoal.Overloaded) as error:
                    chat.console.print(f"{error.message} {_advice(error)}", style="red", markup=False)


def lines() -> "Iterator[str]":
    """What the user types, line by line, with a history that outlives the program. Ctrl-C drops a half-typed line."""
    import readline

    from mesh.models import cache_dir

    history = cache_dir() / "chat_history"
    interactive = sys.stdin.isatty()
    if interactive and history.is_file():
        readline.read_history_file(history)
    try:
        while True:
            try:
                yield input("> " if interactive else "").strip()
            except KeyboardInterrupt:
                print()
    except EOFError:
        return
    finally:
        if interactive:
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(1000)
            readline.write_history_file(history)


def _advice(error: "shoal.ShoalClientError") -> str:
    if error.retry_after_s is not None:
        return f"(try again in {error.retry_after_s:.0f} s)"
    return f"(change {OPTIONS.get(error.field, error.field)})" if error.field else ""
