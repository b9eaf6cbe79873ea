"""The engine: submit requests, call `step`, read events. Schedule → run → post-process, on one thread.

A step:
    1. Endings decided since the last one (park, stop_choice) take effect.
    2. The schedule picks what each sequence computes and finds the blocks (schedule.py).
    3. The runner computes them in one pass (runner.py: with torch, or simulated); a sequence that breaks it is found
       by running each alone, and only it ends. If nothing succeeds any more, the engine itself is broken, and says so
       (vitality.py).
    4. Full blocks become findable, sampled tokens become events, finished sequences leave.
"""

import logging
import time
from collections.abc import Callable

from gpu_worker.engine.admission import Admission, check
from gpu_worker.engine.api import (
    AcceptedEvent,
    EngineInfo,
    Event,
    FinishedEvent,
    Plan,
    Reason,
    StepResult,
    TokensEvent,
    Usage,
)
from gpu_worker.engine.load import load_of
from gpu_worker.engine.meters import Meters
from gpu_worker.engine.policy import Policy
from gpu_worker.engine.preparing import Compiler, NoGrammars, Preparations, Refused
from gpu_worker.engine.runner import Outcome, Runner, Sampled
from gpu_worker.engine.sequence import Ending, Piece, Request, Sequence
from gpu_worker.engine.step_times import Carried, StepTimes
from gpu_worker.engine.transfer import BlockStore, Transfer
from gpu_worker.engine.vitality import Vitality
from mesh.blocks import BLOCK_TOKENS, namespace
from mesh.errors import AlreadyExists, ShoalError

log = logging.getLogger(__name__)


class BatchingEngine:
    """Continuous batching over a paged pool, whatever runs the steps. Implements gpu_worker.engine.api.Engine."""

    def __init__(
        self,
        info: EngineInfo,
        runner: Runner,
        schedule: Policy,
        admission: Admission,
        store: BlockStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        compiler: Compiler | None = None,
    ) -> None:
        self.info = info
        self._runner = runner
        self._schedule = schedule
        self.pool = schedule.pool
        self.transfer = Transfer(schedule.pool, store)
        self._admission = admission
        self._clock = clock
        self._meters = Meters(schedule.full_step_tokens)
        schedule.holdings.rates = self._meters
        self._times = StepTimes()
        self._computing_since_s: float | None = None  # while a step computes
        self._vitality = Vitality(info, runner, schedule.pool)
        self._requests: dict[str, Request] = {}
        self._endings: list[Ending] = []
        self._computed: dict[bytes, list[bytes]] = {}  # namespace -> keys that became findable in this step
        self._parked: dict[bytes, list[bytes]] = {}  # namespace -> keys of choices parked since the last step
        self._preparations = Preparations(compiler or NoGrammars())
        self._refused: list[tuple[Plan, ShoalError]] = []
        self._submitted = 0

    def submit(self, plan: Plan) -> None:
        check(plan, self.info.vocab_size, self.info.context_tokens)
        self._runner.check(plan.sampling)
        grammar = self._preparations.wanted(plan.sampling)
        older = self._requests.get(plan.request_id)
        if older is not None:
            if older.plan.attempt >= plan.attempt:
                raise AlreadyExists(f"attempt {older.plan.attempt} of {plan.request_id} is here already")
            self.abort(plan.request_id, older.plan.attempt)
        request = self._request(plan)
        request.expected_blocks = self._admission.expected_blocks(request)
        present = list(self._requests.values())
        self._admission.admit(request, present, self._schedule.waiting, self._meters.decode_tokens_per_s)
        self._requests[plan.request_id] = request
        if grammar is None:
            self._enter(request)
        else:
            self._preparations.add(request, grammar)
            self._enter_prepared()

    def _enter(self, request: Request) -> None:
        """To the schedule, all but choices that have ended."""
        for sequence in request.sequences:
            if sequence.ended:
                continue
            if (ending := self._ended_before(sequence)) is not None:
                self._endings.append(ending)
            else:
                self._schedule.add(sequence)

    def abort(self, request_id: str, attempt: int) -> None:
        request = self._present(request_id, attempt)
        if request is None:
            return
        for sequence in request.sequences:
            self._schedule.remove(sequence)
            sequence.ended = True
        del self._requests[request_id]

    def park(self, request_id: str, attempt: int) -> None:
        request = self._present(request_id, attempt)
        for sequence in request.sequences if request is not None else []:
            self._endings.append(Ending(sequence, Reason.PARKED, sequence.output_tokens))

    def stop_choice(self, request_id: str, attempt: int, choice: int, keep_tokens: int) -> None:
        request = self._present(request_id, attempt)
        for sequence in request.sequences if request is not None else []:
            if sequence.index == choice:
                kept = min(max(keep_tokens, 0), sequence.output_tokens)
                self._endings.append(Ending(sequence, Reason.STOP, kept))

    def has_work(self) -> bool:
        return bool(self._schedule.running or self._schedule.waiting or self._endings)

    @property
    def preparing(self) -> bool:
        return bool(self._preparations)

    def use_leisure(self) -> None:
        self._preparations.warm()

    def take_refused(self) -> list[tuple[Plan, ShoalError]]:
        refused, self._refused = self._refused, []
        return refused

    def _enter_prepared(self) -> None:
        """Requests whose grammar has come go to the schedule; those that it turned out can never run, out."""
        for settled in self._preparations.settled():
            if isinstance(settled, Refused):
                self.abort(*settled.request.identity)
                self._refused.append((settled.request.plan, settled.error))
            else:
                self._enter(settled)

    def block_keys(self) -> list[bytes]:
        return self.pool.keys()

    def step(self) -> StepResult:
        begin_s = self._clock()
        events = self._finish_decided()
        if self._preparations:
            self._enter_prepared()
        self._computing_since_s = begin_s
        pieces, fresh = self._schedule.plan_step()
        for piece in pieces:
            events += self._accept(piece.sequence.request, begin_s)
        self._runner.clear(fresh)
        outcomes = self._compute(pieces)
        computed = [one.piece for one in outcomes if not one.error and not one.piece.only_new_output]
        prompt_tokens = sum(piece.prompt_tokens for piece in computed)
        recomputed_tokens = sum(piece.recomputed_tokens for piece in computed)
        for outcome in outcomes:
            events += self._absorb(outcome)
        self._vitality.note(outcomes)
        duration_s = self._clock() - begin_s
        self._measure(pieces, duration_s)
        stored, evicted = self.pool.take_changes()
        blocks_computed, self._computed = self._computed, {}
        blocks_parked, self._parked = self._parked, {}
        return StepResult(
            events=events,
            load=load_of(self._schedule, self._meters, self._requests),
            duration_ms=duration_s * 1000,
            parts=self._runner.parts() if pieces else None,
            prompt_tokens=prompt_tokens,
            recomputed_tokens=recomputed_tokens,
            blocks_stored=stored,
            blocks_evicted=evicted,
            blocks_computed=blocks_computed,
            blocks_parked=blocks_parked,
        )

    def _finish_decided(self) -> list[Event]:
        """Endings that were decided since the last step."""
        endings, self._endings = self._endings, []
        return [event for ending in endings for event in self._finish(ending)]

    def _measure(self, pieces: list[Piece], duration_s: float) -> None:
        """A step without pieces tells nothing of how fast they are."""
        self._computing_since_s = None
        if pieces:
            self._times.record(duration_s * 1000)
            prefill = sum(piece.count for piece in pieces if piece.count > 1)
            self._meters.record(duration_s, prefill, sum(piece.count == 1 for piece in pieces))
            self._schedule.note(pieces, duration_s, self._clock())

    def _request(self, plan: Plan) -> Request:
        root = namespace(self.info.model_digest, self.info.tokenizer_digest, plan.adapter, plan.cache_salt)
        request = Request(plan, root, self._clock() - plan.waited_ms / 1000, left=len(plan.choices))
        limit = min(len(plan.prompt_ids) + plan.sampling.max_tokens, self.info.context_tokens)
        for choice in plan.choices:
            ids = plan.prompt_ids + choice.emitted_ids
            moved = len(ids) - 1 if choice.emitted_ids else 0  # what an earlier attempt had computed
            sequence = Sequence(
                request, choice.index, self._submitted, ids, len(choice.emitted_ids), limit, reached=moved
            )
            request.sequences.append(sequence)
            self._submitted += 1
        return request

    def _present(self, request_id: str, attempt: int) -> Request | None:
        request = self._requests.get(request_id)
        return request if request is not None and request.plan.attempt == attempt else None

    def _ended_before(self, sequence: Sequence) -> Ending | None:
        """The ending of a resumed choice that has all its tokens already."""
        if sequence.emitted_before and self._ends(sequence, sequence.ids[-1]):
            return Ending(sequence, Reason.STOP, sequence.output_tokens, sequence.ids[-1])
        if len(sequence.ids) >= sequence.limit:
            return Ending(sequence, Reason.LENGTH, sequence.output_tokens)
        return None

    def _ends(self, sequence: Sequence, token: int) -> bool:
        sampling = sequence.sampling
        return token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self.info.eos_token_ids)

    def _accept(self, request: Request, now_s: float) -> list[Event]:
        if request.accepted:
            return []
        request.accepted = True
        request.first_step = self._times.count
        request.queue_ms = round((now_s - request.submitted_s) * 1000)
        return [AcceptedEvent(*request.identity, request.cached, request.queue_ms)]

    def _compute(self, pieces: list[Piece]) -> list[Outcome]:
        """Run the pieces together or, if that fails, each alone, so that only the bad ones end."""
        if not pieces:
            return []
        try:
            return self._runner.run(pieces, self.info.eos_token_ids)
        except Exception as error:
            log.exception("a step of %d sequences failed", len(pieces))
            if len(pieces) == 1:
                return [Outcome(pieces[0], error=f"the step failed ({type(error).__name__})")]
        return [outcome for piece in pieces for outcome in self._compute([piece])]

    def _absorb(self, outcome: Outcome) -> list[Event]:
        """Post-process one piece: its blocks, its token, its end."""
        sequence = outcome.piece.sequence
        if outcome.error:
            self._schedule.holdings.condemn(sequence)
            return self._finish(Ending(sequence, Reason.ERROR, sequence.output_tokens, message=outcome.error))
        sequence.advance(outcome.piece.count)
        self._publish(outcome.piece)
        if outcome.sampled is None:
            return []
        self._schedule.holdings.prove(sequence)
        return self._take(sequence, outcome.sampled)

    def _publish(self, piece: Piece) -> None:
        """The blocks that the piece has filled can be found from now on."""
        sequence = piece.sequence
        first, last = piece.start // BLOCK_TOKENS, sequence.computed // BLOCK_TOKENS
        if first == last:
            return
        for block, key in zip(sequence.blocks[first:last], sequence.keys_up_to(sequence.computed)[first:], strict=True):
            if self.pool.publish(block, key):
                self._computed.setdefault(sequence.request.root, []).append(key)

    def _take(self, sequence: Sequence, sampled: Sampled) -> list[Event]:
        """A new token: an event, or the end of the choice."""
        request = sequence.request
        if not request.first_token_ms:
            request.first_token_ms = max(1, round((self._clock() - request.submitted_s) * 1000))
        request.completion_tokens += 1
        position, token = sequence.output_tokens, sampled.token
        if self._ends(sequence, token):
            return self._finish(Ending(sequence, Reason.STOP, position + 1, token))
        sequence.append(token)
        logprobs = [sampled.logprob] if sampled.logprob is not None else []
        events: list[Event] = [TokensEvent(*request.identity, sequence.index, position, [token], logprobs)]
        if len(sequence.ids) >= sequence.limit:
            events += self._finish(Ending(sequence, Reason.LENGTH, sequence.output_tokens))
        return events

    def _finish(self, ending: Ending) -> list[Event]:
        """The choice leaves and its blocks with it. Nothing if it has left before."""
        sequence = ending.sequence
        request = sequence.request
        if sequence.ended:
            return []
        sequence.ended = True
        if ending.reason is Reason.PARKED:
            self._parked.setdefault(request.root, []).extend(sequence.keys_up_to(sequence.computed))
        self._schedule.remove(sequence)
        request.left -= 1
        if ending.completion_tokens < sequence.output_tokens:  # a stop string that was complete earlier
            emitted_here = sequence.output_tokens - sequence.emitted_before
            request.completion_tokens -= min(sequence.output_tokens - ending.completion_tokens, emitted_here)
        if not request.left:
            del self._requests[request.plan.request_id]
        return [
            FinishedEvent(
                *request.identity,
                choice=sequence.index,
                reason=ending.reason,
                completion_tokens=ending.completion_tokens,
                usage=self._usage(request),
                last=not request.left,
                stop_token_id=ending.stop_token_id,
                message=ending.message,
            )
        ]

    def _usage(self, request: Request) -> Usage:
        began_s = self._computing_since_s
        under_way_ms = None if began_s is None else (self._clock() - began_s) * 1000
        carried = self._times.since(request.first_step, under_way_ms) if request.accepted else Carried(0, 0.0, 0.0)
        return Usage(
            prompt_tokens=len(request.plan.prompt_ids),
            completion_tokens=request.completion_tokens,
            cached=request.cached,
            recomputed_tokens=request.recomputed_tokens,
            precision=self.info.precision,
            queue_ms=request.queue_ms,
            first_token_ms=request.first_token_ms,
            steps=carried.steps,
            median_step_ms=carried.median_ms,
            max_step_ms=carried.max_ms,
        )
