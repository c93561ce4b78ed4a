"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const isOutput = data.subject === "output";
const count = (number) => number.toLocaleString("en-US");
const narrow = () => window.innerWidth < 600;
// Plotly reads a small markup in labels, so that names have to be escaped for it.
const label = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const fixed = (value, digits) => value === null ? "" : value.toFixed(digits);

function share(part, whole) {
  if (part === null || !whole) return "";
  const percent = 100 * part / whole;
  return (percent === 0 ? "0" : percent >= 99.95 ? percent.toFixed(1) : percent.toPrecision(2)) + " %";
}

function size(bytes) {
  let value = bytes, unit = "B";
  for (const larger of ["kB", "MB", "GB", "TB"]) {
    if (value < 999.5) break;
    value /= 1000;
    unit = larger;
  }
  return Number(value.toPrecision(3)) + " " + unit;
}

function shorten(text, most) {
  return text.length <= most ? text : text.slice(0, Math.ceil(most * 0.4)) + "\u2026" + text.slice(-Math.floor(most * 0.6));
}

function fill(select, options, selected) {
  for (const [value, text, parent] of options) {
    const option = document.createElement("option");
    option.value = value;
    option.textContent = text;
    (parent || select).append(option);
  }
  if (selected !== undefined) select.value = selected;
}

/* ---- figures ---------------------------------------------------------------------------------------------- */

function colors() {
  const style = getComputedStyle(document.documentElement);
  const names = ["card", "text", "muted", "line", "grid", "accent", "bad", "warn", "good", "low"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

function layout(color, more) {
  const axis = {gridcolor: color.grid, linecolor: color.line, zerolinecolor: color.line, fixedrange: true,
    tickfont: {color: color.muted, size: 12}, title: {font: {color: color.muted, size: 12}}};
  const merged = {
    paper_bgcolor: color.card, plot_bgcolor: color.card, dragmode: false,
    font: {color: color.text, size: 12, family: getComputedStyle(document.body).fontFamily},
    margin: {l: 10, r: 14, t: 10, b: 40}, showlegend: false,
    hoverlabel: {bgcolor: color.card, bordercolor: color.line, font: {color: color.text, size: 12}, align: "left"},
    ...more,
  };
  merged.xaxis = {...axis, ...more.xaxis};
  merged.yaxis = {...axis, ...more.yaxis};
  return merged;
}

function draw(id, traces, more) {
  Plotly.react(id, traces, layout(colors(), more), {displayModeBar: false, responsive: true});
}

function empty(id, sentence) {
  Plotly.purge(id);
  byId(id).textContent = sentence;
  byId(id).classList.add("note");
}

/* What little room leaves of the names of kinds: most begin alike ("layers.*.") and end alike (".weight"). */
function briefly(names) {
  if (!narrow()) return names.map((name) => shorten(name, 48));
  const starts = new Map();
  const start = (name) => name.slice(0, name.indexOf("*.") + 2);
  for (const name of names) if (name.includes("*.")) starts.set(start(name), (starts.get(start(name)) || 0) + 1);
  const [usual] = [...starts].sort((a, b) => b[1] - a[1])[0] || [""];
  return names.map((name) => shorten((usual && name.startsWith(usual) ? name.slice(usual.length) : name).replace(/\.weight$/, ""), 22));
}

/* Names down the y axis by position, so that two that are shortened alike stay two. */
function nameAxis(names) {
  return {tickvals: names.map((_, position) => position), ticktext: briefly(names).map(label),
    range: [names.length - 0.5, -0.5], automargin: true, ticks: "", zeroline: false, showgrid: false};
}

function drawSizes() {
  const color = colors(), rows = data.sizes;
  if (!rows.length) return empty("sizes", "There is no tensor.");
  const most = Math.max(...rows.map((row) => row[3]));
  draw("sizes", [{
    type: "bar", orientation: "h", y: rows.map((_, position) => position), x: rows.map((row) => row[3]),
    marker: {color: rows.map((row) => /halved|doubled/.test(row[4]) ? color.accent : row[4] === "refused" ? color.bad : color.muted)},
    text: rows.map((row) => size(row[3])), textposition: "outside", cliponaxis: false, textfont: {color: color.text},
    hovertext: rows.map((row) => `${label(row[0])} ${row[1]}<br>${count(row[2])} in ${size(row[3])}<br>${label(row[4])}`),
    hoverinfo: "text",
  }], {
    height: 26 * rows.length + 30, margin: {l: 10, r: 14, t: 4, b: 10}, bargap: 0.3,
    xaxis: {visible: false, range: [0, most * (narrow() ? 1.45 : 1.15)]},
    yaxis: {...nameAxis(rows.map((row) => [row[0], row[1]].filter(Boolean).join(" ")))},
  });
}

const METRICS = [
  {name: isOutput ? "brought into range" : "above 240", value: (cell) => cell[3] ? cell[4] / cell[3] : null, percent: true,
    note: isOutput ? "Share of the codes that lay above 240 in the source."
      : "Share of the codes that lie above 240, where Trainium2 reads infinity or NaN."},
  {name: "rounded", value: (cell) => cell[3] && cell[5] !== null ? cell[5] / cell[3] : null, percent: true,
    note: "Share of the codes that halving rounds: odd multiples of 2^-9 below 2^-5."},
  {name: "smallest scale", value: (cell) => cell[6], note: "Binary exponent of the smallest scale."},
  {name: "median scale", value: (cell) => cell[7], note: "Binary exponent of the median scale."},
  {name: "largest scale", value: (cell) => cell[8], note: "Binary exponent of the largest scale."},
];
let metric = 0;

function setUpMap() {
  const group = byId("map-metrics");
  METRICS.forEach((each, position) => {
    if (!data.map.cells.some((cell) => each.value(cell) !== null)) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = each.name;
    button.dataset.metric = position;
    button.addEventListener("click", () => { metric = position; drawMap(); });
    group.append(button);
  });
  const first = group.querySelector("button");
  metric = first ? Number(first.dataset.metric) : -1;
}

function drawMap() {
  if (metric < 0) {
    byId("map-note").textContent = "";
    return empty("map", data.map.cells.length ? "The codes were not read. Leave out --headers-only to see this."
      : "There is no quantized weight.");
  }
  const chosen = METRICS[metric], color = colors();
  for (const button of byId("map-metrics").children) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.metric) === metric));
  }
  const kept = [...new Set(data.map.cells.filter((cell) => chosen.value(cell) !== null).map((cell) => cell[0]))].sort((a, b) => a - b);
  const row = new Map(kept.map((kind, position) => [kind, position]));
  const blank = () => kept.map(() => data.map.columns.map(() => null));
  const values = blank(), texts = blank();
  let most = 0;
  for (const cell of data.map.cells) {
    const value = chosen.value(cell);
    if (value === null) continue;
    const [kind, column, tensors, codes, above, rounded, low, middle, high] = cell;
    values[row.get(kind)][column] = chosen.percent ? Math.sqrt(value) : value;
    most = Math.max(most, value);
    const layer = data.map.columns[column];
    texts[row.get(kind)][column] = [
      label(data.map.kinds[kind]), layer === "none" ? "no layer" : `layer ${layer}`, tensors === 1 ? "1 tensor" : `${count(tensors)} tensors`,
      codes === null ? "" : `${isOutput ? "brought into range" : "above 240"}: ${count(above)} of ${count(codes)} (${share(above, codes)})`,
      rounded === null ? "" : `rounded: ${count(rounded)} (${share(rounded, codes)})`,
      low === null ? "" : `scale exponents: ${low} / ${middle} / ${high}`,
    ].filter(Boolean).join("<br>");
  }
  const columns = data.map.columns.map((column) => column === "none" ? "none" : column);
  draw("map", [{
    type: "heatmap", z: values, x: columns.map((_, position) => position), y: kept.map((_, position) => position),
    text: texts, hoverinfo: "text", hoverongaps: false, xgap: 1, ygap: 1, zmin: chosen.percent ? 0 : undefined,
    zmax: chosen.percent && most === 0 ? 1 : undefined,
    colorscale: chosen.percent ? [[0, color.low], [1, metric !== 0 ? color.warn : isOutput ? color.good : color.bad]] : "Viridis",
    colorbar: {thickness: 10, len: 1, outlinewidth: 0, tickfont: {color: color.muted, size: 11},
      ...(chosen.percent ? rootTicks(most) : {tickformat: "d", nticks: 5})},
  }], {
    height: 22 * kept.length + 70, margin: {l: 10, r: 10, t: 6, b: 44},
    xaxis: {title: {text: "layer", font: {color: color.muted}}, tickvals: ticks(columns.length), ticktext: ticks(columns.length).map((at) => columns[at]),
      showgrid: false, zeroline: false, range: [-0.5, columns.length - 0.5], tickangle: 0},
    yaxis: nameAxis(kept.map((kind) => data.map.kinds[kind])),
  });
  byId("map-note").textContent = chosen.note + (chosen.percent && most === 0 ? " There is none." : "");
}

/* Shares are colored by their square root, so that small ones can be told from none. */
function rootTicks(most) {
  const shares = [0, 1 / 16, 1 / 4, 9 / 16, 1].map((part) => part * (most || 1));
  return {tickvals: shares.map(Math.sqrt), ticktext: shares.map((each) => share(each, 1))};
}

function ticks(length) {
  const step = Math.max(1, Math.ceil(length / (narrow() ? 6 : 20)));
  return Array.from({length: Math.ceil(length / step)}, (_, position) => position * step);
}

/* Codes lie along the axis in the order of their values: 126 negative ones, zero, 126 positive ones. */
const place = (code) => code < 128 ? code : 128 - code;
const ROUNDS = (magnitude) => magnitude < 16 && magnitude % 2 === 1;

function magnitudeValue(code) {
  const exponent = code >> 3, mantissa = code & 7;
  return exponent ? (8 + mantissa) * 2 ** (exponent - 10) : mantissa * 2 ** -9;
}

function setUpDistribution() {
  const select = byId("distribution-of");
  const groups = {};
  for (const [scope, title] of [["kind", "a kind"], ["tensor", "a tensor"]]) {
    groups[scope] = document.createElement("optgroup");
    groups[scope].label = title;
  }
  fill(select, data.distributions.map(([scope, name], position) => [position, name, groups[scope]]));
  for (const group of Object.values(groups)) if (group.children.length) select.append(group);
  if (data.distributions.length) select.value = 0;
  select.addEventListener("change", drawDistribution);
  byId("distribution-log").addEventListener("change", drawDistribution);
}

function drawDistribution() {
  if (!data.distributions.length) return empty("distribution", "No fp8 code was read.");
  const color = colors(), counts = data.distributions[byId("distribution-of").value][2];
  const at = (code) => counts[code] || 0;
  const total = counts.reduce((sum, each) => sum + each, 0), nan = at(0x7f) + at(0xff);
  const xs = [], ys = [], texts = [], fills = [];
  for (let x = -126; x <= 126; x++) {
    const magnitude = Math.abs(x), code = x < 0 ? 128 + magnitude : magnitude;
    const found = at(code) + (x === 0 ? at(128) : 0);
    const value = (x < 0 ? -1 : 1) * magnitudeValue(magnitude);
    xs.push(x);
    ys.push(found);
    const high = isOutput ? magnitude >= 0x70 : magnitude >= 0x78, rounds = !isOutput && ROUNDS(magnitude);
    fills.push(high ? isOutput ? color.good : color.bad : rounds ? color.warn : color.accent);
    const name = x === 0 ? "0x00 and 0x80" : "0x" + code.toString(16).padStart(2, "0");
    texts.push(`${value} (${name})<br>${count(found)} codes, ${share(found, total)}` +
      (high ? isOutput ? "<br>above 240 in the source" : "<br>above 240: misread" : rounds ? "<br>rounded by halving" : ""));
  }
  const marks = [[119, "240", 0], [126, "448", 1]].flatMap(([x, text, tier]) => [[x, text, tier], [-x, "\u2212" + text, tier]]);
  const labels = narrow() ? [0x58] : window.innerWidth < 900 ? [0x28, 0x48, 0x68] : [0x08, 0x18, 0x28, 0x38, 0x48, 0x58, 0x68];
  const tickvals = [...labels.map((each) => -each).reverse(), 0, ...labels];
  const named = {0x08: "2\u207b\u2076", 0x18: "1/16", 0x28: "1/4", 0x38: "1", 0x48: "4", 0x58: "16", 0x68: "64"};
  const isLog = byId("distribution-log").checked;
  draw("distribution", [{type: "bar", x: xs, y: ys, marker: {color: fills, line: {width: 0}}, hovertext: texts, hoverinfo: "text"}], {
    height: 320, bargap: 0.08, margin: {l: 10, r: 14, t: 40, b: 30},
    shapes: marks.map(([x]) => ({type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: {color: color.muted, width: 1, dash: "dot"}})),
    annotations: marks.map(([x, text, tier]) => ({x, y: 1, yref: "paper", yanchor: "bottom", yshift: tier * 15, text, showarrow: false,
      font: {color: color.muted, size: 11}})),
    xaxis: {range: [-132, 132], tickvals, ticktext: tickvals.map((x) => x === 0 ? "0" : (x < 0 ? "\u2212" : "") + named[Math.abs(x)]), showgrid: false, zeroline: false, tickangle: 0},
    yaxis: {type: isLog ? "log" : "linear", automargin: true, nticks: 5, exponentformat: "SI"},
  });
  let high = 0, rounds = 0;
  counts.forEach((found, code) => {
    const magnitude = code & 127;
    if (magnitude < 127 && magnitude >= (isOutput ? 0x70 : 0x78)) high += found;
    if (ROUNDS(magnitude)) rounds += found;
  });
  byId("distribution-note").textContent = `${count(total)} codes, in the order of their values; the axis is logarithmic but near zero. ` +
    (isOutput ? `Green: ${count(high)} (${share(high, total)}) lay above 240 before the conversion.`
      : `Red: ${count(high)} (${share(high, total)}) above 240. Orange: ${count(rounds)} (${share(rounds, total)}) rounded by halving.`) +
    (nan ? ` ${count(nan)} NaN codes are not drawn.` : "");
}

function drawAccuracy() {
  const rows = data.accuracy, color = colors();
  if (!rows.length) return empty("accuracy", "");
  const known = rows.flatMap((row) => row.slice(1)).filter((value) => value !== null);
  const exact = Math.ceil((Math.max(40, ...known) + 12) / 10) * 10;
  const trace = (name, column, fill, symbol) => ({
    type: "scatter", mode: "markers+text", name, marker: {color: fill, size: 9, symbol},
    y: rows.map((_, position) => position), x: rows.map((row) => row[column] ?? exact),
    text: rows.map((row) => row[column] === null ? "exact" : ""), textposition: "middle right", textfont: {color: color.muted, size: 11},
    hovertext: rows.map((row) => `${label(row[0])}<br>${name}: ${row[column] === null ? "exact, no value changes" : row[column].toFixed(1) + " dB"}`),
    hoverinfo: "text",
  });
  draw("accuracy", [
    trace("halving", 1, color.accent, "circle"), trace("recipe 240/448", 2, color.warn, "diamond"), trace("clipping at 240", 3, color.bad, "x"),
  ], {
    height: 24 * rows.length + 96, margin: {l: 10, r: 44, t: 34, b: 44}, showlegend: true,
    legend: {orientation: "h", x: 0, xref: "container", y: 1, yref: "container", yanchor: "top", font: {color: color.text}},
    xaxis: {title: {text: narrow() ? "decibels" : "signal-to-noise ratio, decibels", font: {color: color.muted}}, rangemode: "tozero"},
    yaxis: {...nameAxis(rows.map((row) => row[0])), showgrid: true},
  });
}

function drawAll() {
  drawSizes();
  drawMap();
  drawDistribution();
  drawAccuracy();
}

/* ---- table of tensors: only the rows in view exist -------------------------------------------------------- */

const ROW = 26;
const [NAME, ROLE, DTYPE, KERNEL, SHAPE, BYTES, CODES, ABOVE, ROUNDED, HALVING, RECIPE, CLIPPING, LOW, MIDDLE, HIGH] = Array.from({length: 15}, (_, position) => position);
const [roles, dtypes, kernels] = data.tensors.words;
const COLUMNS = [
  {title: "tensor", width: "minmax(var(--name), 3fr)", key: (row) => row[NAME], text: (row) => row[NAME]},
  {title: "kind", width: "118px", key: (row) => roles[row[ROLE]], text: (row) => roles[row[ROLE]]},
  {title: "dtype", width: "84px", key: (row) => dtypes[row[DTYPE]], text: (row) => dtypes[row[DTYPE]]},
  {title: "shape", width: "116px", key: (row) => row[SHAPE], text: (row) => row[SHAPE]},
  {title: "size", width: "78px", number: true, key: (row) => row[BYTES], text: (row) => size(row[BYTES])},
  {title: isOutput ? "was > 240" : "above 240", width: "84px", number: true,
    key: (row) => row[CODES] ? row[ABOVE] / row[CODES] : null, text: (row) => share(row[ABOVE], row[CODES])},
  {title: "rounded", width: "78px", number: true, source: true,
    key: (row) => row[CODES] && row[ROUNDED] !== null ? row[ROUNDED] / row[CODES] : null, text: (row) => share(row[ROUNDED], row[CODES])},
  {title: "halving dB", width: "72px", number: true, source: true, key: (row) => decibels(row, HALVING), text: (row) => decibelText(row, HALVING)},
  {title: "recipe dB", width: "68px", number: true, source: true, key: (row) => decibels(row, RECIPE), text: (row) => decibelText(row, RECIPE)},
  {title: "clipping dB", width: "76px", number: true, source: true, key: (row) => decibels(row, CLIPPING), text: (row) => decibelText(row, CLIPPING)},
  {title: "scale exponents", width: "112px", number: true, key: (row) => row[MIDDLE], text: (row) => row[LOW] === null ? "" : `${row[LOW]} / ${row[MIDDLE]} / ${row[HIGH]}`},
  {title: "kernel scale", width: "minmax(130px, 1fr)", key: (row) => kernels[row[KERNEL]], text: (row) => kernels[row[KERNEL]]},
].filter((column) => !(isOutput && column.source));
// Where no value changes the ratio is infinite.
const decibels = (row, column) => !row[CODES] || row[ROUNDED] === null ? null : row[column] ?? Infinity;
const decibelText = (row, column) => !row[CODES] || row[ROUNDED] === null ? "" : row[column] === null ? "exact" : fixed(row[column], 1);
const known = new Map(data.distributions.map(([scope, name], position) => [scope === "tensor" ? name : "", position]));
let matching = data.tensors.rows, sorted = null, descending = false;

function setUpTable() {
  const grid = COLUMNS.map((column) => column.width).join(" ");
  byId("head").style.gridTemplateColumns = grid;
  COLUMNS.forEach((column, position) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = column.title;
    if (column.number) button.className = "number";
    button.addEventListener("click", () => {
      // Figures are wanted largest first, names from a to z.
      descending = sorted === position ? !descending : Boolean(column.number);
      sorted = position;
      select();
    });
    byId("head").append(button);
  });
  const choices = (words) => [["", "all"], ...words.map((word, position) => [position, word || "no quantized weight"])];
  fill(byId("role"), choices(roles));
  fill(byId("kernel"), choices(kernels));
  for (const id of ["search", "role", "kernel"]) byId(id).addEventListener("input", select);
  byId("table").addEventListener("scroll", () => requestAnimationFrame(showRows));
  byId("body").addEventListener("click", (event) => {
    const row = event.target.closest(".known");
    if (!row) return;
    byId("distribution-of").value = row.dataset.distribution;
    drawDistribution();
    byId("distribution").scrollIntoView({behavior: "smooth", block: "center"});
  });
}

function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  const order = typeof a === "number" ? a - b || 0 : a < b ? -1 : a > b ? 1 : 0;
  return descending ? -order : order;
}

function select() {
  const wanted = byId("search").value.toLowerCase(), role = byId("role").value, kernel = byId("kernel").value;
  matching = data.tensors.rows.filter((row) =>
    (role === "" || row[ROLE] === Number(role)) && (kernel === "" || row[KERNEL] === Number(kernel)) &&
    row[NAME].toLowerCase().includes(wanted));
  if (sorted !== null) {
    const key = COLUMNS[sorted].key;
    matching = matching.map((row) => [key(row), row]).sort((a, b) => compare(a[0], b[0])).map(([, row]) => row);
  }
  [...byId("head").children].forEach((button, position) => {
    if (position === sorted) button.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else button.removeAttribute("aria-sort");
  });
  byId("matches").textContent = `${count(matching.length)} of ${count(data.tensors.rows.length)}`;
  byId("body").style.height = matching.length * ROW + "px";
  byId("table").scrollTop = 0;
  showRows();
}

function showRows() {
  const table = byId("table"), body = byId("body");
  const first = Math.max(0, Math.floor(table.scrollTop / ROW) - 10);
  const last = Math.min(matching.length, first + Math.ceil(table.clientHeight / ROW) + 20);
  body.style.width = byId("head").offsetWidth + "px";
  const rows = [];
  for (let position = first; position < last; position++) {
    const row = document.createElement("div");
    row.className = "row";
    row.style.top = position * ROW + "px";
    row.style.gridTemplateColumns = byId("head").style.gridTemplateColumns;
    const distribution = known.get(matching[position][NAME]);
    if (distribution !== undefined) {
      row.classList.add("known");
      row.dataset.distribution = distribution;
      row.title = "Show its codes over the number line";
    }
    for (const column of COLUMNS) {
      const cell = document.createElement("span");
      cell.textContent = column.text(matching[position]);
      if (column.number) cell.className = "number";
      if (cell.textContent.length > 14) cell.title = cell.textContent;
      row.append(cell);
    }
    rows.push(row);
  }
  body.replaceChildren(...rows);
}

/* ---- start ------------------------------------------------------------------------------------------------ */

setUpMap();
setUpDistribution();
setUpTable();
drawAll();
select();
for (const query of ["(prefers-color-scheme: dark)", "print", "(max-width: 599px)"]) {
  window.matchMedia(query).addEventListener("change", drawAll);
}
window.addEventListener("resize", showRows);
document.documentElement.dataset.ready = "true";
})();
