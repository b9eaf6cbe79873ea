"""`shoal chat`: a conversation with the mesh, in the terminal.

One question on the command line gets one answer. Without one it is a conversation with a history; Ctrl-C stops the
answer that is being given, not the program.
"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mesh.cli.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    import shoal
    from shoal.request import ChatOptions

ANSWER_S = 1.0
HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"

Question = Annotated[str | None, typer.Argument(help="Ask this and exit. Without it: a conversation.")]
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
    model: ModelName = None,
    system: System = None,
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 1024,
    seed: Seed = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to the mesh. With a question: one answer. Without: a conversation."""
    from rich.console import Console

    import shoal

    options: ChatOptions = {"temperature": temperature, "max_tokens": max_tokens}
    if seed is not None:
        options["seed"] = seed
    address = address_of(grpc)
    with shoal.SyncClient(address, model=model, api_key=api_key) as client:
        chat = Chat(client, Console(), system, options)
        try:
            if question is not None:
                chat.ask(question)
            else:
                converse(chat)
        except shoal.ShoalClientError as error:
            if isinstance(error, shoal.Unavailable) and not _somebody_answers(address):
                raise _nobody_there(address, error.message) from None
            raise Problem(error.message, _advice(error)) from None


def _somebody_answers(address: str) -> bool:
    """Whether a gRPC server is there: then what failed is what it said, not the way to it."""
    import grpc as grpc_library

    with grpc_library.insecure_channel(address) as channel:
        try:
            grpc_library.channel_ready_future(channel).result(timeout=ANSWER_S)
        except grpc_library.FutureTimeoutError:
            return False
    return True


def _nobody_there(address: str, message: str) -> Problem:
    """What to tell of an address where no gRPC server answers."""
    if _speaks_http(address):
        return Problem(
            f"{address} is an HTTP port, and chat speaks gRPC",
            "name the gateway's gRPC address with --grpc HOST:PORT (`shoal status` shows it), or leave --grpc out",
        )
    return Problem(f"no gateway answers at {address}: {message}", "start a mesh with `shoal up`")


def _speaks_http(address: str) -> bool:
    import http.client
    from contextlib import closing

    try:
        with closing(http.client.HTTPConnection(address, timeout=ANSWER_S)) as connection:
            connection.request("GET", "/")
            connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    return True


def address_of(given: str | None) -> str:
    """`given`, or where the local mesh listens. Raises Problem if no mesh is running."""
    if given is not None:
        return given.removeprefix("http://").rstrip("/")
    from mesh.cli import state

    mesh = state.running()
    if mesh is None:
        raise Problem("no mesh is running", "start one with `shoal up`, or name a gateway with --grpc HOST:PORT")
    return mesh.grpc_address


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
        answer = ""
        with sink_for(self.console) as sink:
            for piece in stream:
                sink.add(piece.text)
                answer += piece.text
        self._turns += [asked, Message("assistant", answer)]
        return answer


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
    return f"(change {error.field})" if error.field else ""
