// Numbers and times as text.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

// 1234567 -> "1,234,567"
export const count = (number) => whole.format(number);

// 1234567 -> "1.23M": three digits
export function short(number) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size < 1) return trim(number.toPrecision(2));
  for (const [unit, at] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (size >= at * 0.9995) return trim((number / at).toPrecision(3)) + unit;
  }
  return trim(number.toPrecision(3));
}

// 0.99853 -> "99.853%"
export function percent(share, digits = 3) {
  return `${trim((share * 100).toFixed(digits))}%`;
}

// 0.00013 -> "0.013%": two significant digits
export function fewPercent(share) {
  if (share === 0) return "0%";
  const size = Math.abs(share * 100);
  return `${trim((share * 100).toFixed(size >= 10 ? 0 : size >= 1 ? 1 : Math.min(6, 1 - Math.floor(Math.log10(size)))))}%`;
}

export function bytes(number) {
  for (const [unit, at] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (number >= at) return `${trim((number / at).toPrecision(3))} ${unit}`;
  }
  return `${whole.format(number)} B`;
}

// 0.0123 -> "12.3 ms", 75 -> "1 min 15 s", 90061 -> "1 d 1 h"
export function duration(seconds) {
  if (seconds < 1) return seconds ? `${trim((seconds * 1000).toPrecision(3))} ms` : "0 s";
  if (seconds < 10) return `${trim(seconds.toFixed(1))} s`;
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  let left = Math.floor(seconds);
  const said = [];
  for (const [size, unit] of parts.slice(first, first + 2)) {
    if (left >= size) said.push(`${Math.floor(left / size)} ${unit}`);
    left %= size;
  }
  return said.join(" ");
}

const FORMATS = {
  tokens: short, samples: count, bytes, seconds: duration, ratio: percent, quotient: (value) => value.toFixed(4), weight: short, count,
};

// A value of a declared figure in its unit, or "key value" of each key; "" if there is none.
export function inUnit(value, unit) {
  if (value === null || value === undefined) return "";
  if (typeof value === "object") return Object.entries(value).map(([key, part]) => `${key} ${inUnit(part, unit)}`).join(", ");
  return typeof value === "number" ? FORMATS[unit](value) : String(value);
}

// Seconds of the wall clock -> "14:05:09"
export const clock = (second) => new Date(second * 1000).toLocaleTimeString("en-GB");

// "1.20" -> "1.2", "3.00" -> "3", "1.5e+3" -> "1500"
function trim(text) {
  if (text.includes("e")) return String(Number(text));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
