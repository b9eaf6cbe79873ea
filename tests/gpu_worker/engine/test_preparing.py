"""Requests that wait for a grammar, which another thread brings at any moment."""

from concurrent.futures import Future

from gpu_worker.engine.preparing import Preparations
from gpu_worker.engine.sequence import Request, Sequence


class EndsBetweenTwoLooks(Future):
    """Done from the second time on that somebody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.set_result(None)

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1


class Ready:
    """A compiler whose grammars end while one looks."""

    def prepare(self, sampling):
        return EndsBetweenTwoLooks()


def test_a_request_settles_once_whenever_its_grammar_comes(lab):
    plan = lab.plan("r")
    request = Request(plan, b"", 0.0)
    request.sequences.append(Sequence(request, 0, 0, list(plan.prompt_ids), 0, 8))
    preparations = Preparations(Ready())
    preparations.add(request, EndsBetweenTwoLooks())
    settled = [one for _ in range(5) for one in preparations.settled()]
    assert settled == [request]
    assert len(preparations) == 0
