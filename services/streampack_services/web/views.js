// The charts: their series, labels and data.

import { PADDING, WAITS } from "./declared.js";
import { byId, setText } from "./dom.js";
import { count, duration, fewPercent, percent, short } from "./format.js";

const series = (labels) => labels.map((label, index) => ({ label, color: `--c${index + 1}` }));

export const CHARTS = {
  speed: { kind: "line", series: series(["formed"]), unit: short, yLabel: "tokens / s", empty: "No step is formed yet." },
  padding: { kind: "stack", series: series(PADDING.map(([, label]) => label)), unit: fewPercent, yLabel: "% of delivered tokens", empty: "No step is formed yet." },
  waits: { kind: "stack", series: series(WAITS), unit: fewPercent, yLabel: "% of all ranks' time", empty: "No rank is attached yet." },
  lengths: { kind: "bars", series: series(["samples", "tokens"]), unit: fewPercent, xLabel: "tokens per sample (lower bound of each bar)", yLabel: "% of samples or tokens", empty: "No sample is packed yet." },
  fills: { kind: "bars", series: series(["packs"]), unit: fewPercent, xLabel: "% of the budget (upper bound of each bar)", yLabel: "% of packs", empty: "No pack is formed yet." },
};

export function drawCharts(charts, window, feed) {
  const over = `mean over ${duration(window.smooth)}`;
  const marks = stagesIn(window, feed);
  for (const chart of [charts.speed, charts.padding, charts.waits]) chart.mark(marks);
  drawSpeed(charts.speed, window, feed, over);
  drawPadding(charts.padding, window, feed, over);
  drawWaits(charts.waits, window, over);
  drawLengths(charts.lengths, feed);
  drawFills(charts.fills, feed);
}

// The stages that began in a window: [[seconds of the wall clock, name], ...]. A stage begins with the first row that has
// a step of it.
function stagesIn(window, { changes }) {
  const formed = window.of("formed");
  return changes.past.flatMap(({ step, name }) => {
    const at = formed.findIndex((steps, index) => steps > step && index > 0 && formed[index - 1] <= step);
    return at < 0 ? [] : [[window.times[at], name]];
  });
}

function drawSpeed(chart, window, feed, over) {
  const seconds = window.rise("second");
  const rates = window.rise("tokens").map((tokens, index) => (tokens === null ? null : tokens / seconds[index]));
  const formed = feed.totals.steps > 0;
  setText(byId("about-speed"), `Real tokens packed, ${over}.`);
  chart.draw(window.times, [formed ? rates : rates.map(() => null)], `Tokens per second, now ${short(feed.tokens_per_s)}`);
}

function drawPadding(chart, window, feed, over) {
  const delivered = held(window.rise("delivered"));
  const columns = PADDING.map(([cause]) => held(window.rise(`waste_${cause}`), delivered.from).values)
    .map((column) => column.map((tokens, index) => (delivered.values[index] ? tokens / delivered.values[index] : null)));
  const padding = Object.values(feed.waste_tokens).reduce((sum, tokens) => sum + tokens, 0);
  const share = feed.delivered_tokens ? padding / feed.delivered_tokens : 0;
  setText(byId("about-padding"), `Padding as a share of delivered tokens, ${over}; ${fewPercent(share)} since the start.`);
  chart.draw(window.times, columns, `Padding by cause, ${fewPercent(share)} of delivered tokens since the start`);
}

// Replace rows in which no step was formed by the last row with one: {values, from: index of the row used}.
function held(column, from = null) {
  let last = null;
  const taken = from ?? column.map((value, index) => (value ? (last = index) : last));
  return { values: taken.map((index) => (index === null ? null : column[index])), from: taken };
}

function drawWaits(chart, window, over) {
  const seconds = window.rise("second");
  const ranks = window.of("ranks");
  const columns = WAITS.map((cause) => window.rise(`starved_${cause}`).map((waited, index) =>
    (waited === null || !ranks[index] ? null : Math.min(1, waited / (seconds[index] * ranks[index])))));
  setText(byId("about-waits"), `Time that ranks wait for data, as a share of all ranks' time, ${over}.`);
  chart.draw(window.times, columns, "Data wait by cause, as a share of all ranks' time");
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
  const { samples } = feed.totals;
  const tokens = feed.totals.tokens + feed.totals.shared_tokens; // here a sample has all of its tokens
  setText(byId("about-lengths"), samples ? `${count(samples)} samples, mean length ${short(tokens / samples)} tokens; the budget is ${count(feed.changes.in_force.budget)}.` : "");
  chart.draw(rows.map((_, index) => octaveName(first + index)),
    [rows.map(([some]) => some / samples), rows.map(([, all]) => all / tokens)], "Lengths of samples in tokens; the upper bound of each bar is twice its lower bound");
}

// 2 to the power of `octave`: "512", "1k", "64k", "1M"
function octaveName(octave) {
  const unit = Math.floor(octave / 10);
  return `${2 ** (octave - 10 * unit)}${["", "k", "M", "G"][unit]}`;
}

function drawFills(chart, feed) {
  const all = feed.fills.reduce((sum, [, packs]) => sum + packs, 0);
  const used = feed.figures.packs ? feed.figures.utilization : 0;
  setText(byId("about-fills"), all ? `${count(all)} packs formed, including empty packs; mean fill ${percent(used)}.` : "");
  chart.draw(feed.fills.map(([upto]) => percent(upto, 1).replace("%", "")), [feed.fills.map(([, packs]) => (all ? packs / all : null))],
    `Fill of packs, mean ${percent(used)}`);
}
