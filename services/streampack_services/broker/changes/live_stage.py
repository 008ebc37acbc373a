"""Completes a stage that a person asks for: from the rules that it begins with, and from the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.stage_settings import StageSettings, resolved
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.feed.feed import Feed
from streampack.core.model.keys.stage_keys import Stage, StageBegin
from streampack.core.model.mesh import Mesh
from streampack.core.model.rule_changes import apply_change
from streampack.core.model.rules import Rules

_WHOLE = ("align", "balance", "limits")
"""Rules of which a stage records the whole value, completed from the rules before it."""


def rules_at_step(feed: Feed, step: int) -> Rules:
    """Return the rules of a feed at a step, by the changes that have taken effect."""
    before = [change.rules for change in feed.history.changes if change.step <= step]
    return before[-1] if before else feed.planner.live.after(0)


def live_stage(config: BrokerConfig, feeds: Mapping[str, Feed], name: str, settings: StageSettings) -> Stage:
    """Return the stage that a person asks for.

    Args:
        config: The broker's configuration.
        feeds: The feeds, by name.
        name: Name of the feed to change; empty if there is only one.
        settings: The stage as the person wrote it.

    Raises:
        ValueError: The stage is not possible. The core refuses an unknown feed.
    """
    feed = feeds.get(name or next(iter(feeds)), next(iter(feeds.values())))
    begin = StageBegin(step=0) if settings.at is None else settings.at.begin
    rules = _rules_before(feed, begin)
    stage = resolved(settings, rules, config.mesh_terms(feed.name))
    _check_whole(feed, stage, begin)
    readers = feed.readers.registry.last_holders()
    attached = readers[0].mesh if readers else config.planned_mesh
    mesh, whose = (
        (attached, "the trainers") if settings.planned_mesh is None else (settings.planned_mesh, "planned_mesh")
    )
    after = apply_change(rules, stage, begin.step or 0)
    if refusal := mesh_refusal(Mesh(dp=mesh.dp, cp=mesh.cp), after, feed.plan.layout):
        raise ValueError(
            f"{whose} cannot read this stage: {refusal}. If trainers read it on another mesh, ask for the stage with "
            f"`planned_mesh: {{dp: N, cp: N, tp: N}}`, by 'streampack set stage'"
        )
    return stage


def _check_whole(feed: Feed, stage: Stage, begin: StageBegin) -> None:
    """Raise ValueError if a whole value depends on which of two changes comes first, and nobody can know that."""
    for change in feed.history.pending:
        unordered = (change.at.step is None) != (begin.step is None)
        twice = [key for key in _WHOLE if key in stage.rules.keys and key in change.keys]
        if unordered and twice:
            raise ValueError(
                f"rules.{twice[0]}: got a change at {begin} beside change {change.id} ({change.name}) at {change.at}, "
                f"which sets it, too, expected one of them. Which comes first is not known, and each replaces the "
                f"other's value. Begin both at steps, begin both at tokens, or cancel change {change.id}"
            )


def _rules_before(feed: Feed, begin: StageBegin) -> Rules:
    """Return the rules in force where a stage begins, after the changes that wait and begin before it."""
    live, history = feed.planner.live, feed.history
    rules = live.after(len(history.changes))
    for change in sorted(history.pending, key=lambda change: (change.at.step or 0, change.at.tokens or 0, change.id)):
        at = change.at
        is_before = (
            (at.step is not None and at.step <= begin.step)
            if begin.step is not None
            else at.step is not None or (at.tokens or 0) <= (begin.tokens or 0)
        )
        if is_before:
            try:
                rules = apply_change(rules, change.ask, at.step or 0)
            except ValueError:  # it will not take effect
                continue
    return rules
