"""Whatever could go either way is asked of the oracle; it goes through all answers, one run each."""

from collections.abc import Iterator, Sequence

Answers = tuple[int, ...]


class Oracle:
    """Answers from a prefix, then always with what is usual, and remembers what else it could have answered."""

    def __init__(self) -> None:
        self._prefix: Answers = ()
        self._answers: list[int] = []
        self._asked: list[tuple[Sequence[int], int]] = []
        self.left = 0
        """Faults that may still happen."""

    def begin(self, prefix: Answers, faults: int) -> None:
        """Start a run that answers `prefix` first, with at most `faults` faults."""
        self._prefix, self.left = prefix, faults
        self._answers, self._asked = [], []

    def choose(self, costs: Sequence[int]) -> int:
        """Return the index of an answer; `costs` says how many faults each takes. The first costs nothing."""
        if len(costs) == 1 or (self.left == 0 and all(costs[1:])):
            return 0
        position = len(self._answers)
        answer = self._prefix[position] if position < len(self._prefix) else 0
        self._answers.append(answer)
        self._asked.append((costs, self.left))
        self.left -= costs[answer]
        return answer

    @property
    def beyond_prefix(self) -> bool:
        """Whether the run goes where no run before it has been."""
        return len(self._answers) >= len(self._prefix)

    @property
    def answers(self) -> Answers:
        """What was answered so far."""
        return tuple(self._answers)

    def alternatives(self) -> Iterator[Answers]:
        """Yield the prefixes of the runs that branch off this one."""
        for position in range(len(self._prefix), len(self._answers)):
            costs, left = self._asked[position]
            for answer in range(1, len(costs)):
                if costs[answer] <= left:
                    yield (*self._answers[:position], answer)
