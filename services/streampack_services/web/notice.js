// The notice above all figures: the cause of a wait and its duration, or an error. In a busy pipeline the cause changes
// with every step, so a wait is shown only after some seconds.

import { WAITS_FOR } from "./declared.js";
import { clock, count, duration } from "./format.js";

const LASTS_S = 5;
const HANGS_S = 30; // a trainer's step may take as long

// The time since the cause of a feed's wait has not changed.
export class Waits {
  #cause = { key: null, since: 0 };
  #detail = { key: null, since: 0 };

  // `second`: the broker's uptime.
  note(second, feed) {
    const waiting = feed.waiting_for;
    keepOrRestart(this.#cause, `${waiting?.reason} ${waiting?.stream}`, second);
    keepOrRestart(this.#detail, `${waiting?.reason} ${waiting?.detail}`, second);
    this.causeS = second - this.#cause.since;
    this.detailS = second - this.#detail.since;
  }
}

// Restart the time if the key has changed. The time of the first key is infinite: it may be older than the page.
function keepOrRestart(noted, key, second) {
  if (noted.key !== key || second < noted.since) noted.since = noted.key === null ? -Infinity : second;
  noted.key = key;
}

// [text, kind]
export function noticeOf(status, feed, waits) {
  const waiting = feed.waiting_for;
  if (status.log?.stalled) return [`The log has stopped accepting records. Cause: ${status.log.stalled}`, "bad"];
  if (status.log?.warning) return [status.log.warning, "bad"];
  if (status.standby?.stalled) return [`No new steps are served. Cause: ${status.standby.stalled}`, "bad"];
  if (status.state === "starting") return ["The broker is starting. It loads its kernels and reads its log.", "waiting"];
  if (!waiting) {
    if (feed.steps.end === null) return ["The broker is draining. It serves the steps that are already formed, then stops.", "waiting"];
    return [`The feed has ended. All ${count(feed.steps.end)} steps were returned.`, "good"];
  }
  if (waiting.reason === "failed") return [waiting.detail, "bad"];
  const busy = feed.all_ranks_attached && ["peers", "memory"].includes(waiting.reason); // the ranks train: normal
  if (busy && waits.detailS >= HANGS_S) return [`Data is ready. The broker has been waiting for trainers${lasting(waits.detailS)}: ${waiting.detail}.`, "good"];
  if (busy || waits.causeS < LASTS_S) return ["Steps are formed and delivered without long waits.", "good"];
  const time = lasting(feed.stalled_s ?? waits.causeS);
  if (waiting.batch) return [`Waiting${time} for ${waiting.detail}`, "waiting"];
  return [`Waiting for ${WAITS_FOR[waiting.reason] ?? waiting.reason}${time}: ${waiting.detail}`, "waiting"];
}

// " for 25 s", in steps of 5 s and later of minutes, since screen readers read out every change; "" if not known.
function lasting(seconds) {
  if (!Number.isFinite(seconds)) return "";
  const unit = seconds < 60 ? 5 : 60;
  return ` for ${duration(Math.floor(seconds / unit) * unit)}`;
}

// The notice while the broker does not answer; `since`: the time of its last answer.
export function gone(status, since) {
  const last = status ? ` The figures below are from ${clock(status.taken_at)}.` : "";
  return [`The broker has not answered since ${since}. This page retries every second.${last}`, "bad"];
}
