"""Replies of several workers stay in step, whatever one of them answers."""

from collections import deque
from typing import Any

import pytest

from adapters.transfers.vllm_plugin.replies import in_step


class Queue:
    """A worker's replies."""

    def __init__(self) -> None:
        self.replies: deque[str] = deque()

    def dequeue(self, timeout: float | None = None) -> str:
        """Return the next, which must be there."""
        assert timeout is None
        return self.replies.popleft()


class Executor:
    """vLLM's way of asking: every worker replies, or one for all, and the first failure ends the reading."""

    def __init__(self, workers: int) -> None:
        self.response_mqs = [Queue() for _ in range(workers)]

    @in_step
    def collective_rpc(self, method: str, *, answers: list[str], unique_reply_rank: int | None = None) -> Any:
        """Let the workers reply, and read."""
        del method
        if unique_reply_rank is not None:
            self.response_mqs[unique_reply_rank].replies.append(answers[unique_reply_rank])
            return self.response_mqs[unique_reply_rank].dequeue()
        for queue, answer in zip(self.response_mqs, answers, strict=True):
            queue.replies.append(answer)
        read = []
        for queue in self.response_mqs:
            reply = queue.dequeue(timeout=None)
            if reply.startswith("error"):
                raise RuntimeError(reply)
            read.append(reply)
        return read


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_call_after_a_failure_gets_its_own_replies(failing: int) -> None:
    """The first error is the one that is told, and no reply is left behind it."""
    executor = Executor(3)
    answers = ["one"] * 3
    answers[failing] = "error at first"
    with pytest.raises(RuntimeError, match="error at first"):
        executor.collective_rpc("update_weights", answers=answers)
    assert executor.collective_rpc("finish_weight_update", answers=["two"] * 3) == ["two"] * 3
    assert [type(queue) for queue in executor.response_mqs] == [Queue] * 3


def test_a_reply_for_all_is_the_only_one_waited_for() -> None:
    """While it generates, only one worker replies."""
    executor = Executor(2)
    assert executor.collective_rpc("execute_model", answers=["a", "b"], unique_reply_rank=1) == "b"
    assert [list(queue.replies) for queue in executor.response_mqs] == [[], []]
