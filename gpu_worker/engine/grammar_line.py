"""Which text is compiled next. Pure: no processes, no time."""

from gpu_worker.engine.grammar_workshop import Job

SHORT_CHARACTERS = 4096
# What may be compiled at once. The first place takes short texts only, so that long ones never hold them up.
SHORT_ONLY = 0
PLACES = (SHORT_ONLY, 1, 2)


class Line:
    """Texts that wait. The place for short ones takes the shortest, the others whichever has waited longest: a cheap
    text passes expensive ones, and none waits for ever.
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
        if place == SHORT_ONLY:
            jobs = sorted((job for job in jobs if len(job.text) <= SHORT_CHARACTERS), key=lambda job: len(job.text))
        return self._waiting.pop(jobs[0].number) if jobs else None
