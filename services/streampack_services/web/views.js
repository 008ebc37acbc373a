// What each chart shows, and where it comes from.

import { byId, setText } from "./dom.js";
import { count, duration, fewPercent, percent, short } from "./format.js";

const WASTE = [["alignment", "alignment"], ["pack_tail", "tails of packs"], ["shape", "shape"], ["pipeline", "pipeline"], ["empty_pack", "empty packs"]];
const STARVED = ["stream", "peers", "join", "memory", "forming", "log", "network"];
const series = (labels) => labels.map((label, index) => ({ label, color: `--c${index + 1}` }));

export const CHARTS = {
  speed: { kind: "line", series: series(["formed"]), unit: short, yLabel: "tokens / s", empty: "No step was formed yet." },
  waste: { kind: "stack", series: series(WASTE.map(([, label]) => label)), unit: fewPercent, yLabel: "% of tokens delivered", empty: "No step was formed yet." },
  starved: { kind: "stack", series: series(STARVED), unit: fewPercent, yLabel: "% of the ranks' time", empty: "No rank is attached yet." },
  lengths: { kind: "bars", series: series(["samples", "tokens"]), unit: fewPercent, xLabel: "tokens of a sample, from this to twice as many", yLabel: "% of all", empty: "No sample was packed yet." },
  fills: { kind: "bars", series: series(["packs"]), unit: fewPercent, xLabel: "real tokens, up to so many % of the budget", yLabel: "% of packs", empty: "No pack was formed yet." },
};

export function drawCharts(charts, window, feed) {
  const over = `mean of ${duration(window.smooth)}`;
  drawSpeed(charts.speed, window, feed, over);
  drawWaste(charts.waste, window, feed, over);
  drawStarved(charts.starved, window, over);
  drawLengths(charts.lengths, feed);
  drawFills(charts.fills, feed);
}

function drawSpeed(chart, window, feed, over) {
  const seconds = window.rise("second");
  const rates = window.rise("tokens").map((tokens, index) => (tokens === null ? null : tokens / seconds[index]));
  const formed = feed.totals.steps > 0;
  setText(byId("about-speed"), `Real tokens packed, ${over}.`);
  chart.draw(window.times, [formed ? rates : rates.map(() => null)], `Tokens a second, now ${short(feed.tokens_per_s)}`);
}

function drawWaste(chart, window, feed, over) {
  const delivered = held(window.rise("delivered"));
  const columns = WASTE.map(([cause]) => held(window.rise(`waste_${cause}`), delivered.from).values)
    .map((column) => column.map((tokens, index) => (delivered.values[index] ? tokens / delivered.values[index] : null)));
  const wasted = Object.values(feed.waste_tokens).reduce((sum, tokens) => sum + tokens, 0);
  const share = feed.delivered_tokens ? wasted / feed.delivered_tokens : 0;
  setText(byId("about-waste"), `Share of delivered tokens that are nobody's, ${over}; ${fewPercent(share)} since the start.`);
  chart.draw(window.times, columns, `Waste by cause, ${fewPercent(share)} of all tokens since the start`);
}

// While no step is formed the last share holds: {values, from}, by index of where it was taken.
function held(column, from = null) {
  let last = null;
  const taken = from ?? column.map((value, index) => (value ? (last = index) : last));
  return { values: taken.map((index) => (index === null ? null : column[index])), from: taken };
}

function drawStarved(chart, window, over) {
  const seconds = window.rise("second");
  const ranks = window.of("ranks");
  const columns = STARVED.map((cause) => window.rise(`starved_${cause}`).map((waited, index) =>
    (waited === null || !ranks[index] ? null : Math.min(1, waited / (seconds[index] * ranks[index])))));
  setText(byId("about-starved"), `Share of all ranks' time, ${over}: what they waited for.`);
  chart.draw(window.times, columns, "Share of the ranks' time spent waiting for data, by cause");
}

function drawLengths(chart, feed) {
  const octaves = [];
  for (const [samples, tokens] of feed.lengths) {
    const octave = Math.floor(Math.log2(Math.max(1, tokens / samples)));
    const [some, all] = octaves[octave] ?? [0, 0];
    octaves[octave] = [some + samples, all + tokens];
  }
  const first = octaves.findIndex((each) => each);
  const rows = first < 0 ? [] : Array.from(octaves.slice(first), (each) => each ?? [0, 0]);
  const { samples, tokens } = feed.totals;
  setText(byId("about-lengths"), samples ? `${count(samples)} samples of ${short(tokens / samples)} tokens on average; the budget is ${count(feed.rules.budget)}.` : "");
  chart.draw(rows.map((_, index) => octaveName(first + index)),
    [rows.map(([some]) => some / samples), rows.map(([, all]) => all / tokens)], "Lengths of samples, by octaves of tokens");
}

// 2 to the power of so many: "512", "1k", "64k", "1M"
function octaveName(octave) {
  const unit = Math.floor(octave / 10);
  return `${2 ** (octave - 10 * unit)}${["", "k", "M", "G"][unit]}`;
}

function drawFills(chart, feed) {
  const all = feed.fills.reduce((sum, [, packs]) => sum + packs, 0);
  const used = feed.figures.packs ? feed.figures.utilization : 0;
  setText(byId("about-fills"), all ? `${count(all)} packs formed, ${percent(used)} full on average, empty ones too.` : "");
  chart.draw(feed.fills.map(([upto]) => percent(upto, 1).replace("%", "")), [feed.fills.map(([, packs]) => (all ? packs / all : null))],
    `Fill of packs, ${percent(used)} on average`);
}
