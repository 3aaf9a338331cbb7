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
for (const n of lengths) $("#length").append(element("option", { value: n }, plural(n, data.source.unit.slice(0, -1))));
$("#length").value = state.length;
control("#metric", "change", part => { state.metric = part.value; });
control("#length", "change", part => { state.length = Number(part.value); });
control("[name=reading]", "change", part => { state.reading = part.value; });
control("[name=scope]", "change", part => { state.scope = part.value; });
control("[name=rank]", "change", part => { state.rank = part.value; });
control("#sinks", "change", part => { state.sinks = part.value; });
control("#ranking-all", "click", () => { state.all = !state.all; });
control("#spread-reading", "change", () => {});
control("#beta", "input", part => { state.beta = Number(part.value); });
control("#beta-reset", "click", () => { state.beta = null; });
if (!rows.size) $("#row-part").replaceChildren($("#row-heading"), element("p", { class: "note" }, "Not kept: rows of inputs as long as these would make the page large."));
$("#spread-reading").value = state.reading;
buildMap();
draw();
addEventListener("resize", () => { drawCurves(); drawRow(); });
