// The share of the last minute that each rank waited for data. The broker sends totals; this page keeps the totals of the
// last minute and takes differences.

const EVERY_S = 5;
const OVER_S = 60;

export class Recent {
  #noted = []; // [{second, waited: Map of seconds by rank}], oldest first

  // `second`: the broker's uptime.
  note(second, readers) {
    const last = this.#noted.at(-1)?.second ?? -Infinity;
    if (second < last) this.#noted = []; // another broker
    if (second - last < EVERY_S && this.#noted.length) return;
    const reported = readers.filter((row) => Object.keys(row.stats).length); // the others have not sent their totals yet
    this.#noted.push({ second, waited: new Map(reported.map((row) => [nameOf(row), waitedOf(row)])) });
    while (second - this.#noted[0].second > OVER_S) this.#noted.shift();
  }

  // The share of the last minute, 0 to 1; null until this page has followed the rank for EVERY_S.
  share(second, row) {
    const then = this.#noted.find((each) => each.waited.has(nameOf(row)));
    const seconds = then ? second - then.second : 0;
    const waited = then ? waitedOf(row) - then.waited.get(nameOf(row)) : -1;
    if (seconds < EVERY_S || waited < 0) return null;
    return Math.min(1, waited / seconds);
  }
}

const nameOf = (row) => `${row.where} ${row.dp_rank}.${row.cp_rank}.${row.tp_rank}.${row.pp_rank}`;
const waitedOf = (row) => Object.values(row.starved_s).reduce((sum, seconds) => sum + seconds, 0);
