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
  beta: { name: "β under the policy", unit: "", digits: 2, readings: ["last", "mean"] },
  acts: { name: "Share of rows where the policy acts", unit: "", digits: 2, low: 0, high: 1, readings: [""] },
  outside: { name: "Share of rows outside of the policy’s range", unit: "", digits: 2, low: 0, high: 1, readings: [""] },
};
const state = { metric: "entropy", reading: data.source.kind === "max" ? "last" : "mean", length: lengths.at(-1), key: data.start, scope: "layer", rank: "sharp", sinks: false, beta: null };

const named = (metric, reading) => {
  const readings = METRICS[metric].readings;
  const chosen = readings.includes(reading) ? reading : readings[0];
  return chosen ? metric + "_" + chosen : metric;
};
const number = v => v === "inf" ? Infinity : v ?? null;
const value = (head, name, length = state.length) => number(head.at.get(length)?.[column[name]]);
const current = () => named(state.metric, state.reading);
const label = head => `Layer ${head.layer}, head ${head.head}`;
const shown = (x, digits) => x === null ? "–" : x === Infinity ? "∞" : x.toFixed(digits).replace("-", "−");
const count = n => n === null ? "–" : n < 1e6 ? Math.round(n).toLocaleString("en") : n.toExponential(1).replace("e+", " × 10^");
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

/* ---- the heat map ---- */
const map = $("#map");
function buildMap() {
  map.style.setProperty("--heads", width);
  const corner = element("div", { role: "row", class: "line" }, element("span", { role: "columnheader", class: "layer" }, "layer"));
  for (let h = 0; h < width; h++) corner.append(element("span", { role: "columnheader", class: "head" }, width <= 16 || h % 4 === 0 ? h : ""));
  map.append(corner);
  for (const layer of layers) {
    const line = element("div", { role: "row", class: "line" });
    const windowed = [...heads.values()].find(h => h.layer === layer).window;
    line.append(element("span", { role: "rowheader", class: "layer", title: windowed ? `window of ${windowed} keys` : "all keys" }, layer + (windowed ? "ʷ" : "")));
    for (let h = 0; h < width; h++) {
      const key = layer + "." + h;
      if (!heads.has(key)) { line.append(element("span", { role: "gridcell" })); continue; }
      const cell = element("button", { type: "button", role: "gridcell", "data-key": key, tabindex: -1 });
      cell.addEventListener("click", () => choose(key));
      cell.addEventListener("mouseenter", () => say(key));
      cell.addEventListener("focus", () => say(key));
      line.append(cell);
    }
    map.append(line);
  }
  map.addEventListener("mouseleave", () => say(state.key));
  map.addEventListener("keydown", event => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [layer, head] = document.activeElement.dataset.key.split(".").map(Number);
    const row = layers[Math.min(Math.max(layers.indexOf(layer) + step[0], 0), layers.length - 1)];
    const next = row + "." + Math.min(Math.max(head + step[1], 0), width - 1);
    if (heads.has(next)) { choose(next); $(`[data-key="${next}"]`).focus(); }
  });
}
function extent() {
  const metric = METRICS[state.metric];
  const all = [...heads.values()].flatMap(h => lengths.map(n => value(h, current(), n))).filter(v => v !== null && v < Infinity);
  const low = metric.low ?? Math.min(...all, ...(all.length ? [] : [0])), high = metric.high ?? Math.max(...all, low);
  return { low, high: high > low ? high : low + 1 };
}
function drawMap() {
  const { low, high } = extent(), metric = METRICS[state.metric];
  for (const cell of map.querySelectorAll("button")) {
    const head = heads.get(cell.dataset.key), v = value(head, current());
    const chosen = head.key === state.key;
    cell.style.background = v === null ? "transparent" : `rgb(${colour((v - low) / (high - low))})`;
    cell.setAttribute("aria-label", `${label(head)}: ${shown(v, metric.digits)} ${metric.unit}`.trim());
    cell.setAttribute("aria-selected", chosen);
    cell.tabIndex = chosen ? 0 : -1;
  }
  $("#scale-low").textContent = shown(low, low % 1 ? 2 : 0);
  $("#scale-high").textContent = shown(high, high % 1 ? 2 : 0);
  $("#scale-bar").style.background = `linear-gradient(to right, ${STOPS.map(c => `rgb(${c})`)})`;
  say(state.key);
}
function say(key) {
  const head = heads.get(key), metric = METRICS[state.metric];
  $("#said").textContent = `${label(head)}: ${shown(value(head, current()), metric.digits)} ${metric.unit}`.trim();
}

/* ---- one head ---- */
function drawHead() {
  const head = heads.get(state.key), v = (name, digits) => shown(value(head, name), digits);
  $("#head-title").textContent = label(head);
  $("#head-about").textContent = head.window ? `sees a window of ${head.window.toLocaleString("en")} keys` : "sees every key that no mask hides";
  const n = head.window ? "none: a window does not grow" : power(count(value(head, "dispersion_n")));
  const lines = [
    ["Entropy", `${v("entropy_last", 2)} at the last token; ${v("entropy_mean", 2)} ± ${v("entropy_std", 2)} over rows`],
    ["H / log n", `${v("normalised_last", 3)}; ${v("normalised_mean", 3)} over rows`],
    ["Largest coefficient", `${v("largest_last", 3)}; ${v("largest_mean", 3)} over rows`],
    ["Spread δ", `${v("spread_last", 2)}; ${v("spread_min", 2)} to ${v("spread_max", 2)} over rows`],
    ["On the sink", `${v("sink_last", 3)}; entropy without it ${v("sinkless_last", 2)}`],
    ["β under the policy", `${v("beta_last", 2)}; acts on ${shown(100 * value(head, "acts"), 0)}% of rows` +
      (value(head, "outside") === null ? "" : `, ${shown(100 * value(head, "outside"), 0)}% outside of its range`)],
    ["n of Theorem 2.2", n],
  ];
  $("#head-facts").innerHTML = lines.map(([term, text]) => `<div><dt>${term}</dt><dd>${text}</dd></div>`).join("");
}

/* ---- curves against length ---- */
function drawCurves() {
  const box = $("#curves"), W = Math.min(Math.max(box.clientWidth, 300), 640), H = W < 450 ? 260 : 330, M = { left: 46, right: 14, top: 12, bottom: 40 };
  box.replaceChildren();
  const metric = METRICS[state.metric], name = current();
  const chosen = heads.get(state.key);
  const drawn = [...heads.values()].filter(h => state.scope === "all" || h.layer === chosen.layer);
  const tokens = Object.fromEntries(data.lengths.map(e => [e.length, e.tokens.reduce((a, b) => a + b, 0) / e.tokens.length]));
  const points = head => lengths.map(n => [n, value(head, name, n)]).filter(p => p[1] !== null && p[1] < Infinity);
  const values = drawn.flatMap(points).map(p => p[1]);
  const reading = { last: "at the last token", mean: "mean over rows", max: "largest of all rows" }[name.split("_")[1]] ?? "";
  $("#curves-title").textContent = [metric.name, metric.unit && `(${metric.unit})`, reading && `, ${reading}`].filter(Boolean).join(" ").replace(" ,", ",");
  $("#curves-key").textContent = "";
  if (!values.length) { box.append(element("p", { class: "note" }, drawn.some(h => value(h, name) === Infinity) ? "Infinite: all weight is on the largest logit." : "Not known.")); return; }
  const uniform = state.metric === "entropy";
  const limits = uniform ? Object.values(tokens).map(Math.log) : [];
  let low = metric.low ?? Math.min(...values), high = metric.high ?? 1.05 * Math.max(...values, ...limits);
  if (!(high > low)) high = low + 1;
  const lx = lengths.map(Math.log), x0 = Math.min(...lx), x1 = Math.max(...lx);
  const X = n => x1 > x0 ? M.left + (Math.log(n) - x0) / (x1 - x0) * (W - M.left - M.right) : (W + M.left) / 2;
  const Y = v => H - M.bottom - (v - low) / (high - low) * (H - M.top - M.bottom);
  const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${metric.name} against length: ${label(chosen)} among ${drawn.length} heads` });
  const line = (pts, attributes) => element("polyline", { points: pts.map(([n, v]) => `${X(n).toFixed(1)},${Y(v).toFixed(1)}`).join(" "), fill: "none", ...attributes });
  const steps = niceSteps(low, high);
  for (const v of steps) {
    svg.append(element("line", { x1: M.left, x2: W - M.right, y1: Y(v), y2: Y(v), class: "gridline" }));
    svg.append(element("text", { x: M.left - 7, y: Y(v) + 4, "text-anchor": "end" }, shown(v, steps.digits)));
  }
  let free = -Infinity;
  for (const n of lengths) {
    if (X(n) < free) continue;
    svg.append(element("text", { x: X(n), y: H - M.bottom + 17, "text-anchor": "middle" }, n.toLocaleString("en")));
    free = X(n) + 44;
  }
  svg.append(element("text", { x: (M.left + W - M.right) / 2, y: H - 4, "text-anchor": "middle", class: "title" }, data.source.unit === "items" ? "items in the sequence" : "tokens"));
  const band = lengths.map(n => {
    const at = drawn.map(h => value(h, name, n)).filter(v => v !== null && v < Infinity);
    return at.length ? [n, moments(at)] : null;
  }).filter(Boolean);
  const clip = v => Math.min(Math.max(v, low), high);
  const edge = sign => band.map(([n, m]) => [n, clip(m.mean + sign * m.deviation)]);
  const path = [...edge(1), ...edge(-1).reverse()].map(([n, v]) => `${X(n).toFixed(1)},${Y(v).toFixed(1)}`).join(" L ");
  svg.append(element("path", { d: `M ${path} Z`, class: "band" }));
  for (const head of drawn) {
    if (head.key === state.key) continue;
    const other = line(points(head), { class: "other", "data-line": head.key });
    other.append(element("title", {}, label(head)));
    other.addEventListener("click", () => choose(head.key));
    svg.append(other);
  }
  if (uniform) {
    const limit = data.lengths.map(e => [e.length, Math.log(tokens[e.length])]);
    svg.append(line(limit, { class: "uniform" }));
  }
  svg.append(line(band.map(([n, m]) => [n, m.mean]), { class: "mean" }));
  svg.append(line(points(chosen), { class: "chosen" }));
  for (const [n, v] of points(chosen)) svg.append(element("circle", { cx: X(n), cy: Y(v), r: 3.6, class: "chosen" }));
  box.append(svg);
  $("#curves-key").innerHTML = `<span class="swatch chosen"></span>${label(chosen)} <span class="swatch mean"></span>mean and deviation of ` +
    (state.scope === "all" ? `all ${drawn.length} heads` : `the ${drawn.length} heads of layer ${chosen.layer}`) + (uniform ? ` <span class="swatch uniform"></span>uniform attention, log n` : "");
}
function niceSteps(low, high) {
  const raw = (high - low) / 5, base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * base).find(s => s >= raw * 0.999);
  const steps = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + 1e-9; v += step) steps.push(v);
  steps.digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return steps;
}

/* ---- tables ---- */
function drawSpreads() {
  const reading = $("#spread-reading").value, name = "spread_" + reading, body = $("#spreads tbody");
  const free = [...heads.values()].filter(h => !h.window), windowed = heads.size - free.length;
  $("#spreads-note").textContent = !windowed ? "" : !free.length ? "All heads have a window: their rows stop growing, and there is no n." :
    `n is for the average of heads without a window (${free.length} of ${heads.size}); the rows of the others stop growing.`;
  body.replaceChildren();
  for (const { length, tokens } of data.lengths) {
    const of = [...heads.values()].map(h => value(h, name, length)).filter(v => v !== null);
    const { mean, deviation } = moments(of);
    const growing = free.map(h => value(h, name, length)).filter(v => v !== null);
    const n = growing.length ? power(count(Math.floor(Math.exp(moments(growing).mean) / data.epsilon) + 1)) : "none";
    const cells = [length.toLocaleString("en"), Math.round(tokens.reduce((a, b) => a + b, 0) / tokens.length).toLocaleString("en"),
      shown(Math.min(...of), 2), shown(Math.max(...of), 2), `${shown(mean, 2)} ± ${shown(deviation, 2)}`, n];
    const row = element("tr");
    cells.forEach((text, i) => { const cell = element(i ? "td" : "th", i ? {} : { scope: "row" }); cell.innerHTML = text; row.append(cell); });
    body.append(row);
  }
}
function slope(head) {
  const name = state.sinks ? "sinkless_" : "entropy_", reading = state.reading === "mean" ? "mean" : "last";
  const pts = lengths.map(n => [Math.log(Math.max(1, value(head, "n", n) ?? 1)), value(head, name + reading, n)]).filter(p => p[1] !== null);
  if (pts.length < 2) return null;
  const mx = moments(pts.map(p => p[0])).mean, my = moments(pts.map(p => p[1])).mean;
  const above = pts.reduce((a, [x, y]) => a + (x - mx) * (y - my), 0), below = pts.reduce((a, [x]) => a + (x - mx) ** 2, 0);
  return below > 0 ? above / below : null;
}
function drawRanking() {
  const reading = state.reading === "mean" ? "mean" : "last", entropy = (state.sinks ? "sinkless_" : "entropy_") + reading;
  const last = lengths.at(-1), body = $("#ranking tbody");
  let ranked = [...heads.values()].map(head => ({ head, slope: slope(head), entropy: value(head, entropy, last), n: value(head, "n", last) }));
  ranked = ranked.filter(r => (state.rank === "sharp" ? r.entropy : r.slope) !== null);
  const share = r => r.n > 1 ? r.entropy / Math.log(r.n) : 0;
  ranked.sort(state.rank === "sharp" ? (a, b) => share(a) - share(b) : (a, b) => b.slope - a.slope);
  body.replaceChildren();
  ranked.slice(0, 12).forEach((r, i) => {
    const button = element("button", { type: "button", class: "link" }, label(r.head));
    button.addEventListener("click", () => choose(r.head.key));
    const sink = value(r.head, "sink_" + reading, last);
    const row = element("tr", r.head.key === state.key ? { class: "current" } : {}, element("th", { scope: "row" }, `${i + 1}. `, button));
    for (const text of [shown(r.entropy, 2), shown(share(r), 3), shown(value(r.head, "largest_" + reading, last), 3), shown(sink, 2), shown(r.slope, 2)]) row.append(element("td", {}, text));
    body.append(row);
  });
}

/* ---- the attention row ---- */
const rows = new Map();
for (const row of data.attention?.heads ?? []) rows.set(row.layer + "." + row.head, row);
function logits(row) {
  const bytes = Uint8Array.from(atob(row.below), c => c.charCodeAt(0)), view = new DataView(bytes.buffer);
  return Array.from({ length: bytes.length / 2 }, (_, i) => { const s = view.getUint16(2 * i, true); return s === 65535 ? -Infinity : -s / 1024; });
}
function softmax(z, beta) {
  if (beta === Infinity) {
    const most = Math.max(...z), ties = z.filter(v => v === most).length;
    return z.map(v => v === most ? 1 / ties : 0);
  }
  const e = z.map(v => v === -Infinity ? 0 : Math.exp(beta * v)), sum = e.reduce((a, b) => a + b, 0);
  return e.map(v => v / sum);
}
const entropyOf = p => -p.reduce((a, v) => a + (v > 0 ? v * Math.log(v) : 0), 0);
const visible = word => /^ +$/.test(word) ? "␣".repeat(word.length) : word.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ /, "\u00a0") || "∅";
function drawRow() {
  const row = rows.get(state.key);
  if (!row) return;
  const z = logits(row), policy = number(row.beta), beta = state.beta ?? policy;
  $("#beta").value = Math.min(beta, Number($("#beta").max));
  $("#beta-value").textContent = shown(beta, 2);
  $("#beta-policy").textContent = `The policy’s β for this row: ${shown(policy, 2)}`;
  const before = softmax(z, 1), after = softmax(z, beta), most = Math.max(...before, ...after);
  $("#row-title").textContent = `${label(heads.get(state.key))}, last of ${z.length.toLocaleString("en")} tokens`;
  const W = Math.min(Math.max($("#row-bars").clientWidth, 300), 1000), H = 190, base = H - 16, svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "Coefficients of the last row, without and with the policy" });
  const step = W / z.length;
  for (const [p, kind] of [[before, "before"], [after, "after"]]) {
    let d = "";
    p.forEach((v, i) => {
      if (v / most < 0.002) return;
      const wide = Math.max(step * 0.42, 0.9), x = i * step + (kind === "after" ? step * 0.5 : step * 0.06);
      d += `M${x.toFixed(2)} ${base}V${(base - v / most * (base - 14)).toFixed(1)}h${wide.toFixed(2)}V${base}Z`;
    });
    svg.append(element("path", { d: d || "M0 0", class: kind }));
  }
  svg.append(element("line", { x1: 0, x2: W, y1: base, y2: base, class: "axis" }), element("text", { x: 2, y: 11 }, most.toFixed(3)),
    element("text", { x: 2, y: H - 2 }, "first token"), element("text", { x: W - 2, y: H - 2, "text-anchor": "end" }, "last token"));
  $("#row-bars").replaceChildren(svg);
  $("#row-facts").innerHTML = `<span class="swatch before"></span>β = 1: entropy ${entropyOf(before).toFixed(2)}, largest ${Math.max(...before).toFixed(3)} ` +
    `<span class="swatch after"></span>β = ${shown(beta, 2)}: entropy ${entropyOf(after).toFixed(2)}, largest ${Math.max(...after).toFixed(3)}`;
  const strip = $("#row-words"), words = data.attention.words;
  const start = Math.max(0, words.length - 240), parts = document.createDocumentFragment();
  if (start) parts.append(element("span", { class: "cut" }, `… ${start} tokens before …`));
  for (let i = start; i < words.length; i++) {
    const word = element("span", { style: `--v:${(after[i] / Math.max(...after)).toFixed(3)}`, title: `token ${i}: ${before[i].toFixed(4)} → ${after[i].toFixed(4)}` }, visible(words[i]));
    parts.append(word);
  }
  strip.replaceChildren(parts);
  const order = z.map((_, i) => i).sort((a, b) => Math.max(before[b], after[b]) - Math.max(before[a], after[a])).slice(0, 8);
  $("#row-top tbody").replaceChildren(...order.map(i => {
    const code = element("code", {}, visible(words[i]));
    return element("tr", {}, element("th", { scope: "row" }, code), element("td", {}, i), element("td", {}, before[i].toFixed(4)), element("td", {}, after[i].toFixed(4)));
  }));
}

/* ---- controls ---- */
function choose(key) { state.key = key; state.beta = null; draw(); }
function draw() {
  const readings = METRICS[state.metric].readings;
  for (const input of document.querySelectorAll("[name=reading]")) {
    input.disabled = !readings.includes(input.value) && readings[0] === "";
    input.checked = input.value === state.reading;
  }
  drawMap(); drawHead(); drawCurves(); drawSpreads(); drawRanking(); drawRow();
}
function control(selector, event, change) {
  for (const part of document.querySelectorAll(selector)) part.addEventListener(event, () => { change(part); draw(); });
}
for (const [key, metric] of Object.entries(METRICS)) {
  const known = [...heads.values()].some(h => value(h, named(key, state.reading)) !== null);
  if (known) $("#metric").append(element("option", { value: key }, metric.name));
}
for (const n of lengths) $("#length").append(element("option", { value: n }, `${n.toLocaleString("en")} ${data.source.unit}`));
$("#length").value = state.length;
control("#metric", "change", part => { state.metric = part.value; });
control("#length", "change", part => { state.length = Number(part.value); });
control("[name=reading]", "change", part => { state.reading = part.value; });
control("[name=scope]", "change", part => { state.scope = part.value; });
control("[name=rank]", "change", part => { state.rank = part.value; });
control("#sinks", "change", part => { state.sinks = part.checked; });
control("#spread-reading", "change", () => {});
control("#beta", "input", part => { state.beta = Number(part.value); });
control("#beta-reset", "click", () => { state.beta = null; });
if (!rows.size) $("#row-part")?.remove();
$("#spread-reading").value = state.reading;
buildMap();
draw();
addEventListener("resize", () => { drawCurves(); drawRow(); });
