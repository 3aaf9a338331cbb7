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
  const head = heads.get(state.key), length = data.attention.length, several = prompts(length) > 1;
  $("#beta-policy").textContent = `The policy’s β for this row: ${shown(policy, 2)}` + (several ? ` (its mean over ${inputs(length)}: ${shown(value(head, "beta_last", length), 2)})` : "");
  const before = softmax(z, 1), after = softmax(z, beta), most = Math.max(...before, ...after);
  $("#row-title").textContent = `${label(head)}, last of ${plural(z.length, "token")}`;
  $("#row-which").textContent = (several ? "The first of " : "") + inputs(length) + (length < lengths.at(-1) ? "; rows of longer inputs are not kept on this page." : ".");
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
  const strongest = Math.max(...after), scrolled = strip.scrollTop;
  strip.replaceChildren(...words.map((word, i) => element("span",
    { style: `--v:${(after[i] / strongest).toFixed(3)}`, title: `token ${i}: ${before[i].toFixed(4)} → ${after[i].toFixed(4)}` }, visible(word))));
  strip.scrollTop = scrolled;
  $("#row-about").textContent = `All ${plural(words.length, "token")}, from the first to the last; the stronger the colour, the larger the coefficient with the chosen β. Scroll, or click a token of the table below to find it here.`;
  const order = z.map((_, i) => i).sort((a, b) => Math.max(before[b], after[b]) - Math.max(before[a], after[a])).slice(0, 8);
  $("#row-top tbody").replaceChildren(...order.map(i => {
    const button = element("button", { type: "button", class: "link", "aria-label": `find token ${i}` }, element("code", {}, visible(words[i])));
    button.addEventListener("click", () => find(i));
    return element("tr", {}, element("th", { scope: "row" }, button), element("td", {}, i), element("td", {}, before[i].toFixed(4)), element("td", {}, after[i].toFixed(4)));
  }));
}
function find(i) {
  const strip = $("#row-words"), word = strip.children[i];
  for (const other of strip.querySelectorAll(".found")) other.classList.remove("found");
  word.classList.add("found");
  strip.scrollTop = word.offsetTop - strip.offsetTop - strip.clientHeight / 2;
}
