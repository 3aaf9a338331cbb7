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
  const { low, high } = extent();
  for (const cell of map.querySelectorAll("button")) {
    const head = heads.get(cell.dataset.key), v = value(head, current());
    const chosen = head.key === state.key;
    cell.style.backgroundColor = v === null ? "transparent" : `rgb(${colour((v - low) / (high - low))})`;
    cell.classList.toggle("sink", isSink(head));
    cell.setAttribute("aria-label", said(head));
    cell.setAttribute("aria-selected", chosen);
    cell.tabIndex = chosen ? 0 : -1;
  }
  $("#scale-low").textContent = shown(low, low % 1 ? 2 : 0);
  $("#scale-high").textContent = shown(high, high % 1 ? 2 : 0);
  $("#sink-key").hidden = ![...heads.values()].some(h => isSink(h));
  $("#scale-bar").style.background = `linear-gradient(to right, ${STOPS.map(c => `rgb(${c})`)})`;
  say(state.key);
}
function said(head) {
  const metric = METRICS[state.metric], text = `${label(head)}: ${shown(value(head, current()), metric.digits)} ${metric.unit}`.trim();
  return text + (isSink(head) ? ", an attention sink" : "");
}
function say(key) { $("#said").textContent = said(heads.get(key)); }

/* ---- one head ---- */
function drawHead() {
  const head = heads.get(state.key), v = (name, digits) => shown(value(head, name), digits);
  $("#head-title").textContent = label(head);
  const several = prompts(state.length) > 1, over = several ? `, the mean over ${plural(prompts(state.length), "prompt")}` : "";
  $("#head-about").textContent = (head.window ? `sees a window of ${head.window.toLocaleString("en")} keys` : "sees every key that no mask hides") +
    `; numbers are ${several ? "means over" : "those of"} ${inputs(state.length)}`;
  const n = head.window ? "none: a window does not grow" : power(count(value(head, "dispersion_n")));
  const lines = [
    ["Entropy", `${v("entropy_last", 2)} at the last token; ${v("entropy_mean", 2)} ± ${v("entropy_std", 2)} over rows`],
    ["H / log n", `${v("normalised_last", 3)}; ${v("normalised_mean", 3)} over rows`],
    ["Largest coefficient", `${v("largest_last", 3)}; ${v("largest_mean", 3)} over rows`],
    ["Spread δ", `${v("spread_last", 2)}; ${v("spread_min", 2)} to ${v("spread_max", 2)} over rows`],
    ["On the sink", `${v("sink_last", 3)}; entropy without it ${v("sinkless_last", 2)}`],
    ["β under the policy", `${v("beta_last", 2)} at the last token${over}; acts on ${shown(100 * value(head, "acts"), 0)}% of rows` +
      (value(head, "outside") === null ? "" : `, ${shown(100 * value(head, "outside"), 0)}% outside of its range`)],
    ["n of Theorem 2.2", n],
  ];
  $("#head-facts").innerHTML = lines.map(([term, text]) => `<div><dt>${term}</dt><dd>${text}</dd></div>`).join("");
}
