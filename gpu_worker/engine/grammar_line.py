"""Which text is compiled next. Pure: no processes, no time."""

from gpu_worker.engine.grammar_workshop import Job

SHORT_CHARACTERS = 4096
# What may be compiled at once. One place is kept for short texts, so that long ones never hold them up.
SHORT_ONLY, SHORTEST, OLDEST = PLACES = range(3)


class Line:
    """Texts that wait. Most places take the shortest, so that a cheap text passes expensive ones; one takes what has
    waited longest, so that none waits for ever.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Job] = {}  # by number, in the order of arrival

    def add(self, job: Job) -> None:
        self._waiting[job.number] = job

    def drop(self, number: int) -> None:
        """Nothing happens if it does not wait."""
        self._waiting.pop(number, None)

    def next(self, place: int) -> Job | None:
        """What `place`, which is free, takes out of the line."""
        jobs = list(self._waiting.values())
        if place != OLDEST:
            jobs.sort(key=lambda job: len(job.text))
        if not jobs or (place == SHORT_ONLY and len(jobs[0].text) > SHORT_CHARACTERS):
            return None
        return self._waiting.pop(jobs[0].number)
