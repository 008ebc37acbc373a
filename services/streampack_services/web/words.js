// The page's texts, tiles and tables, from the broker's status.

import { BAD_MESSAGES, FIGURES } from "./declared.js";
import { byId, fill, fillChoices, fillTable, make, setAttribute, setText } from "./dom.js";
import { bytes, clock, count, duration, inUnit, percent, short } from "./format.js";
import { namer } from "./heat.js";

const MAX_EVENTS = 50;
const MAX_STREAMS = 100;
const STREAM_COLUMNS = 15; // of the table in index.html; figures that are declared to be shown follow
const STREAM_SILENT_S = 10;

export function showHead(status, gone) {
  setText(byId("run"), status.run);
  document.title = `${status.run}: streampack`;
  const state = byId("state");
  const ready = status.ready || status.state === "ended";
  const text = status.state === "waiting" ? `waiting for ${duration(status.stalled_s)}` : status.state;
  setText(state, gone ? "no answer" : ready ? text : `${text}, not ready`);
  setAttribute(state, "data-state", gone ? "gone" : status.state);
  setText(byId("uptime"), `up ${duration(status.uptime_s)}`);
  setText(byId("version"), `version ${status.version}`);
}

export function showNotice([text, kind]) {
  setText(byId("notice"), text);
  setAttribute(byId("notice"), "data-kind", kind);
}

export function showTiles(status, feed) {
  const waits = ranksOrNodes(feed).filter((row) => row.data_wait !== null).sort((a, b) => b.data_wait - a.data_wait);
  const { formed, returned, end } = feed.steps;
  const steps = [`${count(formed)} formed`, ...(end === null ? leftOf(feed) : [`${count(end)} in total`])];
  tiles(byId("tiles"), [
    ["tokens_per_s", "tokens / s", short(feed.tokens_per_s), `${short(feed.totals.tokens)} in total`],
    ...sharedTile(feed.totals),
    ["utilization", "utilization", feed.figures.packs ? percent(feed.figures.utilization) : "", `${count(feed.totals.packs)} packs${feed.changes.past.length ? ", now" : ""} of ${count(feed.changes.in_force.budget)} tokens`],
    ["returned", "steps returned", count(returned), steps.join(", ")],
    ["data_wait", "longest data wait", waits.length ? percent(waits[0].data_wait, 2) : "", aboutWaits(feed, waits[0])],
    ["cost", "load imbalance", feed.figures.step_cost_max_over_mean ? feed.figures.step_cost_max_over_mean.toFixed(4) : "", "max / mean cost; 1 is perfect"],
    ["ranks", "ranks attached", count(feed.ranks.attached), feed.num_ranks ? `of ${count(feed.num_ranks)} ranks that read the feed` : "none so far"],
    ["producers", "producers", count(status.producers), status.vanished_producers ? `${count(status.vanished_producers)} vanished so far` : "no producer has vanished"],
    ["committed", "last checkpoint", feed.committed === null ? "" : count(feed.committed), "first step after the checkpoint"],
  ]);
}

// The ranks, or of too many ranks the worst nodes: each has the wait of its rank that waits longest.
const ranksOrNodes = ({ readers, ranks }) => (ranks.left_out ? ranks.nodes : readers);

// About the longest data wait of a rank in the last minute, and the data wait of all ranks since the start.
function aboutWaits({ ranks }, longest) {
  const waited = Object.values(ranks.starved_s).reduce((sum, seconds) => sum + seconds, 0);
  const whole = waited + ranks.trainer_s;
  const cause = longest?.data_wait ? `${causeOf(longest)}; ` : "";
  return `${cause}share of the rank's time in the last minute${whole ? `; all ranks ${percent(waited / whole, 2)} since the start` : ""}`;
}

// The steps left, and the time that they take at the pace of the slowest rank; [] without an estimate.
function leftOf({ steps_left: left, readers, ranks }) {
  if (!left) return [];
  const pace = Math.max(0, ...[...readers, ...ranks.nodes].map((row) => row.step_s ?? 0));
  const time = pace ? `: ${duration(left.estimate * pace)}` : "";
  const about = left.low === left.high ? short(left.estimate) : `${short(left.low)} to ${short(left.high)}`;
  return [`${about} left${time}`];
}

// Tokens that samples share and that are computed once; [] if none does.
function sharedTile({ tokens, shared_tokens: shared }) {
  if (!shared) return [];
  return [["shared", "shared prefixes", percent(shared / (tokens + shared)), `${short(shared)} tokens are not computed again`]];
}

// The figures of the broker, a feed or a stream that are declared to be shown: [[label, text], ...].
const shownOf = (kind, row) => FIGURES[kind].map(([path, label, unit]) => [label, inUnit(path.reduce((value, name) => value?.[name], row), unit)]);

// [[key, label, value, note], ...]
function tiles(list, rows) {
  fill(list, rows, () => make("div", {}, make("dt"), make("dd"), make("dd", { className: "note" })), (tile, [key, label, value, note]) => {
    setAttribute(tile, "data-figure", key);
    setText(tile.children[0], label);
    setText(tile.children[1], value || "none yet");
    tile.children[1].classList.toggle("none", !value);
    setText(tile.children[2], note);
  });
}

// The worst nodes, if there are too many ranks for a map; `page`: the ranks of the chosen node, null if there is none.
export function showNodes({ ranks }, page, chosen) {
  byId("nodes").hidden = !ranks.left_out;
  if (!ranks.left_out) return;
  const text = byId("node").value;
  const rows = ranks.nodes.filter((node) => node.host.includes(text)).map((node) => [
    node.host, [node.relay ?? "", node.relay === "lost" ? "warn" : ""], [`${count(node.attached)} of ${count(node.ranks)}`, node.attached < node.ranks ? "n bad" : "n"],
    [node.data_wait === null ? "" : percent(node.data_wait, 1), "n"], node.data_wait ? causeOf(node) : "",
    [node.done_upto === null ? "" : count(node.done_upto), "n"],
    [node.silent_s === null ? "" : duration(node.silent_s), "n"], [node.step_s === null ? "" : duration(node.step_s), "n"],
    [node.cost === null ? "" : node.cost.toFixed(3), "n"], [bytes(node.queued_bytes), "n"],
  ]);
  fillChoices(byId("node-table"), rows, page?.node.host, chosen);
  const listed = page && page.readers.length < page.attached ? `, the first ${count(page.readers.length)}` : "";
  setText(byId("about-node"), page ? `${count(page.attached)} of ${count(page.node.ranks)} ranks on ${page.node.host}${listed}:` : "No rank is on a host with this name.");
}

const causeOf = ({ cause, stream }) => (cause === "stream" && stream ? `stream ${stream}` : cause);

// What the section of ranks shows.
export function aboutRanks({ ranks }) {
  return `${count(ranks.attached)} ranks on ${count(ranks.num_nodes)} nodes. The ${count(ranks.nodes.length)} worst nodes, worst first:`;
}

// The slow rank for which others wait, then the ranks with the longest data wait: four in all.
export function showLongestWaits({ readers, ranks: { slow } }) {
  const isSlow = (row) => slow !== null && ["dp_rank", "cp_rank", "tp_rank", "pp_rank"].every((axis) => row[axis] === slow[axis]);
  const rows = readers.filter((row) => isSlow(row) || row.data_wait > 0)
    .sort((a, b) => isSlow(b) - isSlow(a) || b.data_wait - a.data_wait).slice(0, 4);
  const nameOf = namer(readers);
  byId("longest-waits").hidden = !rows.length;
  fillTable(byId("longest-waits"), rows.map((row) => [
    nameOf(row), row.host, [row.data_wait === null ? "" : percent(row.data_wait, 1), "n"],
    isSlow(row) ? [`slow: ${duration(slow.step_s)} a step`, "bad"] : causeOf(row),
  ]));
}

const shareOf = (share) => (share === null ? "" : percent(share, 2));

export function showStreams(streams) {
  const shown = streams.length > MAX_STREAMS ? [...streams].sort((a, b) => isSilent(b) - isSilent(a)).slice(0, MAX_STREAMS) : streams;
  setText(byId("about-streams"), shown === streams ? "" : `${count(MAX_STREAMS)} of ${count(streams.length)} streams, silent streams first. /status lists all streams.`);
  showWarnings(shown);
  const heads = byId("streams").tHead.rows[0];
  for (const [, label] of FIGURES.stream.slice(heads.cells.length - STREAM_COLUMNS)) heads.append(make("th", { className: "n", textContent: label }));
  fillTable(byId("streams"), shown.map((row) => {
    const rejected = Object.entries(row.rejected);
    const number = rejected.reduce((sum, [, some]) => sum + some, 0);
    return [
      row.stream, [short(row.weight), "n"], [row.ended ? "ended" : shareOf(row.share), "n"], [shareOf(row.recent_share ?? null), "n"],
      [shareOf(row.trained_share), "n"],
      [count(row.trained_tokens), "n"], [count(row.tokens), "n"], [count(row.samples), "n"],
      [row.passes === null ? "" : count(row.passes), "n"],
      [row.credits.granted_tokens ? percent(row.credits.used_tokens / row.credits.granted_tokens, 0) : "", "n"],
      [`${short(row.lag.tokens)} (${short(row.lag.samples)})`, "n"], [count(row.producers), row.producers ? "n" : "n bad"],
      [row.last_seen_s === null ? "never" : `${duration(row.last_seen_s)} ago`, "n"],
      [number ? `${count(number)} (${rejected.map(([reason]) => reason).join(", ")})` : "0", number ? "n bad" : "n"],
      [`${row.ended_partitions} of ${row.partitions}`, "n"], ...shownOf("stream", row).map(([, text]) => [text, "n"]),
    ];
  }));
}

// A line for each warning about samples that were delivered all the same.
function showWarnings(streams) {
  const line = byId("stream-warnings");
  const warnings = streams.flatMap(({ stream, warnings = {} }) => Object.entries(warnings).map(
    ([word, number]) => `${stream}: ${count(number)} samples with the warning ${word}`));
  line.hidden = !warnings.length;
  setText(line, warnings.length ? `${warnings.join("; ")}. "streampack status" says what to do.` : "");
}

// The streams with late fields; without one, there is no such section.
export function showLate(streams) {
  const shown = streams.filter((row) => row.late).sort((a, b) => b.late.oldest_s - a.late.oldest_s).slice(0, MAX_STREAMS);
  byId("late").hidden = !shown.length;
  fillTable(byId("late-streams"), shown.map(({ stream, late, rejected: { late_timeout: dropped = 0 } }) => [
    stream, [count(late.samples), "n"], [late.samples ? duration(late.oldest_s) : "none waits", "n"], late.fields.join(", "),
    [count(dropped), dropped ? "n bad" : "n"],
  ]));
}

// What fills packs, by axis; without media, there is no such section.
export function showMedia({ media, changes, totals }) {
  byId("media").hidden = !media;
  if (!media) return;
  const { budget, limits: some } = changes.in_force;
  const limits = some ?? {};
  const packs = Object.values(media.bound_by).reduce((sum, number) => sum + number, 0);
  const axes = [
    ["tokens", totals.tokens, null, budget], ["patches", media.patches, media.most_patches, limits.patches],
    ["items", media.items, media.most_items, limits.items],
  ];
  fillTable(byId("media-axes"), axes.map(([axis, total, most, limit]) => {
    const filled = media.bound_by[axis];
    return [
      axis, [count(total), "n"], [most === null ? "" : count(most), "n"], [limit === undefined ? "none" : count(limit), "n"],
      [filled === undefined ? "" : count(filled), "n"], [filled === undefined || !packs ? "" : percent(filled / packs, 1), "n"],
    ];
  }));
  const dropped = Object.entries(media.dropped);
  const all = dropped.reduce((sum, [, some]) => sum + some, 0);
  byId("media-dropped").hidden = !all;
  const reasons = dropped.map(([reason, some]) => `${count(some)} ${reason.replaceAll("_", " ")}`).join(", ");
  byId("media-dropped").textContent = `${count(all)} items dropped by trainers: ${reasons}`;
}

const isSilent = (row) => row.ended_partitions < row.partitions && (row.last_seen_s ?? Infinity) > STREAM_SILENT_S;

function aboutStandby(standby) {
  if (!standby.name) return "none is connected";
  const behind = standby.lag_records ? `, ${count(standby.lag_records)} records behind` : "";
  return standby.is_member ? `${standby.name} may take over${behind}` : `${standby.name} copies the log${behind}`;
}

export function showRoom(status, feed) {
  const { memory, log, messages } = status;
  const arrays = memory.live_tokens * memory.token_bytes;
  const rows = [
    ["arena", `${bytes(arrays)} of ${bytes(memory.arena_bytes)}`, arrays / memory.arena_bytes],
    ["held by the feed", `${short(feed.held_tokens)} of ${short(feed.held_limit_tokens)} tokens`, feed.held_tokens / feed.held_limit_tokens],
    ["window", `${count(feed.window.samples)} samples, ${short(feed.window.tokens)} tokens${oldest(feed.window)}`, null],
    ["wait in the window", feed.waits.p99_steps === null ? "" : `99th percentile ${inSteps(feed.waits.p99_steps)}`, null],
  ];
  if (feed.changes.text) rows.push(["rules", feed.changes.text, null]);
  const { displacement: moved, mean_length: length } = feed;
  if (moved) rows.push(["displacement, last 100 steps", `50th percentile ${inSteps(moved.p50)} from the turn of a sample, 99th ${inSteps(moved.p99)}; at most ${count(moved.early)} early and ${count(moved.late)} late`, null]);
  if (length) rows.push(["mean length, last 100 steps", `${short(length.recent)} tokens; ${short(length.total)} since the start`, null]);
  if (feed.media) rows.push(["media", `${bytes(memory.media_bytes)} held, beside the arena`, null]);
  if (log === null) rows.push(["log", "none (no state_dir)", null]);
  else {
    rows.push(["log", `${bytes(log.bytes)} of ${bytes(log.limit_bytes)}, ${count(log.records)} records`, log.bytes / log.limit_bytes]);
    rows.push(["not durable yet", `${count(log.unsafe_records)} records (durability: ${log.durability})`, null]);
    rows.push(["disk", `${bytes(log.free_bytes)} free`, null]);
  }
  if (status.standby) rows.push(["standby", aboutStandby(status.standby), null]);
  const relays = aboutRelays(status.relays);
  if (relays) rows.push(["relays", relays, null]);
  const bad = Object.entries(BAD_MESSAGES).filter(([why]) => messages[why]).map(([why, words]) => `${count(messages[why])} ${words}`);
  rows.push(["bad messages", bad.join(", ") || "none", null]);
  if (messages.unsent) rows.push(["not sent", `${count(messages.unsent)} messages to peers that were gone`, null]);
  const lost = Object.entries(feed.lost_tokens).filter(([, tokens]) => tokens).map(([why, tokens]) => `${short(tokens)} ${why.replace("_", " ")}`);
  rows.push(["tokens left out", lost.join(", ") || "none", null]);
  const figures = [...shownOf("broker", status), ...shownOf("feed", feed)].filter(([, text]) => text);
  rows.push(...figures.map((row) => [...row, null]));
  fill(byId("room"), rows, () => make("div", {}, make("dt"), make("dd"), make("meter", { max: 1 })), (line, [label, value, share]) => {
    setText(line.children[0], label);
    setText(line.children[1], value);
    line.children[2].hidden = share === null;
    line.children[2].value = share ?? 0;
    setAttribute(line.children[2], "aria-label", label);
  });
}

// One line about the relays, such as "2 for 16 ranks; lost: gpu3"; empty without a relay.
function aboutRelays({ connected, lost, ranks, hosts }) {
  if (!connected && !lost) return "";
  const named = hosts.filter((relay) => relay.lost).slice(0, 3).map((relay) => relay.host);
  return `${count(connected)} for ${count(ranks)} ranks${lost ? `; lost: ${named.join(", ")}${lost > 3 ? ` and ${count(lost - 3)} more` : ""}` : ""}`;
}

const oldest = (window) => (window.oldest_steps ? `, oldest ${inSteps(window.oldest_steps)}` : "");
const inSteps = (number) => `${count(number)} ${number === 1 ? "step" : "steps"}`;

export function showEvents(events) {
  const last = events.slice(-MAX_EVENTS).reverse();
  const list = byId("events");
  fill(list, last.length ? last : [null], () => make("li"), (line, event) => {
    const parts = event ? [clock(event.time), event.level, event.text] : ["", "", "No events yet."];
    fill(line, parts, () => make("span"), (each, text) => setText(each, text));
    setAttribute(line, "data-level", event ? parts[1] : "info");
  });
}
