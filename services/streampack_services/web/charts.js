// Charts with uPlot: lines and stacks over time, and bars. A chart draws again when its size or the theme changes. Its
// legend shows the last values, or the values under the cursor.

import { clock } from "./format.js";
import { color, make, setAttribute, setText } from "./dom.js";

const HEIGHT = 200;
const FONT = "11px system-ui, sans-serif";
const SMALL_FONT = "9px system-ui, sans-serif"; // labels of bars on narrow screens
const NARROW = 400;
const TIME_WIDTH = 52; // of "14:05:09"; half of it may lie beside the plot, over other text
const cursors = window.uPlot.sync("time");

export class Chart {
  #place; #spec; #plot = null; #data = null; #empty; #legend; #values = []; #marks = [];

  // spec: {series: [{label, color}], kind: "line" | "stack" | "bars", unit(value) -> text, empty: text,
  //        xLabel, yLabel}
  constructor(place, spec) {
    this.#place = place;
    this.#spec = spec;
    this.#empty = make("p", { className: "empty", textContent: spec.empty });
    this.#legend = make("ul", { className: "legend" });
    this.#values = spec.series.map((each) => {
      const value = make("b");
      const swatch = make("i");
      swatch.style.background = `var(${each.color})`;
      this.#legend.append(make("li", {}, swatch, `${each.label} `, value));
      return value;
    });
    place.append(make("div", { className: "plot" }, this.#empty), this.#legend);
    setAttribute(place, "role", "img");
    new ResizeObserver(() => this.#fit()).observe(place);
  }

  // xs: seconds of the wall clock, or labels of bars; columns: values of each series, null if not known.
  draw(xs, columns, about) {
    this.#data = { xs, columns };
    const marked = this.#marks.map(([at, name]) => `; ${name} began at ${clock(at)}`).join("");
    setAttribute(this.#place, "aria-label", about + marked);
    const some = columns.some((column) => column.some((value) => value !== null));
    this.#empty.hidden = some;
    this.#place.classList.toggle("has-data", some);
    if (!this.#plot) this.#make();
    this.#plot.setData(this.#drawn());
    if (this.#plot.cursor.idx == null) this.#say(null);
  }

  // Mark times with a name, [[seconds of the wall clock, name], ...], in the next drawing.
  mark(marks) {
    this.#marks = marks;
  }

  // Draw with the colors of another theme.
  restyle() {
    this.#plot?.destroy();
    this.#plot = null;
    if (this.#data) {
      this.#make();
      this.#plot.setData(this.#drawn());
    }
  }

  // The data for uPlot. A stack is drawn as sums, the largest first.
  #drawn() {
    const { xs, columns } = this.#data;
    const at = this.#spec.kind === "bars" ? xs.map((_, index) => index) : xs;
    if (this.#spec.kind !== "stack") return [at, ...columns];
    const sums = [];
    for (const column of columns) {
      const below = sums.at(-1);
      sums.push(column.map((value, index) => (value === null ? null : value + (below?.[index] ?? 0))));
    }
    return [at, ...sums.reverse()];
  }

  #fit() {
    const width = this.#place.clientWidth;
    if (this.#plot && width && width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
  }

  #make() {
    const { kind, series, unit, xLabel, yLabel } = this.#spec;
    const bars = kind === "bars";
    const ink = { stroke: color("--quiet"), font: FONT, labelFont: FONT, labelSize: 16, labelGap: 2 };
    const grid = { stroke: color("--line"), width: 1 };
    const ordered = kind === "stack" ? series.toReversed() : series;
    const options = {
      width: this.#place.clientWidth || 300,
      height: HEIGHT,
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, y: false, points: { show: !bars }, sync: bars ? undefined : { key: cursors.key } },
      scales: {
        x: bars ? { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] } : { time: true },
        y: { range: (_, __, high) => [0, high > 0 ? high * 1.08 : 1] },
      },
      axes: [
        { ...ink, font: bars && this.#place.clientWidth < NARROW ? SMALL_FONT : FONT, grid: { show: false }, ticks: { show: false },
          label: xLabel, size: 30, space: bars ? 20 : 70, ...this.#times(bars) },
        { ...ink, grid, ticks: { show: false }, label: yLabel, size: 54, space: 34, values: (_, splits) => splits.map(unit) },
      ],
      series: [{}, ...ordered.map((each, index) => this.#line(each, index, ordered.length))],
      hooks: { setCursor: [(plot) => this.#say(plot.cursor.idx)], draw: [(plot) => this.#drawMarks(plot)] },
    };
    this.#plot = new window.uPlot(options, [[0]], this.#place.querySelector(".plot"));
  }

  // A line at each mark, with its name beside it.
  #drawMarks({ ctx, bbox, valToPos }) {
    if (!this.#marks.length) return;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color("--quiet");
    ctx.font = `${11 * window.devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    for (const [at, name] of this.#marks) {
      const x = Math.round(valToPos(at, "x", true));
      const isRight = x > bbox.left + bbox.width / 2;
      ctx.textAlign = isRight ? "right" : "left";
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(name, x + (isRight ? -4 : 4), bbox.top + 2);
    }
    ctx.restore();
  }

  #times(bars) {
    if (bars) {
      return {
        splits: () => this.#data.xs.map((_, index) => index),
        values: (_, splits) => splits.map((at) => this.#data.xs[at] ?? ""),
      };
    }
    const beside = (plot, at) => Math.min(plot.valToPos(at, "x"), plot.over.clientWidth - plot.valToPos(at, "x")) < TIME_WIDTH / 2;
    const named = (at, step) => (step < 60 ? clock(at) : clock(at).slice(0, 5));
    return { values: (plot, splits, _, __, step) => splits.map((at) => (beside(plot, at) ? "" : named(at, step))) };
  }

  #line(each, index, number) {
    const stroke = color(each.color);
    if (this.#spec.kind === "bars") {
      const size = 0.8 / number;
      const align = number === 1 ? 0 : index === 0 ? -1 : 1;
      return { fill: stroke, width: 0, points: { show: false }, paths: window.uPlot.paths.bars({ size: [size, 60], align }) };
    }
    const stacked = this.#spec.kind === "stack";
    return {
      stroke, width: stacked ? 1 : 2, fill: stacked ? stroke : stroke.replace("rgb(", "rgba(").replace(")", ", 0.12)"),
      points: { show: false }, spanGaps: false,
    };
  }

  #say(at) {
    const { columns } = this.#data;
    columns.forEach((column, index) => {
      const value = at == null && this.#spec.kind !== "bars" ? column.findLast((each) => each !== null) : column[at];
      setText(this.#values[index], value == null ? "" : this.#spec.unit(value));
    });
  }
}
