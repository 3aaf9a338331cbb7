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
    const average = Number(moments(growing).mean.toPrecision(6));
    const n = growing.length ? power(count(Math.floor(Math.exp(average) / data.epsilon) + 1)) : "none";
    const cells = [length.toLocaleString("en"), Math.round(tokens.reduce((a, b) => a + b, 0) / tokens.length).toLocaleString("en"),
      shown(Math.min(...of), 2), shown(Math.max(...of), 2), `${shown(mean, 2)} ± ${shown(deviation, 2)}`, n];
    const row = element("tr");
    cells.forEach((text, i) => { const cell = element(i ? "td" : "th", i ? {} : { scope: "row" }); cell.innerHTML = text; row.append(cell); });
    body.append(row);
  }
}
/* A head as it is ranked: with all keys, or ("without") with all keys but the first. */
function rank(head) {
  const reading = state.reading === "mean" ? "mean" : "last", without = state.sinks === "without", last = lengths.at(-1);
  const entropy = n => value(head, (without ? "sinkless_" : "entropy_") + reading, n);
  const log = n => Math.log(Math.max(1, (value(head, "n", n) ?? 1) - without));
  const pts = lengths.map(n => [log(n), entropy(n)]).filter(p => p[1] !== null);
  const mx = moments(pts.map(p => p[0])).mean, my = moments(pts.map(p => p[1])).mean;
  const above = pts.reduce((a, [x, y]) => a + (x - mx) * (y - my), 0), below = pts.reduce((a, [x]) => a + (x - mx) ** 2, 0);
  return {
    head, entropy: entropy(last), share: without ? (log(last) > 0 ? entropy(last) / log(last) : null) : value(head, "normalised_" + reading, last),
    largest: value(head, "largest_" + reading, last), sink: value(head, "sink_" + reading, last), slope: below > 0 ? above / below : null,
  };
}
function rankingColumns() {
  const without = state.sinks === "without";
  return [
    [without ? "Entropy without the first token" : "Entropy", r => shown(r.entropy, 2)],
    [without ? "H / log (n − 1)" : "H / log n", r => shown(r.share, 3)],
    ...(without ? [] : [["Largest", r => shown(r.largest, 3)]]),
    [without ? "Left out, on the first token" : "On the first token", r => shown(r.sink, 2)],
    ...(lengths.length > 1 ? [["Nats per e-fold of n", r => shown(r.slope, 2)]] : []),
  ];
}
function drawRanking() {
  const sinks = [...heads.values()].filter(h => isSink(h, lengths.at(-1))), apart = state.sinks === "apart" && sinks.length < heads.size;
  const by = state.rank === "sharp" ? r => r.share : r => -r.slope;
  const ranked = [...heads.values()].filter(h => !apart || !sinks.includes(h)).map(rank).filter(r => (state.rank === "sharp" ? r.share : r.slope) !== null);
  ranked.sort((a, b) => by(a) - by(b));
  const columns = rankingColumns(), most = 12;
  $("#ranking thead tr").replaceChildren(...["Head", ...columns.map(c => c[0])].map(text => element("th", { scope: "col" }, text)));
  $("#ranking tbody").replaceChildren(...ranked.slice(0, state.all ? ranked.length : most).map((r, i) => {
    const button = element("button", { type: "button", class: "link" }, label(r.head));
    button.addEventListener("click", () => choose(r.head.key));
    const name = element("th", { scope: "row" }, element("span", { class: "ordinal" }, `${i + 1}. `), button, ...(sinks.includes(r.head) ? [" ", element("span", { class: "badge" }, "sink")] : []));
    return element("tr", r.head.key === state.key ? { class: "current" } : {}, name, ...columns.map(c => element("td", {}, c[1](r))));
  }));
  $("#ranking-all").hidden = ranked.length <= most;
  $("#ranking-all").textContent = state.all ? `only the first ${most}` : `all ${plural(ranked.length, "head")}`;
  const many = `${sinks.length} of ${plural(heads.size, "head")} ${sinks.length === 1 ? "puts" : "put"} more than half of the weight on the first token at the longest input`;
  $("#ranking-note").textContent = !sinks.length ? "No head is an attention sink: none puts more than half of its weight on the first token at the longest input." :
    state.sinks === "without" ? "All heads, by the coefficients of all keys but the first, divided by their sum; what they are without is on the first token." :
    apart ? `${many}: attention sinks, which are not ranked here.` : `${many}: attention sinks, marked here.`;
}
