"""The live page in a headless Chromium, of real brokers with producers and ranks: what it shows is what ``/status``
says, nothing lies over anything else, and all can be read; whether the broker serves, has begun, has ended or is gone.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from streampack_services.broker.causes.headline import Headline
from streampack_services.broker.changes.change_status import PastChange
from streampack_services.broker.ranks.rank_status import SlowRank
from streampack_services.broker.status import LateStatus, MediaStatus

from streampack.core.model.keys.planning_keys import MediaLimits
from tests.integration.many_ranks import many_ranks
from tests.integration.running import PATIENCE_S, producing_here, until
from tests.integration.simulated_ranks import simulated
from tests.integration.watched import Texts, Watched, large, small, watched
from tests.integration.watching.chromium import Browser, Page

WIDTHS = ((1440, 900), (390, 844))
CHARTS = ("speed", "padding", "waits", "lengths", "fills")
MANY = 512
SEEN = (Path(__file__).parent / "page_seen.js").read_text().strip()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """4 ranks, 2 streams and a log; it has served a while, and says from then on what it has said last."""
    with small(tmp_path_factory.mktemp("state")) as broker:
        until(lambda: broker.status()["feeds"]["train"]["steps"]["returned"] > 30)
        until(lambda: all(row["data_wait"] for row in broker.status()["feeds"]["train"]["readers"]))
        broker.held = broker.service.snapshot
        yield broker


@pytest.fixture(scope="module")
def page(browser: Browser, four: Watched) -> Page:
    return opened(browser, four)


def opened(browser: Browser, broker: Watched) -> Page:
    """The page, once it has shown something."""
    page = browser.page(broker.url)
    page.until("document.body.dataset.shown > 0")
    return page


def fetched(url: str) -> Any:
    """The JSON there."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def top_of(page: Page, name: str) -> float:
    """The place of an element from the top of the page, in pixels."""
    found: float = page.value(f"document.getElementById({json.dumps(name)}).getBoundingClientRect().top")
    return found


def tile(page: Page, key: str) -> str:
    return page.text(f"[data-figure={key}] dd")


def shown_again(page: Page) -> None:
    """What is said from now on is on the page."""
    page.until(f"document.body.dataset.shown > {page.value('document.body.dataset.shown')} + 1")


WIDER = """(width) => document.documentElement.scrollWidth <= width ? [] : [...document.querySelectorAll("body *")]
    .filter((each) => each.getBoundingClientRect().right > width)
    .map((each) => `${each.tagName} ${each.id} ${each.className} ${each.textContent.slice(0, 80)}`)"""
"""What reaches beyond a page that is wider than its window."""


def check_layout(page: Page) -> None:
    """No text upon another or beyond the page, and each of a contrast that WCAG 2 (1.4.3) asks for."""
    for width, height in WIDTHS:
        page.resize(width, height)
        shown_again(page)
        assert page.value(f"({WIDER})({width})") == []
        for scheme in ("dark", "light"):
            page.prefer(scheme)
            texts: list[tuple[str, str, float, float, float, float, float]] = page.value(f"{SEEN}.texts()")
            assert len(texts) > 50
            pale = [(words, where, contrast) for words, where, *_, contrast in texts if contrast < 4.5]
            assert not pale, (scheme, pale)
        boxes = sorted((box for box in texts), key=lambda box: box[3])
        for number, (words, where, left, top, right, bottom, _) in enumerate(boxes):
            for other in boxes[number + 1 :]:
                if other[3] >= bottom - 1:
                    break
                apart = other[2] >= right - 1 or other[4] <= left + 1 or other[5] <= top + 1
                assert apart, f"at {width}: {words!r} ({where}) and {other[0]!r} ({other[1]}) lie upon one another"
    page.resize(*WIDTHS[0])


def test_a_page_that_is_opened_late_shows_what_was_in_every_chart(page: Page) -> None:
    assert page.value("[...document.querySelectorAll('.chart.has-data')].map((each) => each.id)") == list(CHARTS)
    for chart in CHARTS:
        page.until(f"{SEEN}.drawn('{chart}') > 100")
        assert page.value(f"document.querySelector('#{chart}').getAttribute('aria-label')")


def test_every_section_is_named_by_its_heading(page: Page) -> None:
    named = """[...document.querySelectorAll("section, [role=region]")].map(
        (each) => document.getElementById(each.getAttribute("aria-labelledby"))?.tagName)"""
    assert set(page.value(named)) == {"H2"}


def test_the_page_asks_nobody_else_and_nothing_is_wrong(page: Page, four: Watched) -> None:
    assert page.problems == []
    assert {url for url in page.requests if not url.startswith((four.url + "/", "data:"))} == set()
    blocked = page.value("fetch('https://example.com/').then(() => 'sent', () => 'refused')")
    assert blocked == "refused", "the page's policy lets it ask others"
    page.problems.clear()


def test_the_figures_are_those_of_the_status(page: Page, four: Watched) -> None:
    now = four.status()
    feed = now["feeds"]["train"]
    assert page.text("#run") == now["run"] == "sft-8b"
    assert page.text("#state") == now["state"] == "serving"
    assert now["version"] in page.text("#version")
    assert tile(page, "returned") == f"{feed['steps']['returned']:,}"
    assert f"{feed['steps']['formed']:,} formed" in page.text("[data-figure=returned] .note")
    assert float(tile(page, "utilization").rstrip("%")) == pytest.approx(100 * feed["figures"]["utilization"], abs=5e-4)
    assert f"{feed['totals']['packs']:,} packs" in page.text("[data-figure=utilization] .note")
    ranks = feed["ranks"]
    waited = sum(ranks["starved_s"].values())
    since = f"{100 * waited / (waited + ranks['trainer_s']):.2f}".rstrip("0").rstrip(".")
    assert page.text("[data-figure=data_wait] .note").endswith(f"all ranks {since}% since the start")
    heads = [page.text(f"#streams th:nth-child({n})") for n in range(2, 9)]
    assert heads == [
        "weight", "share now", "recent share", "share trained", "tokens trained", "tokens received", "samples received"
    ]  # fmt: skip
    assert page.text("#longest-waits caption") == "Ranks with the longest data wait in the last minute"
    assert tile(page, "ranks") == "4"
    assert page.text("[data-figure=ranks] .note") == "of 4 ranks that read the feed"
    assert tile(page, "producers") == str(now["producers"])
    assert float(tile(page, "cost")) == pytest.approx(feed["figures"]["step_cost_max_over_mean"], abs=5e-5)
    waits = [row["data_wait"] for row in feed["readers"]]
    assert float(tile(page, "data_wait").rstrip("%")) == pytest.approx(100 * max(waits), abs=5e-3)
    rate = float(tile(page, "tokens_per_s").replace("k", "e3").replace("M", "e6"))
    assert rate == pytest.approx(feed["tokens_per_s"], rel=6e-3)
    assert page.text("#notice") == feed["headline"]["text"]
    cells = "[...document.querySelectorAll('#streams tbody tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    rows = page.value(cells)
    assert [(row[0], *row[5:8]) for row in rows] == [
        (row["stream"], *(f"{row[key]:,}" for key in ("trained_tokens", "tokens", "samples"))) for row in now["streams"]
    ]
    for column, key in ((3, "recent_share"), (4, "trained_share")):
        shares = [float(row[column].rstrip("%")) for row in rows]
        assert shares == pytest.approx([100 * row[key] for row in now["streams"]], abs=5e-3)
    assert {row[2] for row in rows} <= {"ended", *(f"{100 * row['share']:g}%" for row in now["streams"])}
    assert all(re.fullmatch(r"[\d.kM]+ \([\d.kM]+\)", row[10]) for row in rows), "lag: tokens, with samples beside them"
    room = page.text("#room")
    assert f"{now['log']['records']:,} records" in room
    assert f"{feed['window']['samples']:,} samples" in room
    moved = feed["displacement"]
    assert f"at most {moved['early']} early and {moved['late']} late" in room
    assert "mean length, last 100 steps" in room
    assert page.value("[...document.querySelectorAll('#room dd')].every((value) => value.textContent)"), (
        "a row is empty"
    )
    packs = f"{sum(number for _, number in feed['fills']):,} packs formed"
    assert packs in page.text("#about-fills")
    assert f"{feed['totals']['samples']:,} samples" in page.text("#about-lengths")
    assert "all 4 ranks are ready" in page.text("#events")


def test_charts_over_time_follow_from_what_the_broker_noted(page: Page, four: Watched) -> None:
    """A rate is over the last row that lies as far back as it is smoothed over, or the one before, or the first."""
    script = """import("/web/history.js").then(async ({ History }) => {
      const history = new History("train");
      await history.catchUp();
      await history.catchUp(); // what was there is not there twice
      const drawn = history.window(RANGE);
      return { times: drawn.times, smooth: drawn.smooth, tokens: drawn.rise("tokens"), seconds: drawn.rise("second") };
    })"""
    for seconds in ("600", "2", "Infinity"):
        drawn = page.value(script.replace("RANGE", seconds))
        found = fetched(four.url + "/history")
        rows = [(row[0] + found["began"], row[1]) for row in found["feeds"]["train"]]
        rows = [row for row in rows if row[0] < drawn["times"][-1] + 0.01]  # there may be one more by now
        first = len(rows) - len(drawn["times"])
        assert drawn["times"] == pytest.approx([row[0] for row in rows[first:]], abs=0.01)
        assert drawn["smooth"] == 5
        for at, (rise, over) in enumerate(zip(drawn["tokens"], drawn["seconds"], strict=True), first):
            far = [back for back in range(at) if rows[back][0] <= rows[at][0] - 5]
            before = max(far, default=0)
            if at == 0:
                assert rise is None
            else:
                assert rise == rows[at][1] - rows[before][1]
                assert over == pytest.approx(rows[at][0] - rows[before][0], abs=0.01)


def test_figures_are_written_as_people_read_them(page: Page) -> None:
    cases = {
        "count": {0: "0", 999: "999", 1234567: "1,234,567"},
        "short": {0: "0", 0.25: "0.25", 7: "7", 999: "999", 999.7: "1k", 1000: "1k", 379_321: "379k", 5.04e6: "5.04M"},
        "percent": {0: "0%", 1: "100%", 0.99853: "99.853%", 0.5: "50%"},
        "fewPercent": {0: "0%", 0.00013: "0.013%", 0.2: "20%", 0.054: "5.4%", 1: "100%", 1e-7: "0.00001%"},
        "bytes": {0: "0 B", 1023: "1,023 B", 1024: "1 KiB", 17.4 * 2**20: "17.4 MiB", 200 * 2**30: "200 GiB"},
        "duration": {
            0: "0 s",
            0.0123: "12.3 ms",
            5: "5 s",
            59: "59 s",
            75: "1 min 15 s",
            3600: "1 h",
            90061: "1 d 1 h",
        },
    }
    found = page.value(
        f"""import("/web/format.js").then((format) => Object.fromEntries(
        Object.entries({json.dumps(cases)}).map(([name, values]) => [
          name, Object.fromEntries(Object.keys(values).map((value) => [value, format[name](Number(value))]))])))"""
    )
    assert found == json.loads(json.dumps(cases))


def test_the_steps_that_are_left_are_said_with_the_time_that_they_take(page: Page, four: Watched) -> None:
    script = """Promise.all([import("/web/words.js"), fetch("/status").then((answer) => answer.json())]).then(
      ([{ showTiles }, status]) => {
        const feed = status.feeds.train;
        const readers = feed.readers.map((row, index) => ({ ...row, step_s: 0.5 + index }));
        return [LEFT].map((steps_left) => {
          showTiles(status, { ...feed, readers, steps_left });
          return document.querySelector("[data-figure=returned] .note").textContent;
        });
      })"""
    left = [None, {"estimate": 100, "low": 100, "high": 100}, {"estimate": 2000, "low": 1500, "high": 2500}]
    formed = f"{four.status()['feeds']['train']['steps']['formed']:,} formed"
    assert page.value(script.replace("LEFT", ", ".join(map(json.dumps, left)))) == [
        formed, f"{formed}, 100 left: 5 min 50 s", f"{formed}, 1.5k to 2.5k left: 1 h 56 min",
    ]  # fmt: skip


def test_the_page_shows_the_silent_ones_of_thousands_of_streams(page: Page, four: Watched) -> None:
    script = """Promise.all([import("/web/words.js"), fetch("/status").then((answer) => answer.json())]).then(
      ([{ showStreams }, { streams }]) => {
        const named = (n) => ({ ...streams[0], stream: `s${n}`, last_seen_s: n % 1000 ? 1 : null });
        const rows = [...Array(3000).keys()].map(named);
        showStreams(rows);
        return [...document.querySelectorAll("#streams tbody tr")].map((row) => row.cells[0].textContent);
      })"""
    assert page.value(script) == ["s0", "s1000", "s2000", *(f"s{n}" for n in range(1, 98))]
    assert "100 of 3,000" in page.text("#about-streams")
    shown_again(page)
    assert page.text("#about-streams") == ""


def test_samples_that_wait_for_late_fields_are_shown_where_there_are_such_fields(page: Page, four: Watched) -> None:
    assert page.value("document.getElementById('late').hidden")
    now = four.held
    assert now is not None
    late = LateStatus(samples=1234, oldest_s=75.0, fields=["advantages", "reward"])
    rows = [replace(now.streams[0], late=late, rejected={"late_timeout": 5}), now.streams[1]]
    none = replace(rows[1], stream="more", late=LateStatus(samples=0, oldest_s=0.0, fields=[]))
    four.held = replace(now, streams=[*rows, none])
    try:
        page.until("!document.getElementById('late').hidden")
        script = "[...document.querySelectorAll('#late-streams tbody tr')].map((row) => [...row.cells].map(TEXT))"
        assert page.value(script.replace("TEXT", "(cell) => cell.textContent")) == [
            [rows[0].stream, "1,234", "1 min 15 s", "advantages, reward", "5"], ["more", "0", "none waits", "", "0"],
        ]  # fmt: skip
        assert top_of(page, "title-late") == top_of(page, "title-room"), "the room is beside them"
        check_layout(page)
    finally:
        four.held = now
    page.until("document.getElementById('late').hidden")


def test_warnings_about_samples_are_shown_by_stream(page: Page, four: Watched) -> None:
    assert page.value("document.getElementById('stream-warnings').hidden")
    now = four.held
    assert now is not None
    four.held = replace(now, streams=[replace(now.streams[0], warnings={"no_loss_tokens": 1234}), now.streams[1]])
    try:
        page.until("!document.getElementById('stream-warnings').hidden")
        assert f"{now.streams[0].stream}: 1,234 samples with the warning no_loss_tokens" in page.text(
            "#stream-warnings"
        )
        check_layout(page)
    finally:
        four.held = now
    page.until("document.getElementById('stream-warnings').hidden")


def test_charts_mark_the_time_at_which_a_stage_began(page: Page, four: Watched) -> None:
    now = four.held
    assert now is not None
    feed, formed = now.feeds["train"], now.feeds["train"].steps.formed
    past = [PastChange(id=0, name="long context", step=formed + 2, note="stage long context")]
    changes = replace(feed.changes, past=past, in_force=replace(feed.changes.in_force, budget=32_768))
    later = replace(feed, steps=replace(feed.steps, formed=formed + 5, end=None), changes=changes)
    marked = "document.getElementById('speed').getAttribute('aria-label').includes('long context began at')"
    try:
        four.held = replace(now, feeds=now.feeds | {"train": later}, uptime_s=now.uptime_s + 5)
        page.until(marked)
        assert "packs, now of 32,768 tokens" in page.text("#tiles")
    finally:
        four.held = now


def test_media_are_shown_where_a_run_has_some(page: Page, four: Watched) -> None:
    assert page.value("document.getElementById('media').hidden")
    assert "media" not in page.text("#room")
    now = four.held
    assert now is not None
    feed = now.feeds["train"]
    rules = replace(feed.changes.in_force, limits=MediaLimits(patches=16_384))
    changes = replace(feed.changes, in_force=rules)
    media = MediaStatus(
        items=1234, patches=567_890, bytes=9, most_items=12, most_patches=16_000,
        bound_by={"tokens": 30, "patches": 10}, dropped={"missing": 4, "wrong_bytes": 1},
    )  # fmt: skip
    late = LateStatus(samples=3, oldest_s=1.0, fields=["reward"])
    for streams in (now.streams, [replace(now.streams[0], late=late), now.streams[1]]):
        feeds = now.feeds | {"train": replace(feed, media=media, changes=changes)}
        four.held = replace(now, feeds=feeds, streams=streams, memory=replace(now.memory, media_bytes=3 * 2**20))
        try:
            page.until("!document.getElementById('media').hidden")
            page.until(f"document.getElementById('late').hidden === {str(streams == now.streams).lower()}")
            script = "[...document.querySelectorAll('#media-axes tbody tr')].map((row) => [...row.cells].map(TEXT))"
            assert page.value(script.replace("TEXT", "(cell) => cell.textContent")) == [
                ["tokens", f"{feed.totals.tokens:,}", "", f"{rules.budget:,}", "30", "75%"],
                ["patches", "567,890", "16,000", "16,384", "10", "25%"], ["items", "1,234", "12", "none", "", ""],
            ]  # fmt: skip
            assert page.text("#media-dropped") == "5 items dropped by trainers: 4 missing, 1 wrong bytes"
            assert "3 MiB held" in page.text("#room")
            first = "title-media" if streams == now.streams else "title-late"
            assert top_of(page, first) == top_of(page, "title-room"), "the room is beside them"
            check_layout(page)
        finally:
            four.held = now
    page.until("document.getElementById('media').hidden")


def test_4_ranks_have_their_figures_in_their_cells(page: Page, four: Watched) -> None:
    readers = four.status()["feeds"]["train"]["readers"]
    press(page, "#measures", "cost")
    costs = [(f"dp {row['dp_rank']}, cp {row['cp_rank']}", sum(row["cost"]) / len(row["cost"])) for row in readers]
    assert len(costs) == 4
    labels = page.value("[...document.querySelectorAll('.cell')].map((cell) => cell.getAttribute('aria-label'))")
    for label, (name, cost) in zip(labels, costs, strict=True):
        assert label.startswith(f"{name}: ")
        assert float(label.split(": ")[1]) == pytest.approx(cost, abs=6e-4)
    press(page, "#measures", "ahead")
    ahead = page.value("[...document.querySelectorAll('.cell')].map((cell) => cell.textContent)")
    assert all(row["have_upto"] >= row["done_upto"] for row in readers)
    steps = [row["have_upto"] - row["done_upto"] for row in readers]
    assert ahead == [f"{number} {'step' if number == 1 else 'steps'}" for number in steps]
    press(page, "#measures", "data wait")


def test_4_ranks_can_be_read_on_every_screen(page: Page) -> None:
    check_layout(page)


def test_hosts_and_streams_of_any_name_fit_beside_what_was_waited(page: Page) -> None:
    page.resize(390, 844)
    shown_again(page)  # charts take the new width by then
    script = f"""import("/web/words.js").then(({{ showLongestWaits }}) => {{
      const name = "a-name-of-many-parts.";
      showLongestWaits({{ ranks: {{ slow: null }}, readers: [{{
        dp_rank: 0, cp_rank: 0, tp_rank: 0, pp_rank: 0, host: name.repeat(3), data_wait: 0.8191, work_s: 8191,
        cause: "stream", stream: name.repeat(4) }}] }});
      return ({WIDER})(390);
    }})"""
    assert page.value(script) == []
    assert "a-name-of-many-parts" in page.text("#longest-waits")


def test_the_state_of_a_broker_that_a_rank_waits_for_is_not_green_and_has_its_duration(page: Page) -> None:
    script = """import("/web/words.js").then(({ showHead }) => {
      const state = document.getElementById("state");
      const now = { run: "x", uptime_s: 100, version: "1", ready: true };
      return [{ state: "serving", stalled_s: null }, { state: "waiting", stalled_s: 75 }].map((more) => {
        showHead({ ...now, ...more }, false);
        return [state.textContent, getComputedStyle(state).color];
      });
    })"""
    (serving, green), (waiting, other) = page.value(script)
    assert serving == "serving"
    assert waiting == "waiting for 1 min 15 s"
    assert other != green


def test_the_slow_rank_and_the_headline_are_shown_as_the_broker_has_them(page: Page, four: Watched) -> None:
    now = four.held
    assert now is not None
    feed = now.feeds["train"]
    slow = SlowRank(
        name="dp=1 cp=0", dp_rank=1, cp_rank=0, tp_rank=0, pp_rank=0, host="node00", count=1, step_s=1.0,
        others_step_s=0.1,
    )  # fmt: skip
    waits = [0.9, 0.8, 0.01, 0.7]
    readers = [
        replace(row, data_wait=wait, cause="peers", stream=None, work_s=0.1)
        for row, wait in zip(feed.readers, waits, strict=True)
    ]
    headline = Headline(kind="waiting", cause="slow_rank", text=f"{slow.text}.")
    held = replace(feed, headline=headline, readers=readers, ranks=replace(feed.ranks, slow=slow))
    four.held = replace(now, feeds={"train": held})
    try:
        page.until("document.getElementById('notice').dataset.kind === 'waiting'")
        assert page.text("#notice") == "rank dp=1 cp=0 takes 1.0 s a step, the others 0.10 s (on node00)."
        cells = "[...document.querySelectorAll('#longest-waits tbody tr')].map((row) => [...row.cells].map(TEXT))"
        rows = page.value(cells.replace("TEXT", "(cell) => cell.textContent"))
        assert [(row[0], row[2], row[3]) for row in rows] == [
            ("dp 1, cp 0", "1%", "slow: 1 s a step"), ("dp 0, cp 0", "90%", "peers"),
            ("dp 0, cp 1", "80%", "peers"), ("dp 1, cp 1", "70%", "peers"),
        ]  # fmt: skip
        assert tile(page, "data_wait") == "90%"
        assert page.text("[data-figure=data_wait] .note").startswith(
            "peers; share of the rank's time in the last minute"
        )
        check_layout(page)
    finally:
        four.held = now
    page.until("document.getElementById('notice').dataset.kind !== 'waiting'")


def test_the_theme_is_the_systems_or_that_of_the_switch(page: Page) -> None:
    def background() -> str:
        found: str = page.value("getComputedStyle(document.body).backgroundColor")
        return found

    page.prefer("light")
    light = background()
    page.prefer("dark")
    assert (dark := background()) != light
    for _ in range(2):
        page.value("document.querySelector('#theme').click()")
    assert page.text("#theme") == "theme: light"
    assert background() == light
    page.value("document.querySelector('#theme').click()")
    assert page.text("#theme") == "theme: auto"
    assert background() == dark


def test_a_broker_whose_loop_stands_still_is_said_to_though_it_answers(page: Page, four: Watched) -> None:
    """The page's clock is put on, for the test not to last as long."""
    four.stuck = True
    shown_again(page)
    page.value("Date.later = Date.now, Date.now = () => Date.later() + 60_000")
    page.until("document.body.classList.contains('gone')")
    assert "The broker has not answered since" in page.text("#notice")
    four.stuck = False
    page.until("!document.body.classList.contains('gone')")
    page.value("Date.now = Date.later")


def test_a_page_that_was_open_before_an_upgrade_loads_itself_again(page: Page) -> None:
    page.value("""window.opened = "before", window.fetch = ((fetch) => async (...asked) => {
      const answer = await fetch(...asked);
      return { ok: true, json: async () => ({ ...await answer.json(), version: "9.9" }) };
    })(window.fetch), 1""")
    page.until("window.opened === undefined && document.body?.dataset.shown")
    assert page.text("#version") != "version 9.9"


def test_512_ranks_are_cells_that_keys_go_through_and_tell_of(browser: Browser) -> None:
    with large(MANY) as broker:
        until(lambda: broker.status()["feeds"]["train"]["steps"]["returned"] > 1)
        page = opened(browser, broker)
        assert page.value("document.querySelectorAll('.cell').length") == MANY
        assert page.value("document.querySelectorAll('.cell.absent').length") == 0
        assert page.value("document.querySelectorAll('.cell[tabindex=\"0\"]').length") == 1, "one stop for the tab key"
        page.value("document.querySelector('.cell[tabindex=\"0\"]').focus()")
        for key in ("ArrowDown", "ArrowRight"):
            page.press(key)
        assert page.value("document.activeElement.getAttribute('aria-label')").startswith("dp 33: ")
        assert "dp 33" in page.text("#tip")
        assert "node04:1033" in page.text("#tip")
        page.press("End")
        assert page.value("document.activeElement.getAttribute('aria-label')").startswith(f"dp {MANY - 1}: ")
        assert page.value("document.querySelector('#tip').hidden") is False
        tip = page.value("document.querySelector('#tip').getBoundingClientRect().toJSON()")
        assert 0 <= tip["left"] < tip["right"] <= WIDTHS[0][0]
        assert 0 <= tip["top"] < tip["bottom"] <= WIDTHS[0][1]
        page.value("document.activeElement.blur()")
        assert page.value("document.querySelector('#tip').hidden") is True
        check_layout(page)
        assert page.problems == []
        page.close()


def test_30_000_ranks_are_their_worst_nodes_and_the_ranks_of_one_of_them(browser: Browser) -> None:
    with simulated(30_000, [17, *range(80, 88)]) as url:
        page = browser.page(url)
        page.until("document.body.dataset.shown > 1")
        assert tile(page, "ranks") == "29,991"
        assert page.text("#about-ranks").startswith("29,991 ranks on 3,750 nodes.")
        names = "[...document.querySelectorAll('#node-table tbody tr')].map((row) => row.cells[0].textContent)"
        status = fetched(url + "/status")["feeds"]["train"]["ranks"]["nodes"]
        assert page.value(names) == [node["host"] for node in status]
        assert len(status) == 64
        assert page.value(names)[:2] == ["node0010.cluster", "node0002.cluster"], "nodes without all of their ranks"
        assert page.text("#about-node") == "7 of 8 ranks on node0002.cluster:", "the worst node that has a rank"
        cells = "[...document.querySelectorAll('.cell')].map((cell) => cell.getAttribute('aria-label'))"
        assert [label.split(":")[0] for label in page.value(cells)] == [f"dp 2, tp {n}" for n in (0, *range(2, 8))]
        page.value("document.querySelectorAll('#node-table button')[0].click()")
        page.until("document.querySelector('#about-node').textContent.startsWith('0 of 8 ranks on node0010')")
        assert page.value("document.querySelectorAll('.cell').length") == 0
        page.value("document.querySelector('#node').value = '3333'")
        page.value("document.querySelector('#find').requestSubmit()")
        page.until("document.querySelector('#about-node').textContent.startsWith('8 of 8 ranks on node3333')")
        assert page.value("document.querySelectorAll('.cell').length") == 8
        assert page.value(names) == [], "the table lists the nodes with this text in their names"
        page.value("document.querySelector('#node').value = 'nowhere'")
        page.value("document.querySelector('#find').requestSubmit()")
        page.until("document.querySelector('#about-node').textContent === 'No rank is on a host with this name.'")
        page.value("document.querySelector('#node').value = ''")
        page.value("document.querySelector('#find').requestSubmit()")
        page.until("document.querySelector('#about-node').textContent.startsWith('7 of 8 ranks')")
        check_layout(page)
        page.close()


def test_a_broker_that_is_gone_is_said_to_be_and_shown_again_when_it_is_back(browser: Browser) -> None:
    """Another one in its place, too: with two feeds, and names that are no markup, no property and long."""
    settings: dict[str, Any] = {"run": "first", "streams": {"web": {}}, "rules": {"budget": 256, "step": {"packs": 2}}}
    with watched(settings) as broker:
        page = opened(browser, broker)
        address = broker.url.removeprefix("http://")
        assert "No rank is attached yet." in page.text("#about-ranks")
        assert page.text("#speed .empty") == "No step is formed yet."
        assert page.problems == []
    page.until("document.body.classList.contains('gone')")
    assert "The broker has not answered since" in page.text("#notice")
    assert page.text("#run") == "first", "the last figures stay"
    assert page.text("#state") == "no answer"
    name = "<script>alert(1)</script>/" + "filtered-by-quality-" * 8
    feeds: dict[str, Any] = {"train": {"streams": ["web"]}, "__proto__": {"streams": [name]}}
    settings |= {"run": "<b>&amp;", "streams": {"web": {}, name: {}}, "feeds": feeds}
    with watched(settings, address) as broker:
        page.until("!document.body.classList.contains('gone')")
        assert page.text("#run") == "<b>&amp;"
        named = page.value("[...document.querySelectorAll('#feeds button')].map((each) => each.textContent)")
        assert named == list(feeds)
        assert page.text("#streams tbody tr td") == "web"
        press(page, "#feeds", "__proto__")
        assert page.text("#streams tbody tr td") == name
        shown_again(page)
        assert page.text("#state") == "serving"
        check_layout(page)
    page.close()


def test_a_broker_with_a_token_is_shown_to_who_brings_it_once(browser: Browser) -> None:
    """As the password that the browser asks for, here in the address."""
    with watched({"run": "secret", "streams": {"web": {}}}, token="correct-horse-battery") as broker:
        page = browser.page(broker.url.replace("//", "//me:correct-horse-battery@"))
        page.until("document.body.dataset.shown > 1")
        assert page.text("#run") == "secret"
        assert page.problems == []
        page.close()


def test_a_feed_that_has_ended_is_said_to_have(browser: Browser) -> None:
    settings: dict[str, Any] = {
        "rules": {"budget": 1024, "step": {"packs": 8}, "overlong": "truncate"}, "streams": {"web": {"partitions": 1}},
    }  # fmt: skip
    with (
        watched(settings) as broker,
        producing_here(broker.endpoints["producers"], {"web": Texts(300, chunks=1)}),
        many_ranks(broker.endpoints["trainers"], {"dp": 2}, lambda _: 0.0),
    ):
        until(lambda: broker.status()["state"] == "ended" and broker.status()["feeds"]["train"]["waiting_for"] is None)
        page = opened(browser, broker)
        steps = broker.status()["feeds"]["train"]["steps"]["end"]
        assert page.text("#notice") == f"Done. All {steps} steps were returned."
        assert page.text("#state") == "ended"
        assert page.text("#streams tbody tr td:last-child") == "1 of 1"
        page.close()


def press(page: Page, switch: str, label: str) -> None:
    """A button of a switch."""
    buttons = f"[...document.querySelectorAll('{switch} button')]"
    page.value(f"{buttons}.find((each) => each.textContent === {json.dumps(label)}).click()")


def test_pictures_of_the_readme_are_small() -> None:
    pictures = sorted((Path(__file__).parents[3] / "docs").glob("*.png"))
    assert len(pictures) >= 2
    assert all(picture.stat().st_size < 150_000 for picture in pictures)
