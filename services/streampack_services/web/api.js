// All requests to the broker go through `get`. If the broker requires a token, the browser asked for it when the page was
// opened, and sends it with every request.

const TIMEOUT_MS = 8000;
const MAX_EVENTS = 200;

export async function get(path) {
  // Not only a path: the page's own address may have the token in it, and fetch rejects such addresses.
  const answer = await fetch(location.origin + path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error(`${path}: the broker answered ${answer.status}`);
  return answer.json();
}

// The broker's last events; only new ones are fetched.
export class Events {
  #known = [];

  // Forget all events: another broker process counts anew.
  forget() {
    this.#known = [];
  }

  async catchUp() {
    const last = this.#known.at(-1)?.seq ?? 0;
    const found = await get(`/events?since=${last}`);
    if (!found.length) return this.#known;
    this.#known = found[0].seq === last + 1 ? this.#known.concat(found).slice(-MAX_EVENTS) : found; // else the broker has dropped some
    return this.#known;
  }
}
