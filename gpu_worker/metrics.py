"""What Prometheus is told of a worker: shoal_worker_*."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from gpu_worker.cold.metrics import ColdMetrics
from gpu_worker.engine.api import AcceptedEvent, EngineInfo, EngineLoad, Parts, StepResult, TokensEvent
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
        self._tokens = counter("tokens", "Tokens: prompt (computed once), cached, generated, recomputed.", ("kind",))
        self._requests = counter("requests", "Attempts by how they ended.", ("outcome",))
        self._cached = counter("cached_tokens", "Prompt tokens found rather than computed.", ("tier",))
        self._preemptions = counter("preemptions", "Sequences set back to make room.")
        self._sequences = gauge("sequences", "Choices that run in steps or wait for a place.", ("state",))
        self._blocks = gauge("blocks", "KV blocks: free + cached + used = total.", ("state",))
        self._queued = gauge("queued_prefill_tokens", "Prompt tokens accepted and not yet computed.")
        self._batch_limit = gauge("batch_limit", "Choices that may run at once; it follows the load.")
        self._prompt_budget = gauge("prompt_budget_tokens", "Prompt tokens that the last step could compute at most.")
        self._prompt_budget_s = gauge("prompt_budget_seconds", "Time that the last step could spend on prompts.")
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
        self._preempted = 0

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
        self._step.observe(result.duration_ms / 1000)
        self._tokens.labels("prompt").inc(result.prompt_tokens)
        self._tokens.labels("recomputed").inc(result.recomputed_tokens)
        self._tokens.labels("generated").inc(sum(len(e.ids) for e in result.events if isinstance(e, TokensEvent)))
        for event in result.events:
            if isinstance(event, AcceptedEvent):
                self._tokens.labels("cached").inc(sum(event.cached.values()))
                for tier, tokens in event.cached.items():
                    self._cached.labels(TIERS[tier]).inc(tokens)
        if result.parts is not None:
            self._time(result.parts)
        self._show(result.load)

    def _time(self, parts: Parts) -> None:
        self._timed.inc()
        for part in Parts.__struct_fields__:
            self._kernels.labels(part.removesuffix("_s")).inc(getattr(parts, part))

    def _show(self, load: EngineLoad) -> None:
        self._preemptions.inc(max(0, load.preemptions - self._preempted))
        self._preempted = load.preemptions
        self._queued.set(load.queued_prefill_tokens)
        self._batch_limit.set(load.batch_limit)
        self._prompt_budget.set(load.prompt_budget_tokens)
        self._prompt_budget_s.set(load.prompt_budget_ms / 1000)
        self._sequences.labels("running").set(load.running_sequences)
        self._sequences.labels("waiting").set(load.waiting_sequences)
        self._blocks.labels("free").set(load.free_blocks)
        self._blocks.labels("cached").set(load.cached_blocks)
        self._blocks.labels("used").set(load.used_blocks)
        self._blocks.labels("total").set(load.total_blocks)

    def first_token(self, seconds: float) -> None:
        """An attempt's first token came `seconds` after the call."""
        self._first_token.observe(seconds)

    def ended(self, outcome: str) -> None:
        """An attempt ended."""
        self._requests.labels(outcome).inc()
