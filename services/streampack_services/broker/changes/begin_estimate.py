"""The steps at which stages that wait for tokens are likely to begin.

The last recorded steps say how full steps are, compared with the room that their rules gave them. The steps to come
have the room of the rules that will hold then, also while the budget or the number of packs grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from streampack.core.feed.feed import Feed
from streampack.core.model.keys.stage_keys import Stage, StageBegin
from streampack.core.model.rule_changes import Scheduled, apply_change
from streampack.core.model.rules import Rules
from streampack_services.broker.changes.live_stage import rules_at_step

NO_CHANGE = -1
"""Stands for the number of a change that is none: the end of the feed."""
_PARTS = 16
"""A ramp is estimated in parts of this share of its rest."""


class Pace(NamedTuple):
    """The next step of a feed, and how fast its tokens grow: the arguments of ``estimate``."""

    rules: Rules
    step: int
    tokens: int
    fill: float


def pace_of(feed: Feed) -> Pace | None:
    """Return the pace of the last steps of a feed; None before the first batch."""
    trained, step = feed.history.trained, feed.planner.former.next_step
    room = sum(_room(rules_at_step(feed, number), number) for number in trained.last_steps)
    if not room and feed.rules.batch is not None:
        return None
    fill = int(trained.last_sums[1].sum()) / room if room else 1.0
    merged = int(feed.planner.merge.current.merged_tokens.sum())
    tokens = merged - sum(num_tokens for _, num_tokens in feed.planner.waiting_lengths.rows())
    return Pace(rules_at_step(feed, step), step, tokens, fill)


def estimated_steps(feed: Feed) -> dict[int, int]:
    """Return the likely first step of each change that waits for tokens, by its number; without those not known yet."""
    pending = feed.history.pending
    if all(change.at.tokens is None for change in pending) or (pace := pace_of(feed)) is None:
        return {}
    return estimate(pace.rules, pending, pace.step, pace.tokens, pace.fill)


def steps_of(feed: Feed, pace: Pace, tokens: float) -> int:
    """Return the likely number of steps that ``tokens`` more tokens make, with the stages that begin meanwhile."""
    at = StageBegin(tokens=pace.tokens + max(math.ceil(tokens), 0))
    end = Scheduled(NO_CHANGE, Stage(at=at), at)
    return estimate(pace.rules, [*feed.history.pending, end], pace.step, pace.tokens, pace.fill)[NO_CHANGE] - pace.step


def estimate(rules: Rules, pending: Sequence[Scheduled], step: int, tokens: float, fill: float) -> dict[int, int]:
    """Return the likely first step of each change that waits for tokens, by its number.

    Args:
        rules: The rules of ``step``.
        pending: Changes that wait.
        step: The next step.
        tokens: Tokens in the steps before it.
        fill: Tokens of a step, as a share of its room; for batches, its tokens.
    """
    steps: dict[int, int] = {}
    at_step = sorted(
        (change for change in pending if change.at.step is not None), key=lambda change: change.at.step or 0
    )
    at_tokens = sorted(
        (change for change in pending if change.at.step is None), key=lambda change: change.at.tokens or 0
    )
    while at_tokens and fill > 0:
        if at_step and (at_step[0].at.step or 0) <= step:
            rules = _changed(rules, at_step.pop(0), step)
            continue
        left = (at_tokens[0].at.tokens or 0) - tokens
        if left <= 0:
            steps[at_tokens[0].id] = step
            rules = _changed(rules, at_tokens.pop(0), step)
            continue
        grows = [ramp.begin + ramp.steps - step for ramp in (rules.warmup, rules.packs_ramp) if ramp is not None]
        rest = max(grows, default=0)
        most = math.inf if not at_step else (at_step[0].at.step or 0) - step
        if rest > 0:
            most = min(most, max(rest // _PARTS, 1))
        of_step = fill * _room(rules, step + (int(most) // 2 if rest > 0 else 0))
        count = int(min(most, math.ceil(left / of_step)))
        step, tokens = step + count, tokens + count * of_step
    return steps


def _changed(rules: Rules, change: Scheduled, step: int) -> Rules:
    """Return the rules after a change; those before if it will not take effect."""
    try:
        return apply_change(rules, change.ask, step)
    except ValueError:
        return rules


def _room(rules: Rules, step: int) -> int:
    """Return the tokens for which a step has room; 1 for a batch, whose tokens no rule bounds."""
    return 1 if rules.batch is not None else rules.packs_at(step) * rules.budget_at(step)
