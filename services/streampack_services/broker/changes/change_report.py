"""Takes the part of a snapshot about changes of the rules."""

from __future__ import annotations

import math

from msgspec import UNSET

from streampack.core.feed.feed import Feed
from streampack.core.model.keys.stage_keys import Stage, StageRules
from streampack.core.model.rule_changes import Scheduled, describe_change
from streampack.core.model.rules import Rules, RulesChange
from streampack_services.amounts import count_text, counted
from streampack_services.broker.changes.begin_estimate import estimated_steps
from streampack_services.broker.changes.change_status import ChangesStatus, ComingChange, PastChange, RulesInForce

MOST_COMING, MOST_PAST = 64, 8
"""Most changes that a snapshot lists."""


def changes_status(feed: Feed) -> ChangesStatus:
    """Return what a snapshot says of the changes of a feed's rules."""
    history, former = feed.history, feed.planner.former
    names = _names(feed)
    step, rules = former.next_step, former.rules
    begun = [_past(change, names) for change in history.changes if change.step <= step]
    entries = [_again(change, names) for change in history.changes if change.step > step]
    estimated = estimated_steps(feed)
    waiting = [*entries, *(_coming(change, estimated.get(change.id)) for change in history.pending)]
    coming = sorted(waiting, key=_begin)[:MOST_COMING]
    in_force = RulesInForce(
        stage=begun[-1].name if begun else "",
        since_step=begun[-1].step if begun else 0,
        budget=rules.budget_at(step),
        packs=None if rules.batch is not None else rules.packs_at(step),
        window=rules.window,
        limits=rules.limits,
        packer=rules.new_packer().name,
        changed=_changed(feed.rules, rules),
        paused=[stream.name for stream in rules.streams if stream.weight and stream.paused],
    )
    return ChangesStatus(
        in_force=in_force,
        num_coming=len(entries) + len(history.pending),
        coming=coming,
        past=begun[-MOST_PAST:],
        text=_text(in_force, coming) if begun or coming else "",
    )


def _changed(first: Rules, now: Rules) -> StageRules:
    """Return the rules in force that differ from the first ones."""
    keys = [key for key in StageRules.__struct_fields__ if key != "overlong"]
    changed = {key: getattr(now, key) for key in keys if getattr(now, key) != getattr(first, key)}
    ended = [ramp for ramp in ("warmup", "packs_ramp") if ramp in changed and changed[ramp] is None]
    return StageRules(**{key: value for key, value in changed.items() if key not in ended})


def _text(now: RulesInForce, coming: list[ComingChange]) -> str:
    """Return the rules in force and the next change in words."""
    packs = "" if now.packs is None else f", {counted(now.packs, 'pack')} a step"
    paused = f", paused: {', '.join(now.paused)}" if now.paused else ""
    since = f"{now.stage or 'changed'} since step {now.since_step:,}: " if now.stage or now.since_step else ""
    text = f"{since}budget {now.budget:,}{packs}{paused}"
    return f"{text}; next {coming[0].name} {_begin_text(coming[0])}" if coming else text


def _begin_text(change: ComingChange) -> str:
    """Return the begin of a change in words."""
    if change.tokens is None:
        return f"at step {change.step:,}"
    about = "" if change.estimated_step is None else f", about step {change.estimated_step:,}"
    return f"after {count_text(change.tokens)} tokens{about}"


def _names(feed: Feed) -> dict[int, str]:
    """Return the names of all changes, by number."""
    stages = feed.history.rules.stages
    return {number: stage.name for number, stage in enumerate(stages)} | {
        change.id: change.name for change in feed.history.asked
    }


def _past(change: RulesChange, names: dict[int, str]) -> PastChange:
    number = None if change.id is UNSET else change.id
    name = change.note if number is None else names.get(number, change.note)
    return PastChange(id=number, name=name, step=change.step, note=change.note)


def _again(change: RulesChange, names: dict[int, str]) -> ComingChange:
    """Return a change that has its place, in a feed that went back to a step before it."""
    past = _past(change, names)
    return ComingChange(
        id=past.id, name=past.name, what=past.name, step=past.step, tokens=None, estimated_step=None, note=past.note
    )


def _coming(change: Scheduled, estimated: int | None) -> ComingChange:
    description = describe_change(change.ask)
    return ComingChange(
        id=change.id,
        name=change.name,
        what=description.removeprefix("stage ") if isinstance(change.ask, Stage) else description,
        step=change.at.step,
        tokens=change.at.tokens,
        estimated_step=estimated,
        note=change.note,
    )


def _begin(change: ComingChange) -> tuple[float, float]:
    """Return a key that sorts changes by their begins."""
    step = change.estimated_step if change.step is None else change.step
    return math.inf if step is None else step, -1 if change.id is None else change.id
