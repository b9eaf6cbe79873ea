"""The mesh as the schedulers see it, in plain values: which replicas live, and which workers serve what."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.scheduler.v1 import scheduler_pb2

# Workers report at least each second; what an older report said is no longer known.
STALE_MS = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One attached worker. `serving` = it completes steps and takes new work, as it said itself not long ago."""

    worker_id: str
    address: str
    model: str
    context_tokens: int
    model_digest: bytes
    tokenizer_digest: bytes
    simulated: bool
    serving: bool
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One scheduler replica's last word. `settled` = an absent model is really absent."""

    address: str
    scheduler_id: str
    settled: bool
    draining: bool
    workers: tuple[WorkerView, ...]

    def serves(self, model: str) -> bool:
        """Whether a worker attached there takes work for the model now."""
        return any(worker.serving and worker.model == model for worker in self.workers)


def replica_view(address: str, load: scheduler_pb2.MeshLoad) -> ReplicaView:
    """The plain twin of a MeshLoad that `address` pushed."""
    return ReplicaView(
        address=address,
        scheduler_id=load.scheduler_id,
        settled=load.settled,
        draining=load.draining,
        workers=tuple(_worker(state) for state in load.workers),
    )


def _worker(state: scheduler_pb2.WorkerState) -> WorkerView:
    hello, load = state.hello, state.load
    return WorkerView(
        worker_id=hello.worker_id,
        address=hello.address,
        model=hello.model,
        context_tokens=hello.context_tokens,
        model_digest=hello.model_digest,
        tokenizer_digest=hello.tokenizer_digest,
        simulated=hello.simulated,
        serving=load.healthy and not load.draining and state.age_ms <= STALE_MS,
        features=frozenset(hello.features),
    )


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model that workers serve now.

    `context_tokens` is the smallest of theirs, so that any of them will do; `model_digest` is that of most of them.
    """

    name: str
    context_tokens: int
    workers: int
    simulated: bool
    model_digest: bytes


def model_views(replicas: Iterable[ReplicaView], digests: dict[str, bytes]) -> dict[str, ModelView]:
    """The models of `digests` (name -> tokenizer digest) that at least one serving worker of equal digest has."""
    workers = {worker.worker_id: worker for replica in replicas for worker in replica.workers if worker.serving}
    views = {}
    for name, digest in digests.items():
        ours = [w for w in workers.values() if w.model == name and w.tokenizer_digest == digest]
        if ours:
            views[name] = ModelView(
                name,
                context_tokens=min(w.context_tokens for w in ours),
                workers=len(ours),
                simulated=any(w.simulated for w in ours),
                model_digest=Counter(w.model_digest for w in ours).most_common(1)[0][0],
            )
    return views
