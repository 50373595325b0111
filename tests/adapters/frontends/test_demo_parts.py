"""The parts of the demo: a task that can be judged, a trainer that learns it, rollouts handed over in order."""

import io
import random
from itertools import islice

import pytest
import torch
from rich.console import Console

from adapters.frontends.demo import task
from adapters.frontends.demo.display import Display, Progress
from adapters.frontends.demo.rollouts import answer, groups_of, prompts
from adapters.frontends.demo.run import Record, summary
from adapters.frontends.demo.trainer import Group, Sample, Trainer, _advantages, _padded, new_model
from lifecycle import Lifecycle, RolloutExecutor, StalenessBudget
from lifecycle.testing import ScriptedEngine
from lifecycle.trace import Verdict

GROUP = 4

# ----------------------------------------------------------------------------------------------------------------- task


def test_prompts_are_symbols_and_a_separator() -> None:
    """A prompt is four symbols and the separator, the same for the same seed."""
    prompts = [task.draw_prompt(random.Random(seed)) for seed in range(50)]
    assert {len(prompt) for prompt in prompts} == {task.LENGTH + 1}
    assert {prompt[-1] for prompt in prompts} == {task.SEPARATOR}
    assert all(0 <= symbol < task.SYMBOLS for prompt in prompts for symbol in prompt[:-1])
    assert prompts == [task.draw_prompt(random.Random(seed)) for seed in range(50)]
    assert len(set(prompts)) == 50


@pytest.mark.parametrize(
    ("output", "worth"),
    [
        ((3, 1, 4, 1, task.END), 1.0),
        ((3, 1, 4, 1), 0.8),
        ((3, 1, 4, 1, 5, task.END), 0.8),
        ((1, 3, 4, 1, task.END), 0.6),
        ((task.END,), 0.0),
        ((), 0.0),
    ],
)
def test_the_reward_is_the_share_of_right_positions(output: tuple[int, ...], worth: float) -> None:
    """Each symbol in its place counts, and so does the end right after them."""
    assert task.reward((3, 1, 4, 1, task.SEPARATOR), output) == worth


# -------------------------------------------------------------------------------------------------------------- trainer


def _sample(output: tuple[int, ...], reward: float, *, version: int = 0, logprob: float = -3.4) -> Sample:
    return Sample(
        prompt=(3, 1, 4, 1, task.SEPARATOR),
        output=output,
        logprobs=(logprob,) * len(output),
        versions=(version,) * len(output),
        reward=reward,
    )


def test_equal_rewards_teach_nothing() -> None:
    """Where every sample of a group is worth the same there is nothing to prefer: all advantages are 0."""
    group = Group(samples=tuple(_sample((3, 1), 0.4) for _ in range(GROUP)))
    assert _advantages(group).tolist() == [0.0] * GROUP


def test_advantages_compare_within_the_group() -> None:
    """Better samples than the group's mean are to become likelier, worse ones less so, and they balance."""
    group = Group(samples=(_sample((3,), 1.0), _sample((1,), 0.2), _sample((2,), 0.2), _sample((4,), 0.2)))
    best, *others = _advantages(group).tolist()
    assert best > 1.0
    assert others == [others[0]] * 3
    assert others[0] < 0
    assert best + sum(others) == pytest.approx(0.0, abs=1e-5)


def test_only_generated_tokens_are_trained_on() -> None:
    """Prompt and padding are masked; each generated token keeps its behaviour log-probability."""
    samples = [_sample((3, 1, 4), 1.0), _sample((9,), 0.0, logprob=-1.5)]
    tokens, targets, mask, behaviour = _padded(samples)
    assert [tuple(part.shape) for part in (tokens, targets, mask, behaviour)] == [(2, 7)] * 4
    assert targets[mask.bool()].tolist() == [3, 1, 4, 9]
    assert behaviour[mask.bool()].tolist() == pytest.approx([-3.4, -3.4, -3.4, -1.5])
    assert behaviour[~mask.bool()].count_nonzero() == 0
    assert tokens[0, :5].tolist() == [3, 1, 4, 1, task.SEPARATOR]


def _log_probability(model: torch.nn.Module, sample: Sample) -> float:
    tokens, targets, mask, _ = _padded([sample])
    with torch.no_grad():
        chosen = torch.log_softmax(model(tokens).float(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return float((chosen * mask).sum())


def test_training_makes_what_is_rewarded_likelier() -> None:
    """After a few steps on one batch the right answer is likelier than before, and the wrong ones are less likely."""
    model = new_model(seed=0)
    right = _sample((3, 1, 4, 1, task.END), 1.0)
    wrong = [_sample((symbol, 7, symbol, 7, 7), 0.0) for symbol in (8, 9, 10)]
    trainer, before = Trainer(model), [_log_probability(model, sample) for sample in (right, *wrong)]
    rewards = {trainer.step([Group(samples=(right, *wrong))]) for _ in range(8)}
    after = [_log_probability(model, sample) for sample in (right, *wrong)]
    assert rewards == {0.25}
    assert after[0] > before[0] + 0.2
    assert all(now < then for now, then in zip(after[1:], before[1:], strict=True))


# ------------------------------------------------------------------------------------------------------------- rollouts


def test_prompts_are_the_same_for_the_same_seed() -> None:
    """Two runs of one seed train on the same prompts, in the same order."""
    assert list(islice(prompts(3), 20)) == list(islice(prompts(3), 20))
    assert len(set(islice(prompts(3), 20))) == 20


@pytest.mark.anyio
async def test_a_batch_is_whole_groups() -> None:
    """Each group holds the samples of one prompt, judged, with a log-probability and a version for every token."""
    budget = StalenessBudget(batch_size=2 * GROUP, max_staleness=1)
    async with (
        Lifecycle([ScriptedEngine("E1")], budget=budget) as lifecycle,
        RolloutExecutor(lifecycle, group_size=GROUP) as executor,
    ):
        groups = groups_of(await executor.batch(prompts(0), answer))
    assert [len(group.samples) for group in groups] == [GROUP, GROUP]
    for group in groups:
        assert len({sample.prompt for sample in group.samples}) == 1
        for sample in group.samples:
            assert len(sample.logprobs) == len(sample.versions) == len(sample.output)
            assert sample.reward == task.reward(sample.prompt, sample.output)


# -------------------------------------------------------------------------------------------------- display and summary


def _progress(step: int) -> Progress:
    return Progress(step=step, steps=100, reward=0.987, pause_seconds=12.3456, staleness=2, dropped=100)


@pytest.mark.anyio
async def test_without_a_terminal_a_step_is_a_line() -> None:
    """A line every ten steps, with the first and the last, none longer than 80 columns."""
    out = io.StringIO()
    async with Lifecycle([ScriptedEngine("E1")], budget=StalenessBudget(batch_size=512, max_staleness=2)) as lifecycle:
        with Display(lifecycle, Console(file=out, width=40)) as display:
            for step in range(1, 101):
                display.show(_progress(step))
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/100" for step in (1, *range(10, 101, 10))]
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "step 100/100  reward 0.987  RUNNING  pause 12346 ms  capacity 1536  staleness 2"


@pytest.mark.anyio
@pytest.mark.parametrize("engines", [1, 16])
async def test_on_a_terminal_the_table_fits(engines: int) -> None:
    """The live table shows state, version, engines and learning within 80 columns, however many engines there are."""
    fleet = [ScriptedEngine(f"engine-{number}") for number in range(engines)]
    async with Lifecycle(fleet, budget=StalenessBudget(batch_size=512, max_staleness=2)) as lifecycle:
        display = Display(lifecycle, Console(file=io.StringIO(), width=80))
        for step in range(1, 101):
            display.show(_progress(step))
        out = io.StringIO()
        Console(file=out, width=80).print(display._table())
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert all(part in shown for part in ("RUNNING", "version", "100 of 100", "0.987", "12346 ms", "2 versions"))
    assert all(f"engine-{number}" in shown for number in range(engines))


def test_a_summary_of_nothing_has_every_key() -> None:
    """Ended before the first step, the summary says so with the same keys."""
    empty = summary(Record(), Verdict())
    assert (empty["steps"], empty["reward_first"], empty["bytes_per_publication"]) == (0, None, None)
    assert empty["verdict"].startswith("sound")
