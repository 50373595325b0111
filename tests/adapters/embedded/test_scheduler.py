"""The scheduler: batching changes nothing about what a request gets."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from adapters.engines.embedded.options import EngineOptions
from adapters.engines.embedded.prefixes import PrefixCache
from adapters.engines.embedded.sampling import sample
from adapters.engines.embedded.scheduler import Scheduler, SchedulerState
from adapters.engines.embedded.sequence import Completion, Finish, SamplingParams, Sequence, Span

from .client import PROMPT, greedy
from .conftest import make_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from adapters.engines.embedded import CausalLM

GREEDY = SamplingParams(temperature=0.0)


class Run:
    """A scheduler, and requests to it that can be waited for."""

    def __init__(self, model: CausalLM, **options: Any) -> None:
        self.deaths: list[BaseException] = []
        self.scheduler = Scheduler(
            model,
            EngineOptions(**options),
            scaled_logprobs=True,
            version="v0",
            seed=0,
            on_death=self.deaths.append,
            shortest_prefix=1,
        )

    def submit(
        self, prompt: list[int], limit: int, params: SamplingParams = GREEDY, stops: tuple[int, ...] = ()
    ) -> Job:
        """Queue a request."""
        job = Job(prompt, limit, params, stops)
        self.scheduler.submit(job.sequence)
        return job


class Job:
    """A request; every token counts down to whoever waits."""

    def __init__(self, prompt: list[int], limit: int, params: SamplingParams, stops: tuple[int, ...]) -> None:
        self._news = threading.Condition()
        generator = None if params.seed is None else torch.Generator().manual_seed(params.seed)
        self.sequence = Sequence(
            request_id="",
            prompt=prompt,
            params=params,
            limit=limit,
            stops=frozenset(stops),
            stream=True,
            notify=self._notify,
            generator=generator,
        )

    def wait(self, tokens: int | None = None) -> Completion:
        """Wait for that many tokens, or for the end."""
        with self._news:
            done = self._news.wait_for(
                lambda: (
                    self.sequence.finish is not None or (tokens is not None and len(self.sequence.logprobs) >= tokens)
                ),
                timeout=20,
            )
        assert done
        return self.sequence.snapshot()

    def _notify(self, _: Sequence) -> None:
        with self._news:
            self._news.notify_all()


@contextmanager
def running(model: CausalLM, **options: Any) -> Iterator[Run]:
    """Run a scheduler for the length of a block; it must end when asked."""
    run = Run(model, **options)
    run.scheduler.start()
    try:
        yield run
    finally:
        assert run.scheduler.stop(5)


def test_greedy_tokens_are_those_of_the_model_alone(old_model: CausalLM) -> None:
    """Requests of all lengths, batched as they come, get the model's own most probable tokens and their logprobs."""
    lengths = [(1 + index * 7 % 23, 1 + index * 5 % 17) for index in range(24)]
    with running(old_model, max_running_requests=7, max_prefill_tokens=60) as run:
        jobs = [run.submit([(index * 3 + at) % 64 for at in range(n)], k) for index, (n, k) in enumerate(lengths)]
        for job in jobs:
            completion, prompt = job.wait(), job.sequence.prompt
            assert completion.tokens == greedy(old_model, prompt, job.sequence.limit)
            logprobs = old_model(torch.tensor([prompt + completion.tokens]))[0].log_softmax(-1)
            chosen = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(completion.tokens).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(torch.tensor(completion.logprobs), chosen, atol=1e-4, rtol=1e-4)
            assert completion.finish == Finish("length")


def test_no_more_than_the_limit_run_together(old_model: CausalLM) -> None:
    """With room for three, the fourth request waits."""
    with running(old_model, max_running_requests=3, forward_sleep_seconds=0.005) as run:
        jobs = [run.submit(PROMPT, 20) for _ in range(5)]
        jobs[0].wait(tokens=1)
        counts = run.scheduler.call(lambda: (len(run.scheduler.batch), len(run.scheduler.waiting))).result(5)
        assert counts == (3, 2)
        assert all(len(job.wait().tokens) == 20 for job in jobs)


def test_a_stop_token_ends_a_request_and_is_part_of_it(old_model: CausalLM) -> None:
    """Generation ends with the stop token, which is named as the reason."""
    expected = greedy(old_model, PROMPT, 30)
    stop = expected[10]
    with running(old_model) as run:
        completion = run.submit(PROMPT, 30, stops=(stop,)).wait()
    assert completion.tokens == expected[: expected.index(stop) + 1]
    assert completion.finish == Finish("stop", matched=stop)


def test_a_seed_gives_the_same_tokens_in_any_company(old_model: CausalLM) -> None:
    """A seeded request alone and among others gets the same tokens; another seed gets others."""
    seeded = SamplingParams(seed=11)
    with running(old_model) as run:
        alone = run.submit(PROMPT, 20, seeded).wait().tokens
        jobs = [run.submit([1, 2], 20, SamplingParams()), run.submit(PROMPT, 20, seeded)]
        other = run.submit(PROMPT, 20, SamplingParams(seed=12)).wait().tokens
        assert jobs[1].wait().tokens == alone
        assert other != alone


def test_a_retracted_request_goes_on_as_if_nothing_had_happened(old_model: CausalLM) -> None:
    """Keys and values that were dropped are computed again: the tokens stay the model's own."""
    with running(old_model, forward_sleep_seconds=0.002) as run:
        job = run.submit(PROMPT, 40)
        job.wait(tokens=5)
        assert run.scheduler.call(run.scheduler.retract).result(5) == 1
        assert job.wait().tokens == greedy(old_model, PROMPT, 40)
        assert job.sequence.retractions == 1


def test_a_retracted_request_goes_before_those_that_never_ran(old_model: CausalLM) -> None:
    """Of two requests that wait, the one that had run comes first."""
    with running(old_model, max_running_requests=1, forward_sleep_seconds=0.002) as run:
        first, second = run.submit(PROMPT, 20), run.submit(PROMPT, 5)
        first.wait(tokens=2)

        def retract() -> list[Sequence]:
            run.scheduler.retract()
            return list(run.scheduler.waiting)

        assert run.scheduler.call(retract).result(5) == [first.sequence, second.sequence]
        assert (first.wait().finish, second.wait().finish) == (Finish("length"), Finish("length"))


def test_a_request_keeps_its_temperature_when_slots_move(old_model: CausalLM) -> None:
    """A greedy request that moves into the slot of a finished random one stays greedy."""
    with running(old_model) as run:
        jobs = [run.submit([1], 3, SamplingParams(temperature=5.0)) for _ in range(4)]
        jobs.append(run.submit(PROMPT, 30))
        assert jobs[-1].wait().tokens == greedy(old_model, PROMPT, 30)


@pytest.mark.parametrize("recompute", [True, False])
def test_only_a_recomputed_cache_gives_the_new_models_tokens(recompute: bool) -> None:
    """After an update, a kept request continues as the new model would if its cache was dropped, and not otherwise."""
    model, new_model = make_model(1), make_model(2)
    with running(model) as run:
        scheduler = run.scheduler
        job = run.submit(PROMPT * 4, 60)
        job.wait(tokens=5)

        def update() -> int:
            scheduler.set_state(SchedulerState.PAUSED_ALL)
            if recompute:
                scheduler.retract()
            model.load_state_dict(new_model.state_dict())
            scheduler.set_version("v1")
            scheduler.set_state(SchedulerState.UNPAUSED)
            return len(job.sequence.output)

        made = scheduler.call(update).result(5)
        completion = job.wait()
    assert completion.spans == [Span("v0", 0, made), Span("v1", made, 60)]
    continued = completion.tokens[made:] == greedy(new_model, PROMPT * 4 + completion.tokens[:made], 60 - made)
    assert continued is recompute


def test_calls_are_carried_out_in_order(old_model: CausalLM) -> None:
    """What is posted first is done first, requests and calls alike."""
    with running(old_model) as run:
        order: list[int] = []
        futures = [run.scheduler.call(lambda index=index: order.append(index)) for index in range(50)]  # type: ignore[misc]
        job = run.submit(PROMPT, 1)
        assert run.scheduler.call(lambda: len(run.scheduler.waiting) + len(job.sequence.output)).result(5) == 1
        assert all(future.done() for future in futures)
        assert order == list(range(50))


def test_an_error_in_a_call_belongs_to_its_caller(old_model: CausalLM) -> None:
    """A call that raises hands the error over, and the scheduler goes on."""
    with running(old_model) as run:
        with pytest.raises(ZeroDivisionError):
            run.scheduler.call(lambda: 1 // 0).result(5)
        assert run.submit(PROMPT, 3).wait().finish == Finish("length")
        assert run.deaths == []


def test_cached_prompts_join_a_running_batch(old_model: CausalLM) -> None:
    """Requests with cached and new prompts, all at once, get the model's own tokens."""
    prompts = [[index, *PROMPT[: index % 4]] for index in range(12)]
    with running(old_model) as run:
        for prompt in prompts[::2]:
            run.submit(prompt, 2).wait()
        jobs = [run.submit(prompt, 15) for prompt in prompts]
        assert [job.wait().tokens for job in jobs] == [greedy(old_model, prompt, 15) for prompt in prompts]
        cached = [len(prompt) - 1 if index % 2 == 0 else 0 for index, prompt in enumerate(prompts)]
        assert [job.sequence.cached_tokens for job in jobs] == cached


def test_the_prefix_cache_forgets_the_least_recently_used() -> None:
    """It holds no more bytes than it may, and keeps what was asked for last."""
    cache, entry = PrefixCache(1, max_bytes=8), torch.zeros(1)
    cache.keep([1, 1], entry)
    cache.keep([2, 2], entry)
    assert cache.find([1, 1]) is entry
    cache.keep([3, 3], entry)
    assert (cache.find([2, 2]), cache.find([1, 1]), cache.find([3, 3])) == (None, entry, entry)
    assert (cache.wants([3, 3]), cache.wants([4]), cache.wants([2, 2])) == (False, False, True)
    assert PrefixCache(None).wants([2, 2]) is False


@pytest.mark.parametrize("scaled", [True, False])
def test_logprobs_are_raw_or_scaled_by_the_temperature(scaled: bool) -> None:
    """SGLang's log-probabilities are those after the temperature, vLLM's those before; a cut changes neither."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5]])
    tokens, logprobs = sample(
        logits,
        temperature=torch.tensor([0.5]),
        top_k=torch.tensor([2]),
        top_p=torch.tensor([1.0]),
        scaled_logprobs=scaled,
        generator=torch.Generator().manual_seed(0),
    )
    expected = (logits / (0.5 if scaled else 1.0)).log_softmax(-1)[0, tokens[0]]
    torch.testing.assert_close(logprobs[0], expected)


def test_samples_follow_the_distribution_and_its_cuts() -> None:
    """Frequencies agree with the softmax; tokens outside top-k and top-p are never chosen; temperature 0 is greedy."""
    rows = 4000
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).repeat(4 * rows, 1)
    tokens, _ = sample(
        logits,
        temperature=torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat_interleave(rows),
        top_k=torch.tensor([4, 2, 4, 4]).repeat_interleave(rows),
        top_p=torch.tensor([1.0, 1.0, 0.7, 1.0]).repeat_interleave(rows),
        scaled_logprobs=True,
        generator=torch.Generator().manual_seed(0),
    )
    frequencies = torch.stack([torch.bincount(part, minlength=4) / rows for part in tokens.split(rows)])  # type: ignore[no-untyped-call]
    expected = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.625, 0.375, 0, 0], [0.625, 0.375, 0, 0], [1.0, 0, 0, 0]])
    torch.testing.assert_close(frequencies, expected, atol=0.03, rtol=0)
    assert torch.equal(frequencies == 0, expected == 0)
