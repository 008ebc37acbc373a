// The heat map of ranks: one cell per rank, colored by a figure. A line has some data-parallel ranks, each with its
// context, tensor and pipeline ranks side by side. Arrow keys move the focus; a tooltip describes the focused rank.

import { duration, percent, short } from "./format.js";
import { byId, fill, make, setAttribute, setText } from "./dom.js";

const AXES = ["dp", "cp", "tp", "pp"];
const ROOMY = 16; // most cells that have room for their figure as text

// The figures that cells can show: value (null if not known), its text, its scale and its description.
// `hot`: the end of the scale that needs attention.
export const MEASURES = {
  wait: {
    label: "data wait", of: (row) => row.data_wait, say: (v) => percent(v, 2),
    scale: (all) => [0, Math.max(0.01, ...all)], hot: "high",
    about: "Data wait of each rank, as a share of the last minute.",
  },
  cost: {
    label: "cost", of: (row) => (row.cost.length ? mean(row.cost) : null), parts: (row) => row.cost, say: (v) => v.toFixed(3),
    scale: (all) => [1, Math.max(1.05, ...all)], hot: "high",
    about: "Cost of each micro-batch of the last step / mean of all ranks. A cell has one part per micro-batch. The other ranks wait for a rank above 1.",
  },
  step: {
    label: "a step takes", of: (row) => row.work_s || null, say: duration, scale: (all) => [0, Math.max(1e-3, ...all)],
    hot: "high", about: "Time in which the trainer of each rank works on a step, mean over the last minute. The other ranks wait for a rank that takes longer.",
  },
  ahead: {
    label: "ahead", of: (row) => Math.max(0, row.have_upto - row.done_upto), say: (v) => `${short(v)} ${v === 1 ? "step" : "steps"}`,
    scale: (all) => [0, Math.max(1, ...all)], hot: "low", about: "Steps that a rank has received but not returned. A rank with 0 steps waits for data.",
  },
};

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// A function that names a rank by the axes of the mesh that are in use: "dp 3, cp 1".
export function namer(readers) {
  const axes = AXES.filter((axis) => axis === "dp" || readers.some((row) => row[`${axis}_rank`]));
  return (row) => axes.map((axis) => `${axis} ${row[`${axis}_rank`]}`).join(", ");
}

export class Heat {
  #place; #scale; #about; #tip = byId("tip"); #shown = []; #columns = 1; #focus = 0; #under = null;

  constructor(place, scale, about) {
    [this.#place, this.#scale, this.#about] = [place, scale, about];
    setAttribute(place, "role", "grid");
    place.addEventListener("keydown", (event) => this.#move(event));
    place.addEventListener("focusin", (event) => this.#tell(event.target));
    place.addEventListener("focusout", () => this.#hide());
    place.addEventListener("pointerover", (event) => this.#tell(event.target));
    place.addEventListener("pointerleave", () => this.#hide());
  }

  // `partial`: the ranks of one node; ranks that are not among them have no cell.
  draw(readers, measure, partial = false) {
    const { lines, columns, note } = laidOut(readers, partial);
    const figure = MEASURES[measure];
    const all = readers.flatMap((row) => figure.parts?.(row) ?? [figure.of(row)]).filter((value) => value !== null);
    const [low, high] = figure.scale(all.length ? all : [0]);
    this.#columns = columns;
    this.#shown = lines.flatMap((line) => line.cells);
    this.#place.style.setProperty("--columns", columns);
    this.#place.classList.toggle("roomy", this.#shown.length <= ROOMY);
    setAttribute(this.#place, "aria-label", `Ranks by ${figure.label}`);
    this.#place.style.setProperty("--names", `${Math.max(...lines.map((line) => line.name.length), 4)}ch`);
    fill(this.#place, lines, () => make("div", { role: "row" }, make("span", { role: "rowheader" })), (element, line) => {
      setText(element.firstChild, line.name);
      this.#cells(element, line, figure, low, high);
    });
    this.#legend(figure, low, high, all.length, note, readers.length);
    if (this.#under?.isConnected) this.#tell(this.#under);
    else this.#hide();
  }

  #cells(element, line, figure, low, high) {
    while (element.children.length > line.cells.length + 1) element.lastElementChild.remove();
    while (element.children.length < line.cells.length + 1) element.append(make("div", { role: "gridcell", className: "cell" }));
    line.cells.forEach((cell, index) => {
      const each = element.children[index + 1];
      const at = line.first + index;
      each.at = at;
      each.tabIndex = at === Math.min(this.#focus, this.#shown.length - 1) ? 0 : -1;
      const value = cell.row ? figure.of(cell.row) : null;
      each.classList.toggle("absent", !cell.row);
      each.classList.toggle("unknown", Boolean(cell.row) && value === null);
      const parts = value === null ? [] : figure.parts?.(cell.row) ?? [value];
      each.style.background = shade(parts.map((part) => {
        const heat = Math.min(1, Math.max(0, (part - low) / (high - low || 1)));
        return figure.hot === "low" ? 1 - heat : heat;
      }), this.#shown.length <= ROOMY);
      const said = !cell.row ? "not attached" : value === null ? "not known yet" : figure.say(value);
      setAttribute(each, "aria-label", `${cell.name}: ${said}`);
      setText(each, this.#shown.length <= ROOMY ? said : "");
    });
  }

  #legend(figure, low, high, known, note, number) {
    setText(this.#about, number ? `${figure.about} ${note}` : "No rank is attached yet.");
    this.#scale.hidden = !known;
    fill(this.#scale, [figure.say(low), "", figure.say(high)], () => make("span"), (each, text) => setText(each, text));
    this.#scale.children[1].className = figure.hot === "low" ? "ramp low" : "ramp";
  }

  #move(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.#columns, ArrowUp: -this.#columns }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? this.#shown.length - 1 : this.#focus + by;
    const cells = this.#place.querySelectorAll(".cell");
    if (!(to >= 0 && to < cells.length)) return;
    event.preventDefault();
    cells[this.#focus].tabIndex = -1;
    this.#focus = to;
    cells[to].tabIndex = 0;
    cells[to].focus();
  }

  #tell(element) {
    if (element.at === undefined) return this.#hide();
    this.#under = element;
    const cell = this.#shown[element.at];
    fill(this.#tip, cell.row ? told(cell) : [[cell.name, "not attached"]], () => make("p"), (line, [label, text]) => {
      fill(line, [label, text], () => make("span"), (each, value) => setText(each, value));
    });
    this.#tip.hidden = false;
    const place = element.getBoundingClientRect();
    const tip = this.#tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, place.left + place.width / 2 - tip.width / 2), innerWidth - tip.width - 8);
    const below = place.bottom + 8 + tip.height < innerHeight;
    this.#tip.style.left = `${left + scrollX}px`;
    this.#tip.style.top = `${(below ? place.bottom + 8 : place.top - tip.height - 8) + scrollY}px`;
  }

  #hide() {
    this.#under = null;
    this.#tip.hidden = true;
  }
}

// The background of a cell with parts from 0 (cool) to 1 (hot); paler behind text.
function shade(parts, roomy) {
  const colors = parts.map((heat) => `color-mix(in oklab, var(--hot) ${(heat * (roomy ? 55 : 100)).toFixed(1)}%, var(${roomy ? "--card" : "--cool"}))`);
  if (parts.length < 2) return colors[0] ?? "";
  return `linear-gradient(to right, ${colors.map((each, at) => `${each} ${at * 100 / parts.length}% ${(at + 1) * 100 / parts.length}%`).join(", ")})`;
}

// The lines of a rank's tooltip: [[label, text], ...].
function told({ name, row }) {
  const lines = [[name, row.where], ["steps returned", short(row.done_upto)]];
  for (const { label, of, say } of Object.values(MEASURES)) if (of(row) !== null) lines.push([label, say(of(row))]);
  if (row.cost.length > 1) lines.push(["cost by micro-batch", row.cost.slice(0, 8).map((each) => each.toFixed(2)).join(" ")]);
  if (row.stats.next_p99_ms !== undefined) lines.push(["next() p99", duration(row.stats.next_p99_ms / 1000)]);
  const waits = Object.entries(row.starved_s).filter(([, seconds]) => seconds >= 0.05);
  for (const [cause, seconds] of waits.sort((a, b) => b[1] - a[1]).slice(0, 3)) lines.push([`waited: ${cause}`, duration(seconds)]);
  lines.push(["last heard", `${duration(row.silent_s)} ago`]);
  return lines;
}

// The lines of the map: {lines: [{name, first, cells: [{name, row or null}]}], columns, note}
function laidOut(readers, partial) {
  const key = (row) => AXES.slice(1).map((axis) => row[`${axis}_rank`]).join(".");
  const inner = [...new Map(readers.map((row) => [key(row), row])).entries()].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  const all = Math.max(0, ...readers.map((row) => row.dp_rank + 1));
  const dps = partial ? [...new Set(readers.map((row) => row.dp_rank))] : [...Array(all).keys()];
  const known = new Map(readers.map((row) => [`${row.dp_rank}/${key(row)}`, row]));
  const nameOf = namer(readers);
  let together = 1;
  while (together * 2 * inner.length <= Math.sqrt(2 * dps.length * inner.length)) together *= 2;
  const lines = [];
  for (let first = 0; first < dps.length; first += together) {
    const some = dps.slice(first, first + together);
    const cells = [];
    for (const dp of some) {
      for (const [of, row] of inner) {
        cells.push({ name: nameOf({ ...row, dp_rank: dp }), row: known.get(`${dp}/${of}`) ?? null });
      }
    }
    const name = some.length > 1 ? `dp ${some[0]}-${some.at(-1)}` : `dp ${some[0]}`;
    lines.push({ name, first: first * inner.length, cells });
  }
  const others = AXES.slice(1).filter((axis) => readers.some((row) => row[`${axis}_rank`]));
  const note = others.length ? `The ${others.join(", ")} ranks of each dp rank are side by side.` : "";
  return { lines, columns: together * Math.max(1, inner.length), note };
}
