// The rows of /history for a feed, and the series that the charts draw.
//
// Rows hold counters and current values. A rate is a difference over `smooth` seconds, since a step may take longer than
// a second.

import { get } from "./api.js";

const ASK_ANEW_AFTER = 900; // new rows after which all are fetched again: the broker has fewer old rows by then
export const RANGES = [[600, "10 min"], [3600, "1 h"], [Infinity, "all"]];

export class History {
  #feed; #rows = [];
  #columns = {};
  #epoch = "";
  #upto = -1;
  #added = 0;

  constructor(feed) {
    this.#feed = feed;
  }

  // Fetch the new rows.
  async catchUp() {
    const whole = this.#upto < 0;
    const found = await get(`/history?since=${this.#upto}&feed=${encodeURIComponent(this.#feed)}`);
    if (found.epoch !== this.#epoch && !whole) {
      this.#upto = -1; // another broker process with its own uptime; the old rows stay
      this.#epoch = found.epoch;
      this.#added = 0;
      return this.catchUp();
    }
    this.#epoch = found.epoch;
    found.columns.forEach((name, index) => (this.#columns[name] = index));
    const rows = found.feeds[this.#feed] ?? [];
    if (!rows.length) return;
    this.#upto = rows.at(-1)[0];
    for (const row of rows) row[0] += found.began;
    this.#rows = this.#rows.filter((row) => row[0] < rows[0][0]).concat(rows);
    this.#added += rows.length;
    if (this.#added > ASK_ANEW_AFTER && !whole) {
      this.#upto = -1;
      this.#added = 0;
    }
  }

  // {times, smooth, rise(column), of(column)} of the last `range` seconds.
  window(range) {
    const all = this.#rows;
    const end = all.length ? all.at(-1)[0] : 0;
    const first = range === Infinity ? 0 : Math.max(0, all.findIndex((row) => row[0] >= end - range));
    const rows = all.slice(first);
    const span = rows.length ? end - rows[0][0] : 0;
    const smooth = Math.max(5, Math.min(range, span) / 60);
    return new Window(all, first, smooth, this.#columns);
  }
}

class Window {
  #all; #first; #columns; #before = [];

  constructor(all, first, smooth, columns) {
    this.#all = all;
    this.#first = first;
    this.#columns = columns;
    this.smooth = smooth;
    this.times = all.slice(first).map((row) => row[0]);
    let back = 0;
    for (let at = first; at < all.length; at++) {
      while (back < at - 1 && all[back + 1][0] <= all[at][0] - smooth) back++;
      this.#before.push(back < at ? back : -1);
    }
  }

  // Values of a column, by time.
  of(column) {
    const at = this.#columns[column];
    return this.#all.slice(this.#first).map((row) => row[at]);
  }

  // Increase of a counter over the `smooth` seconds before; null if not known, or after a restart of the broker.
  rise(column) {
    const at = column === "second" ? 0 : this.#columns[column];
    return this.#before.map((before, index) => {
      if (before < 0) return null;
      const rise = this.#all[this.#first + index][at] - this.#all[before][at];
      return rise < 0 ? null : rise;
    });
  }
}
