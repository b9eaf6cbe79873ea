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
    str | None, typer.Option("--grpc", "--url", help="The gateway's gRPC address. Default: the running mesh's.")
]
ModelName = Annotated[str | None, typer.Option(help="Which model, where the mesh serves several.")]
System = Annotated[str | None, typer.Option(help="What the model is told about itself first.")]
Temperature = Annotated[float | None, typer.Option(help="0 always takes the likeliest token. Default: 1.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed gives the same answer.")]
ApiKey = Annotated[str | None, typer.Option(envvar="SHOAL_API_KEY", help="Sent where the mesh wants keys.")]


def command(
    question: Question = None,
    grpc: Address = None,
    model: ModelName = None,
    system: System = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to the mesh. With a question: one answer. Without: a conversation."""
    from rich.console import Console

    import shoal

    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    options: ChatOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
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
                advice = "start a mesh with `shoal up`"
                raise Problem(f"no gateway answers at {address}: {error.message}", advice) from None
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
