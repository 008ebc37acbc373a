// The notice above all figures: the broker's headline of a feed, or that the broker does not answer.

import { clock } from "./format.js";

// [text, kind]
export const noticeOf = ({ headline: { text, kind } }) => [text, kind];

// The notice while the broker does not answer; `since`: the time of its last answer.
export function gone(status, since) {
  const last = status ? ` The figures below are from ${clock(status.taken_at)}.` : "";
  return [`The broker has not answered since ${since}. This page retries every second.${last}`, "bad"];
}
