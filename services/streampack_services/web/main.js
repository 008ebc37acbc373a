// The live page: fetches the broker's status once a second and shows it. The charts over time come from /history.

import { Events, get } from "./api.js";
import { Chart } from "./charts.js";
import { byId, fillSwitch, setText } from "./dom.js";
import { clock } from "./format.js";
import { Heat, MEASURES } from "./heat.js";
import { History, RANGES } from "./history.js";
import { gone, noticeOf } from "./notice.js";
import { CHARTS, drawCharts } from "./views.js";
import { aboutRanks, showEvents, showHead, showLate, showLongestWaits, showMedia, showNodes, showNotice, showRoom, showStreams, showTiles } from "./words.js";

const EVERY_MS = 1000;
const STUCK_MS = 10_000; // a broker takes a new snapshot twice a second
const THEMES = ["auto", "dark", "light"];

const histories = Object.create(null); // by feed; a feed may have any name
const events = new Events();
const charts = Object.fromEntries(Object.entries(CHARTS).map(([id, spec]) => [id, new Chart(byId(id), spec)]));
const heat = new Heat(byId("heat"), byId("scale"), byId("about-ranks"));
const chosen = { feed: null, range: RANGES[0][0], measure: "wait", node: null };
let last = null; // the last {status, events, page}; page: the ranks of a node, null if all ranks are in the status
let moved = { second: -1, at: 0 }; // the broker's last uptime, and when it changed
let goneSince = 0; // time of the last answer, in seconds of the wall clock; 0 while the broker answers

async function turn() {
  try {
    if (!document.hidden) {
      await ask();
      show();
    }
  } finally {
    setTimeout(turn, EVERY_MS);
  }
}

async function ask() {
  try {
    const status = await get("/status");
    if (last && status.version !== last.status.version) location.reload(); // this page may not know the new fields
    if (status.epoch !== last?.status.epoch) events.forget();
    if (!(chosen.feed in status.feeds)) [chosen.feed] = Object.keys(status.feeds);
    const asked = [events.catchUp(), pageOf(status.feeds[chosen.feed]), historyOf(chosen.feed).catchUp()];
    const [found, page] = await Promise.all(asked);
    last = { status, events: found, page };
    if (status.uptime_s !== moved.second) moved = { second: status.uptime_s, at: Date.now() };
    goneSince = Date.now() - moved.at > STUCK_MS ? moved.at / 1000 : 0;
  } catch {
    goneSince ||= Date.now() / 1000;
  }
  document.body.classList.toggle("gone", goneSince > 0);
}

// The ranks of the chosen node, or of the worst one; null if all ranks are in the status, or no rank is on the node.
async function pageOf({ ranks }) {
  if (!ranks.left_out) return null;
  const node = chosen.node ?? (ranks.nodes.find((each) => each.attached) ?? ranks.nodes[0]).host;
  return get(`/status?feed=${encodeURIComponent(chosen.feed)}&node=${encodeURIComponent(node)}`).catch(() => null);
}

function chooseNode(node) {
  chosen.node = node || null;
  ask().then(show);
}

const historyOf = (feed) => (histories[feed] ??= new History(feed));

function show() {
  if (last === null) {
    if (goneSince) showNotice(gone(null, clock(goneSince)));
    return;
  }
  const { status } = last;
  const names = Object.keys(status.feeds);
  const feed = status.feeds[chosen.feed];
  byId("feeds").hidden = names.length < 2;
  choice("feeds", names.map((name) => [name, name]), "feed");
  choice("ranges", RANGES, "range");
  choice("measures", Object.entries(MEASURES).map(([key, { label }]) => [key, label]), "measure");
  showHead(status, goneSince > 0);
  showNotice(goneSince ? gone(status, clock(goneSince)) : noticeOf(feed));
  showTiles(status, feed);
  drawCharts(charts, historyOf(chosen.feed).window(chosen.range), feed);
  showNodes(feed, last.page, chooseNode);
  heat.draw(feed.ranks.left_out ? last.page?.readers ?? [] : feed.readers, chosen.measure, feed.ranks.left_out > 0);
  if (feed.ranks.left_out) setText(byId("about-ranks"), aboutRanks(feed));
  showLongestWaits(feed);
  showStreams(status.streams.filter((row) => row.feed === chosen.feed));
  showLate(status.streams.filter((row) => row.feed === chosen.feed));
  showMedia(feed);
  showRoom(status, feed);
  showEvents(last.events);
  document.body.dataset.shown = String(Number(document.body.dataset.shown ?? 0) + 1); // for tests
}

function choice(id, choices, key) {
  fillSwitch(byId(id), choices, chosen[key], (value) => {
    chosen[key] = value;
    if (key === "feed") chosen.node = null;
    show();
    if (key === "feed") historyOf(value).catchUp().then(show, () => {}); // the next turn retries
  });
}

function theme(next) {
  document.documentElement.dataset.theme = next;
  localStorage.setItem("streampack-theme", next);
  setText(byId("theme"), `theme: ${next}`);
  for (const chart of Object.values(charts)) chart.restyle();
}

byId("find").onsubmit = (event) => {
  event.preventDefault();
  chooseNode(byId("node").value);
};
byId("node").oninput = show;
byId("theme").onclick = () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(document.documentElement.dataset.theme));
theme(THEMES.find((each) => each === localStorage.getItem("streampack-theme")) ?? "auto");
turn();
