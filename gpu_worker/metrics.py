"""What Prometheus is told of a worker: shoal_worker_*.

Steps come far more often than scrapes, so what the newest step says is looked up when it is asked for, and a step only
counts.
"""

from collections.abc import Callable
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from gpu_worker.cold.metrics import ColdMetrics
from gpu_worker.engine.api import AcceptedEvent, EngineInfo, EngineLoad, Parts, StepResult, TokensEvent
from gpu_worker.kv_metrics import KvMetrics
from mesh.clients.usage import TIERS
from mesh.telemetry import milliseconds

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class WorkerMetrics:
    """Counts what steps did and how requests ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, what: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"shoal_worker_{name}", what, labels, registry=registry)

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"shoal_worker_{name}", what, labels, registry=registry)

        self._registry = registry
        self._load: EngineLoad | None = None  # after the newest step
        tokens = counter("tokens", "Tokens: prompt (computed once), cached, generated, recomputed.", ("kind",))
        self._prompt, self._recomputed = tokens.labels("prompt"), tokens.labels("recomputed")
        self._generated, self._found = tokens.labels("generated"), tokens.labels("cached")
        self._requests = counter("requests", "Attempts by how they ended.", ("outcome",))
        self._cached = counter("cached_tokens", "Prompt tokens found rather than computed.", ("tier",))
        sequences = gauge("sequences", "Choices that run in steps or wait for a place.", ("state",))
        blocks = gauge("blocks", "KV blocks: free + cached + used = total.", ("state",))
        queued = gauge("queued_prefill_tokens", "Prompt tokens accepted and not yet computed.")
        batch_limit = gauge("batch_limit", "Choices that may run at once; it follows the load.")
        budget = gauge("prompt_budget_tokens", "Prompt tokens that the last step could compute at most.")
        budget_s = gauge("prompt_budget_seconds", "Time that the last step could spend on prompts.")
        for state in ("running", "waiting"):
            self._follow(sequences.labels(state), attrgetter(f"{state}_sequences"))
        for state in ("free", "cached", "used", "total"):
            self._follow(blocks.labels(state), attrgetter(f"{state}_blocks"))
        self._follow(queued, attrgetter("queued_prefill_tokens"))
        self._follow(batch_limit, attrgetter("batch_limit"))
        self._follow(budget, attrgetter("prompt_budget_tokens"))
        self._follow(budget_s, lambda load: load.prompt_budget_ms / 1000)
        self._simulated = gauge(
            "simulated", "1 where a timing model stands in for the engine: its figures are no measurements."
        )
        self._up = gauge("engine_up", "1 while the engine is loaded and no step is overdue.")
        self._step = Histogram(
            "shoal_worker_step_seconds", "Duration of a step.", registry=registry, buckets=_STEP_BUCKETS
        )
        self._kernels = counter(
            "kernel_seconds", "Time of the steps that were timed, by part: divide by all parts for shares.", ("part",)
        )
        self._timed = counter("timed_steps", "Steps whose kernels were timed: about one in sixty.")
        self._first_token = Histogram(
            "shoal_worker_first_token_seconds",
            "From the call to its first token.",
            registry=registry,
            buckets=milliseconds(),
        )
        self.cold = ColdMetrics(registry)
        self._kv = KvMetrics(registry)

    def loaded(self, info: EngineInfo) -> None:
        """The engine is there; what it is does not change."""
        facts = {
            name: str(getattr(info, name))
            for name in ("model", "architecture", "precision", "device", "preset", "policy")
        }
        facts["simulated"] = str(info.simulated).lower()
        Info("shoal_worker", "What the engine runs, and on what.", registry=self._registry).info(facts)
        self._simulated.set(info.simulated)

    def up(self, well: bool) -> None:
        """Whether the engine is well."""
        self._up.set(well)

    def stepped(self, result: StepResult) -> None:
        """The engine completed a step."""
        self._load = result.load
        self._step.observe(result.duration_ms / 1000)
        if result.prompt_tokens:
            self._prompt.inc(result.prompt_tokens)
        if result.recomputed_tokens:
            self._recomputed.inc(result.recomputed_tokens)
        self._generated.inc(sum([len(event.ids) for event in result.events if isinstance(event, TokensEvent)]))
        for event in result.events:
            if isinstance(event, AcceptedEvent):
                self._found.inc(sum(event.cached.values()))
                for tier, tokens in event.cached.items():
                    self._cached.labels(TIERS[tier]).inc(tokens)
        if result.parts is not None:
            self._time(result.parts)
        self._kv.stepped(result.load.kv)

    def _time(self, parts: Parts) -> None:
        self._timed.inc()
        for part in Parts.__struct_fields__:
            self._kernels.labels(part.removesuffix("_s")).inc(getattr(parts, part))

    def _follow(self, gauge: Gauge, told: Callable[[EngineLoad], float]) -> None:
        gauge.set_function(lambda: 0.0 if self._load is None else told(self._load))

    def first_token(self, seconds: float) -> None:
        """An attempt's first token came `seconds` after the call."""
        self._first_token.observe(seconds)

    def ended(self, outcome: str) -> None:
        """An attempt ended."""
        self._requests.labels(outcome).inc()
