/* ---- curves against length ---- */
function drawCurves() {
  const box = $("#curves"), W = Math.min(Math.max(box.clientWidth, 300), 640), H = W < 450 ? 260 : 330, M = { left: 46, right: 14, top: 12, bottom: 40 };
  box.replaceChildren();
  const metric = METRICS[state.metric], name = current();
  const chosen = heads.get(state.key);
  const drawn = [...heads.values()].filter(h => state.scope === "all" || h.layer === chosen.layer);
  const points = head => lengths.map(n => [n, value(head, name, n)]).filter(p => p[1] !== null && p[1] < Infinity);
  const values = drawn.flatMap(points).map(p => p[1]);
  const reading = { last: "at the last token", mean: "mean over rows", max: "largest of all rows" }[name.split("_")[1]] ?? "";
  $("#curves-title").textContent = [metric.name, metric.unit && `(${metric.unit})`, reading && `, ${reading}`].filter(Boolean).join(" ").replace(" ,", ",");
  $("#curves-key").textContent = "";
  if (!values.length) { box.append(element("p", { class: "note" }, drawn.some(h => value(h, name) === Infinity) ? "Infinite: all weight is on the largest logit." : "Not known.")); return; }
  const uniform = state.metric === "entropy";
  const limits = uniform ? lengths.map(n => Math.log(value(chosen, "n", n) ?? 1)) : [];
  let low = metric.low ?? Math.min(...values), high = metric.high ?? 1.05 * Math.max(...values, ...limits);
  if (!(high > low)) high = low + 1;
  const lx = lengths.map(Math.log), x0 = Math.min(...lx), x1 = Math.max(...lx), wide = W - M.left - M.right;
  const X = n => M.left + (x1 > x0 ? (Math.log(n) - x0) / (x1 - x0) : 0.5) * wide;
  const Y = v => H - M.bottom - (v - low) / (high - low) * (H - M.top - M.bottom);
  const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${metric.name} against length: ${label(chosen)} among ${drawn.length} heads` });
  const line = (pts, attributes) => element("polyline", { points: pts.map(([n, v]) => `${X(n).toFixed(1)},${Y(v).toFixed(1)}`).join(" "), fill: "none", ...attributes });
  const steps = niceSteps(low, high);
  for (const v of steps) {
    svg.append(element("line", { x1: M.left, x2: W - M.right, y1: Y(v), y2: Y(v), class: "gridline" }));
    svg.append(element("text", { x: M.left - 7, y: Y(v) + 4, "text-anchor": "end" }, shown(v, steps.digits)));
  }
  if (lengths.length === 1) { drawOrder(svg, { drawn, name, wide, left: M.left, bottom: H - M.bottom, low, high, Y, limits }); box.append(svg); drawKey(drawn, uniform); return; }
  let free = -Infinity;
  for (const n of lengths) {
    if (X(n) < free) continue;
    const name = n.toLocaleString("en"), half = 4.2 * name.length; // digits are about 8 wide
    svg.append(element("text", { x: Math.min(X(n), W - half), y: H - M.bottom + 17, "text-anchor": "middle" }, name));
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
    svg.append(line(lengths.map((n, i) => [n, limits[i]]), { class: "uniform" }));
  }
  svg.append(line(band.map(([n, m]) => [n, m.mean]), { class: "mean" }));
  svg.append(line(points(chosen), { class: "chosen" }));
  for (const [n, v] of points(chosen)) svg.append(element("circle", { cx: X(n), cy: Y(v), r: 3.6, class: "chosen" }));
  box.append(svg);
  drawKey(drawn, uniform);
}
function drawKey(drawn, uniform) {
  const chosen = heads.get(state.key);
  $("#curves-key").innerHTML = `<span class="swatch chosen"></span>${label(chosen)} <span class="swatch mean"></span>mean and deviation of ` +
    (drawn.length === 1 ? "this head alone" : state.scope === "all" ? `all ${drawn.length} heads` : `the ${drawn.length} heads of layer ${chosen.layer}`) +
    (uniform ? ` <span class="swatch uniform"></span>uniform attention, log n` : "");
}
/* With a single length there is nothing to draw against: heads stand in order, from the smallest value to the largest. */
function drawOrder(svg, { drawn, name, wide, left, bottom, low, high, Y, limits }) {
  const order = drawn.map(head => [head, value(head, name)]).filter(p => p[1] !== null && p[1] < Infinity).sort((a, b) => a[1] - b[1]);
  const { mean, deviation } = moments(order.map(p => p[1])), clip = v => Math.min(Math.max(v, low), high);
  const across = (v, kind) => element("line", { x1: left, x2: left + wide, y1: Y(v), y2: Y(v), class: kind });
  svg.append(element("rect", { x: left, width: wide, y: Y(clip(mean + deviation)), height: Y(clip(mean - deviation)) - Y(clip(mean + deviation)), class: "band" }), across(mean, "mean"));
  for (const v of limits) svg.append(across(v, "uniform"));
  order.forEach(([head, v], i) => {
    const chosen = head.key === state.key, at = left + (i + 0.5) / order.length * wide;
    const dot = element("circle", { cx: at.toFixed(1), cy: Y(v).toFixed(1), r: chosen ? 5 : 3.2, class: chosen ? "chosen" : "dot", "data-line": head.key }, element("title", {}, label(head)));
    dot.addEventListener("click", () => choose(head.key));
    svg.append(dot);
  });
  svg.append(element("text", { x: left + wide / 2, y: bottom + 20, "text-anchor": "middle", class: "title" }, "heads, from the smallest to the largest"));
}
function niceSteps(low, high) {
  const raw = (high - low) / 5, base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * base).find(s => s >= raw * 0.999);
  const steps = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + 1e-9; v += step) steps.push(v);
  steps.digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return steps;
}
