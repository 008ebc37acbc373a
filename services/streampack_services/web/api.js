// All that is asked of the broker goes through `get`. Where it wants a token, the browser has asked for one when the page
// was opened, and sends it with everything of the page.

const TIMEOUT_MS = 8000;
const KEPT = 200; // events

export async function get(path) {
  // Not a path alone: the page's own address may hold the token, and such are no addresses to fetch from.
  const answer = await fetch(location.origin + path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error(`${path}: the broker answered ${answer.status}`);
  return answer.json();
}

// The broker's last events, kept here: only what is new is asked for.
export class Events {
  #known = [];

  // Another broker has others.
  forget() {
    this.#known = [];
  }

  async catchUp() {
    const last = this.#known.at(-1)?.seq ?? 0;
    const found = await get(`/events?since=${last}`);
    if (!found.length) return this.#known;
    this.#known = found[0].seq === last + 1 ? this.#known.concat(found).slice(-KEPT) : found; // else some are lost
    return this.#known;
  }
}
