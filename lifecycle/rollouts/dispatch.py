"""The queue of submissions before the gate. It stands there as one waiter, and takes turns with everybody else."""

from collections import deque
from collections.abc import Callable

from lifecycle.errors import LifecycleClosed, LifecycleError
from lifecycle.gate import SubmissionGate
from lifecycle.ticket import Ticket

from .jobs import Job
from .results import Results


class Dispatcher:
    """Starts jobs in order, each as soon as the gate gives it a ticket. Synchronous: called where room appears."""

    def __init__(self, gate: SubmissionGate, start: Callable[[Job, Ticket], None]) -> None:
        self._gate = gate
        self._start = start
        self._queue: deque[Job] = deque()
        self._waiting = False
        self._starting = False
        """A ticket is being taken: whoever hears of it may submit, and must not take another for the same job."""
        self.closed = False
        self.size = 1
        """Rollouts of the job that is first: what the gate is to have room for."""

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._queue)

    def add(self, job: Job) -> None:
        """Put `job` at the end of the queue, and start it at once where it may."""
        self._queue.append(job)
        self._seek()

    def add_first(self, job: Job) -> None:
        """Put `job`, which has waited before, at the head of the queue."""
        self._queue.appendleft(job)
        if self._waiting and job.group_size != self.size:
            self._stand_anew()
        else:
            self._seek()

    def withdraw(self, results: Results) -> list[Job]:
        """Take the jobs out whose results go to `results`, and return them."""
        gone = [job for job in self._queue if job.results is results]
        self._queue = deque(job for job in self._queue if job.results is not results)
        self._stand_anew()
        return gone

    def close(self) -> list[Job]:
        """Start nothing more, and return the jobs that wait."""
        self.closed = True
        left = list(self._queue)
        self._queue.clear()
        self._stand_anew()
        return left

    def go(self) -> None:
        """Start the first job: the gate has room for it."""
        self._waiting = False
        job = self._queue.popleft()
        self._starting = True
        try:
            self._start(job, self._gate.issue(job.group_size))
        finally:
            self._starting = False
        self._stand()

    def refuse(self, error: LifecycleError) -> None:
        """Wait on where the lifecycle can recover: what was submitted is not lost."""
        self._waiting = False
        if not isinstance(error, LifecycleClosed):
            self._stand()

    def _seek(self) -> None:
        if self._starting:
            return
        while self._queue and not self._waiting and not self.closed:
            job = self._queue.popleft()
            self._starting = True
            try:
                ticket = self._gate.try_acquire(group_size=job.group_size)
                if ticket is not None:
                    self._start(job, ticket)
                else:
                    self._queue.appendleft(job)
            finally:
                self._starting = False
            if ticket is None:
                self._stand()

    def _stand(self) -> None:
        """Stand in the gate's queue, for the job that is first."""
        if self._queue and not self._waiting and not self.closed:
            self.size = self._queue[0].group_size
            self._waiting = True
            self._gate.join(self)

    def _stand_anew(self) -> None:
        """Keep the place in the gate's queue where a job is left for it; its size may have changed."""
        if self._queue:
            self.size = self._queue[0].group_size
            self._gate.wake()
        elif self._waiting:
            self._waiting = False
            self._gate.leave(self)
