"use strict";
/* The page's state is one head, one length, one metric and one reading; everything is drawn again from them. */
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, root = document) => root.querySelector(selector);
const column = Object.fromEntries(data.columns.map((name, i) => [name, i]));
const lengths = data.lengths.map(entry => entry.length);
const heads = new Map(); // a head, and its row at every length
for (const row of data.rows) {
  const key = row[column.layer] + "." + row[column.head];
  if (!heads.has(key)) heads.set(key, { key, layer: row[column.layer], head: row[column.head], window: row[column.window], at: new Map() });
  heads.get(key).at.set(row[column.length], row);
}
const layers = [...new Set([...heads.values()].map(h => h.layer))];
const width = 1 + Math.max(...[...heads.values()].map(h => h.head));
const METRICS = {
  entropy: { name: "Entropy H", unit: "nats", digits: 2, low: 0, readings: ["last", "mean"] },
  normalised: { name: "Normalised entropy H / log n", unit: "", digits: 3, low: 0, high: 1, readings: ["last", "mean"] },
  largest: { name: "Largest coefficient", unit: "", digits: 3, low: 0, high: 1, readings: ["last", "mean"] },
  spread: { name: "Logit spread δ", unit: "", digits: 2, low: 0, readings: ["last", "mean", "max"] },
  sink: { name: "Mass on the first token (sink)", unit: "", digits: 3, low: 0, high: 1, readings: ["last", "mean"] },
  sinkless: { name: "Entropy without the sink", unit: "nats", digits: 2, low: 0, readings: ["last", "mean"] },
  acting: { name: "Entropy after the model’s own β", unit: "nats", digits: 2, low: 0, readings: ["last", "mean"] },
  beta: { name: "β under the policy", unit: "", digits: 2, readings: ["last", "mean"] },
  acts: { name: "Share of rows where the policy acts", unit: "", digits: 2, low: 0, high: 1, readings: [""] },
  outside: { name: "Share of rows outside of the policy’s range", unit: "", digits: 2, low: 0, high: 1, readings: [""] },
};
const state = { metric: "entropy", reading: data.source.kind === "max" ? "last" : "mean", length: lengths.at(-1), key: data.start, scope: "layer", rank: "sharp", sinks: "apart", all: false, beta: null };

const named = (metric, reading) => {
  const readings = METRICS[metric].readings;
  const chosen = readings.includes(reading) ? reading : readings[0];
  return chosen ? metric + "_" + chosen : metric;
};
const number = v => v === "inf" ? Infinity : v ?? null;
const value = (head, name, length = state.length) => number(head.at.get(length)?.[column[name]]);
const current = () => named(state.metric, state.reading);
const isSink = (head, length = state.length) => value(head, named("sink", state.reading), length) > data.sink;
const prompts = length => data.lengths.find(entry => entry.length === length).tokens.length;
const inputs = length => `${plural(prompts(length), "prompt")} of ${plural(length, data.source.unit.slice(0, -1))}`;
const label = head => `Layer ${head.layer}, head ${head.head}`;
const shown = (x, digits) => x === null ? "–" : x === Infinity ? "∞" : x.toFixed(digits).replace(/^-(?=0\.?0*$)/, "").replace("-", "−");
const plural = (n, thing) => `${n.toLocaleString("en")} ${thing}${n === 1 ? "" : "s"}`;
const count = n => n === null ? "–" : n > 1e300 ? "over 10^300" : n < 1e6 ? Math.round(n).toLocaleString("en") : n.toExponential(1).replace("e+", " × 10^");
const power = text => text.replace(/10\^(\d+)/, "10<sup>$1</sup>");
const moments = values => {
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  return { mean, deviation: Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / values.length) };
};
const STOPS = [[0, 34, 78], [50, 62, 108], [87, 92, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116], [195, 179, 105], [226, 203, 83], [254, 232, 56]];
const colour = share => {
  const at = Math.min(Math.max(share, 0), 1) * (STOPS.length - 1), i = Math.min(Math.floor(at), STOPS.length - 2);
  return STOPS[i].map((c, j) => Math.round(c + (at - i) * (STOPS[i + 1][j] - c)));
};
const element = (name, attributes = {}, ...children) => {
  const svg = ["svg", "g", "path", "line", "text", "circle", "rect", "polyline", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, v] of Object.entries(attributes)) made.setAttribute(key, v);
  made.append(...children);
  return made;
};
