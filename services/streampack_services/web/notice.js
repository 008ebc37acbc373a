// The line above all figures: what a feed waits for, or what is wrong. In a busy pipeline that is something else with
// every step, so only what has lasted is said, and what is as it should be is said in the same words all the time.

import { clock, count } from "./format.js";

const LASTS_S = 5;
const HANGS_S = 30; // a trainer's step may take as long
const WORDS = { peers: "trainers", join: "ranks", stream: "samples", memory: "room", forming: "the packer" };

// Since when a feed waits for what it waits for.
export class Waits {
  #cause = { key: null, since: 0 };
  #words = { key: null, since: 0 };

  // `second`: the broker's uptime.
  note(second, feed) {
    const waiting = feed.waiting_for;
    moveOn(this.#cause, `${waiting?.reason} ${waiting?.stream}`, second);
    moveOn(this.#words, `${waiting?.reason} ${waiting?.detail}`, second);
    this.causeS = second - this.#cause.since;
    this.wordsS = second - this.#words.since;
  }
}

// What is so when the page is opened may have been so for long.
function moveOn(noted, key, second) {
  if (noted.key !== key || second < noted.since) noted.since = noted.key === null ? -Infinity : second;
  noted.key = key;
}

// [text, kind]
export function noticeOf(status, feed, waits) {
  const waiting = feed.waiting_for;
  if (status.log?.stalled) return [`The log takes no more: ${status.log.stalled}`, "bad"];
  if (status.state === "starting") return ["The broker is starting: it loads what packs, and reads what an earlier one has left.", "waiting"];
  if (!waiting) {
    if (feed.steps.end === null) return ["Draining: what is formed is still served.", "waiting"];
    return [`The feed has ended after ${count(feed.steps.end)} steps: all were returned.`, "good"];
  }
  if (waiting.reason === "failed") return [waiting.detail, "bad"];
  const busy = feed.all_ranks_attached && ["peers", "memory"].includes(waiting.reason); // they train, as they should
  if (busy && waits.wordsS >= HANGS_S) return [`Data is ready and waits for training: ${waiting.detail}.`, "good"];
  if (busy || waits.causeS < LASTS_S) return ["Steps are packed and read, as they should be.", "good"];
  if (waiting.batch) return [`Waiting for ${waiting.detail}`, "waiting"];
  return [`Waiting for ${WORDS[waiting.reason] ?? waiting.reason}: ${waiting.detail}`, "waiting"];
}

// That there is no word of the broker since then.
export function gone(status, since) {
  const last = status ? ` Below are its last figures, of ${clock(status.taken_at)}.` : "";
  return [`No word of the broker since ${since}: asking again every second.${last}`, "bad"];
}
