"""The rollout executor: submissions in, results out, within the staleness budget."""

from .executor import RolloutExecutor
from .values import BlockingEpisode, Episode, Rollout, RolloutStatus

__all__ = ["BlockingEpisode", "Episode", "Rollout", "RolloutExecutor", "RolloutStatus"]
