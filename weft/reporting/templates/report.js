// Draw the charts of a report from the JSON in #data, as set by the controls of the page.
"use strict";
const byId = (id) => document.getElementById(id);
let { runs, charts, maps, time_unit, smooth: initialSmoothing } = JSON.parse(byId("data").textContent);
const controls = ["axis", "smooth", "log", "theme"].map(byId);
const [axis, smoothing, log, theme] = controls;
const plots = new Map(); // chart id -> uPlot
const hiddenRuns = new Set(); // indices of runs
const NUM_COLORS = 10;
const MANY_RUNS = 4;
const NONFINITE = 99999; // of a heat map's cell
let zoom = null; // [min, max] of the x axis, if the reader has chosen it

// --------------------------------------------------------------------------- numbers and colors

// Exponential moving average, normalized so that the weights sum to one; null has no weight.
function smooth(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function formatNumber(value) {
  const size = Math.abs(value);
  if (size && size < 1e-3) return value.toExponential(2).replace(/\.?0*e/, "e");
  const [unit, suffix] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]].find(([unit]) => size >= unit) || [1, ""];
  return Number((value / (suffix === "k" ? 1e3 : unit)).toPrecision(4)) + suffix;
}

const formatPercent = (value) => `${Number((100 * value).toPrecision(4))}%`;
const formatter = (chart) => (chart.format === "%" ? formatPercent : formatNumber);
const axisLabel = () => (axis.value === "time" ? time_unit : `${axis.value}s`);
const isKnown = (value) => value !== null && value !== undefined;

// The color of a variable of page.css, or of the variable that it names.
function cssColor(name) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return value.startsWith("var(--") ? cssColor(value.slice(6, -1)) : value;
}

// --------------------------------------------------------------------------- curves

// The curves of a chart with their looks: { label, color, dash, dots, exact, x, y, means }.
function curvesOf(chart) {
  // Of several runs the color shows the run, if the chart's curves differ in style; else the curve.
  const unstyled = chart.curves.filter(([, , style]) => !style).length;
  const colorShowsCurve = runs.length === 1 || chart.curves.length > 2 || unstyled > 1;
  const curves = chart.curves.flatMap(([key, label, style], c) =>
    runs.flatMap((run, r) => {
      const curve = run.curves[key];
      if (!curve || hiddenRuns.has(r)) return [];
      const names = [...(runs.length > 1 ? [run.name] : []), ...(chart.curves.length > 1 ? [label] : [])];
      const number = colorShowsCurve ? c : r;
      const round = colorShowsCurve ? r : Math.floor(r / NUM_COLORS);
      return [{
        label: names.join(", ") || chart.heading,
        color: cssColor(chart.stack ? key.split(".").at(-1) : `c${number % NUM_COLORS}`),
        dash: style === "dash" ? [6, 4] : round ? [8, 3 * round] : [],
        dots: style === "dots",
        exact: Boolean(style) || key.startsWith("eval_"), // few points, each a mean
        x: run.grids[curve.grid][axis.value],
        y: curve.y,
        means: curve.means,
      }];
    }),
  );
  return chart.stack ? curves.reverse() : curves; // the legend of a stack reads from top to bottom
}

// A smoothed curve; of bins it has their means, at the last record of each.
function smoothed(curve, weight) {
  if (!curve.means) return { ...curve, y: smooth(curve.y, weight) };
  const means = smooth(curve.means, weight);
  return { ...curve, y: curve.y.map((_, i) => (i % 2 ? means[(i - 1) / 2] : undefined)) };
}

// The columns of uPlot's data for curves with their own x; points without x are left out.
function align(curves) {
  const tables = curves.map(({ x, y }) => {
    if (x.every((value, i) => value !== null && (!i || value > x[i - 1]))) return [x, y];
    const last = new Map(); // the last of several points with the same x
    x.forEach((value, i) => value !== null && last.set(value, y[i]));
    const known = [...last.keys()].sort((a, b) => a - b);
    return [known, known.map((value) => last.get(value))];
  });
  const places = runs.flatMap((run, r) => (hiddenRuns.has(r) ? [] : run.events.map((event) => event[axis.value])));
  return uPlot.join([...tables, [[...new Set(places.filter((x) => x !== null))].sort((a, b) => a - b)]]);
}

// The sums of the shown curves of a stack, the whole first, so that smaller areas cover larger ones.
function stacked(columns, isShown) {
  const sums = columns[0].map(() => 0);
  const areas = columns.slice(1).reverse().map((column, i, all) =>
    isShown(all.length - i) ? column.map((y, at) => (y === undefined ? y : (sums[at] += y || 0))) : column,
  );
  return [columns[0], ...areas.reverse()];
}

function seriesOf(curve, chart, columns, index) {
  const format = formatter(chart);
  const last = columns[index].findLast(isKnown);
  return {
    label: curve.label,
    class: curve.dots ? "dots" : undefined,
    stroke: curve.color,
    width: chart.stack ? 1 : 1.7,
    dash: curve.dash,
    fill: chart.stack ? curve.color : undefined,
    points: { show: chart.stack ? false : curve.dots || undefined, size: runs.length > MANY_RUNS ? 4 : 7, fill: curve.color },
    value: (plot, y, _, at) => {
      const value = at == null ? last : columns[index][at];
      return isKnown(value) ? format(value) : "–";
    },
  };
}

// Triangles on the x axis, with the text of the event as tooltip.
function placeEvents(plot) {
  for (const mark of plot.over.querySelectorAll(".event")) mark.remove();
  runs.forEach((run, r) => {
    if (hiddenRuns.has(r)) return;
    for (const event of run.events) {
      const x = event[axis.value];
      if (x === null || x < plot.scales.x.min || x > plot.scales.x.max) continue;
      const mark = document.createElement("span");
      mark.className = event.routine ? "event routine" : "event";
      mark.title = (runs.length > 1 ? `${run.name}: ` : "") + event.text;
      mark.style.left = `${plot.valToPos(x, "x")}px`;
      plot.over.append(mark);
    }
  });
}

function options(chart, curves, columns) {
  const [ink, line] = [cssColor("faint"), cssColor("line")];
  const look = { stroke: ink, font: "12px system-ui, sans-serif", grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const labels = (format) => (_, marks) => marks.map((mark) => (mark === null ? "" : format(mark)));
  const isLog = log.checked && !chart.stack;
  // uPlot would extend a logarithmic axis to whole decades, and begin a stack above zero.
  const ranges = {
    log: { range: (_, min, max) => (min > 0 && max > 1.2 * min ? [min / 1.1, max * 1.1] : uPlot.rangeLog(min > 0 ? min : 1, max > 0 ? max : 10, 10, true)) },
    stack: { range: (_, __, max) => [0, 1.05 * max || 1] },
  };
  const series = curves.map((curve, i) => seriesOf(curve, chart, columns, i + 1));
  curves.forEach((curve, i) => {
    if (curve.raw) Object.assign(series[i], { class: "raw", stroke: `${curve.color}48`, points: { show: false } });
  });
  return {
    ...sizeOf(chart),
    scales: {
      x: { time: false },
      y: { distr: isLog ? 3 : 1, ...(ranges[isLog ? "log" : chart.stack ? "stack" : ""] || {}) },
    },
    series: [{ label: axisLabel(), value: (plot, x) => formatNumber(x ?? plot.data[0].at(-1) ?? 0) }, ...series],
    axes: [
      { ...look, label: axisLabel(), labelSize: 18, labelFont: look.font, size: 32, values: labels(formatNumber) },
      { ...look, size: 58, values: labels(formatter(chart)) },
    ],
    legend: {
      markers: {
        fill: (_, i) => (curves[i - 1].dash.length ? "transparent" : curves[i - 1].color),
        dash: (_, i) => (curves[i - 1].dash.length ? "dashed" : "solid"),
      },
    },
    cursor: {
      sync: { key: "report", setSeries: false },
      y: false,
      bind: { dblclick: (plot) => () => setZoom(null) },
    },
    drawOrder: chart.stack ? ["series", "axes"] : ["axes", "series"],
    hooks: {
      draw: [placeEvents],
      setSelect: [(plot) => plot.select.width > 0 && setZoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")])],
      setSeries: [(plot, index) => index !== null && onToggle(plot, index, chart, curves, columns)],
    },
  };
}

// Hide the faint curve of a hidden smoothed one, which follows it, and add up a stack again.
function onToggle(plot, index, chart, curves, columns) {
  const raw = curves[index - 2];
  if (raw && raw.raw && plot.series[index - 1].show !== plot.series[index].show)
    plot.setSeries(index - 1, { show: plot.series[index].show });
  if (!chart.stack) return;
  const { min, max } = plot.scales.x;
  plot.setData(stacked(columns, (i) => plot.series[i].show), false);
  plot.setScale("x", { min, max });
}

function setZoom(range) {
  zoom = range;
  for (const plot of plots.values()) {
    const xs = plot.data[0];
    const [min, max] = range || [xs[0], xs.at(-1)];
    if (min !== undefined && max > min) plot.setScale("x", { min, max });
  }
}

function sizeOf(chart) {
  const width = byId(`chart-${chart.id}`).clientWidth;
  return { width, height: chart.id === "loss" ? Math.min(360, 220 + width / 8) : 230 };
}

function drawChart(chart) {
  const weight = Number(smoothing.value);
  // A stack and many runs have no room for the faint curves.
  const hasRaw = !chart.stack && runs.length <= MANY_RUNS;
  const curves = curvesOf(chart).flatMap((curve) =>
    weight && !curve.exact ? [...(hasRaw ? [{ ...curve, raw: true }] : []), smoothed(curve, weight)] : [curve],
  );
  const columns = align(curves);
  const hidden = (plots.get(chart.id)?.series || []).filter((series) => series.show === false).map((series) => series.label);
  const plot = new uPlot(options(chart, curves, columns), chart.stack ? stacked(columns, () => true) : columns);
  if (zoom) plot.setScale("x", { min: zoom[0], max: zoom[1] });
  plot.series.forEach((series, i) => i && hidden.includes(series.label) && series.class !== "raw" && plot.setSeries(i, { show: false }));
  plots.get(chart.id)?.destroy();
  byId(`chart-${chart.id}`).replaceChildren(plot.root);
  plots.set(chart.id, plot);
  for (const label of plot.root.querySelectorAll(".u-series:not(:first-child) th")) asButton(label);
  if (byId(`values-${chart.id}`)) fillTable(chart.id);
}

function draw() {
  byId("weight").textContent = smoothing.value;
  charts.forEach(drawChart);
  maps.forEach(drawMap);
}

// --------------------------------------------------------------------------- heat maps

const RAMP = [[68, 1, 84], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81], [253, 231, 37]];

function rampColor(t) {
  const place = Math.min(0.9999, Math.max(0, t)) * (RAMP.length - 1);
  const [a, b] = [RAMP[Math.floor(place)], RAMP[Math.floor(place) + 1]];
  return `rgb(${a.map((from, i) => Math.round(from + (b[i] - from) * (place % 1))).join()})`;
}

const cellText = (cell) => (cell === null ? "–" : cell === NONFINITE ? "NaN or Inf" : formatNumber(10 ** (cell / 100)));

function drawMap(map) {
  const host = byId(`chart-${map.id}`);
  const sorted = map.cells.flat().filter((cell) => cell !== null && cell !== NONFINITE).sort((a, b) => a - b);
  const [low, high] = [sorted[Math.floor(0.02 * sorted.length)] ?? 0, sorted[Math.ceil(0.98 * sorted.length) - 1] ?? 1];
  const canvas = document.createElement("canvas"), note = document.createElement("div");
  const scale = devicePixelRatio || 1, width = host.clientWidth, numColumns = map.cells[0].length;
  const rowHeight = Math.max(2, Math.min(15, Math.floor(520 / map.names.length)));
  const height = rowHeight * map.names.length;
  canvas.className = "map";
  canvas.width = width * scale;
  canvas.height = (height + 22) * scale;
  const paint = canvas.getContext("2d");
  paint.scale(scale, scale);
  paint.font = "11px system-ui, sans-serif";
  const left = Math.min(0.35 * width, 10 + Math.max(...map.names.map((name) => paint.measureText(name).width)));
  const cellWidth = (width - left) / numColumns, gap = rowHeight > 6 ? 1 : 0;
  map.cells.forEach((row, r) => row.forEach((cell, c) => {
    if (cell === null) return;
    paint.fillStyle = cell === NONFINITE ? "#d92d20" : rampColor((cell - low) / (high - low || 1));
    paint.fillRect(left + c * cellWidth, r * rowHeight, Math.max(1, cellWidth - (cellWidth > 4 ? 1 : -0.5)), rowHeight - gap);
  }));
  paint.fillStyle = cssColor("faint");
  paint.textBaseline = "middle";
  const every = Math.ceil(13 / rowHeight);
  map.names.forEach((name, r) => r % every === 0 && paint.fillText(name, 0, (r + 0.5) * rowHeight, left - 6));
  const xs = map.columns[axis.value], ticks = Math.min(numColumns, Math.max(2, Math.floor((width - left) / 110)));
  paint.textAlign = "center";
  for (let i = 0; i < ticks; i++) {
    const c = Math.floor(((i + 0.5) * numColumns) / ticks);
    if (isKnown(xs[c])) paint.fillText(formatNumber(xs[c]), left + (c + 0.5) * cellWidth, height + 13);
  }
  note.className = "mapnote faint";
  const rest = `color: ${cellText(low)} (dark) to ${cellText(high)} (light), logarithmic, over ${axisLabel()}` + (map.cells.flat().includes(NONFINITE) ? "; red: NaN or Inf" : "");
  note.textContent = rest;
  canvas.onmousemove = (event) => {
    const c = Math.floor((event.offsetX - left) / cellWidth), r = Math.floor(event.offsetY / rowHeight);
    const cell = (map.cells[r] || [])[c];
    note.textContent = cell === undefined ? rest : `${map.names[r]}, ${axisLabel()} ${formatNumber(xs[c])}: ${cellText(cell)}`;
  };
  canvas.onmouseleave = () => (note.textContent = rest);
  host.replaceChildren(canvas, note);
  if (byId(`values-${map.id}`)) fillTable(map.id);
}

// --------------------------------------------------------------------------- tables and the keyboard

function asButton(element) {
  element.tabIndex = 0;
  element.setAttribute("role", "button");
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    element.click();
  });
}

// The numbers of a chart: a head and rows, first the position on the x axis.
function tableOf(id) {
  const map = maps.find((each) => each.id === id);
  if (map) {
    const rows = map.columns[axis.value].map((x, c) => [x, ...map.cells.map((row) => (row[c] === null ? null : row[c] === NONFINITE ? "NaN or Inf" : 10 ** (row[c] / 100)))]);
    return [[axisLabel(), ...map.names], rows];
  }
  const curves = curvesOf(charts.find((chart) => chart.id === id));
  const columns = align(curves);
  const rows = columns[0].map((x, i) => [x, ...curves.map((_, c) => columns[c + 1][i] ?? null)]);
  return [[axisLabel(), ...curves.map((curve) => curve.label)], rows.filter((row) => row.slice(1).some(isKnown))];
}

const MAX_TABLE_ROWS = 40;

function fillTable(id) {
  const [head, rows] = tableOf(id), chart = charts.find((each) => each.id === id) || {};
  const step = Math.max(1, Math.ceil(rows.length / MAX_TABLE_ROWS));
  const shown = rows.filter((_, i) => i % step === 0 || i === rows.length - 1);
  const table = document.createElement("table");
  const caption = table.createCaption();
  caption.className = "hidden";
  caption.textContent = `${shown.length} of ${rows.length} points; the file has all`;
  const line = (cells, tag, format) => {
    const row = document.createElement("tr");
    for (const [i, cell] of cells.entries()) {
      const item = document.createElement(tag || (i ? "td" : "th"));
      item.className = "number";
      item.textContent = cell === null ? "–" : typeof cell === "number" ? (i ? format : formatNumber)(cell) : cell;
      item.scope = tag ? "col" : i ? "" : "row";
      row.append(item);
    }
    return row;
  };
  table.createTHead().append(line(head, "th"));
  table.createTBody().append(...shown.map((row) => line(row, "", formatter(chart))));
  byId(`values-${id}`).replaceChildren(table);
}

function saveTable(id) {
  const [head, rows] = tableOf(id);
  const quote = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : (cell ?? ""));
  const text = [head, ...rows].map((row) => row.map(quote).join()).join("\n") + "\n";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = `${id.replaceAll("-", "_")}.csv`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function addButton(parent, text, label, action) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.setAttribute("aria-label", label);
  button.addEventListener("click", () => action(button));
  parent.append(button);
  return button;
}

// Buttons for the table behind a chart and its file, and the keys of a chart.
function equip({ id, heading }) {
  const host = byId(`chart-${id}`), caption = host.parentElement.querySelector("figcaption");
  if (caption.querySelector("button")) return;
  const toggle = addButton(caption, "table", `Table of ${heading}`, (button) => {
    const old = byId(`values-${id}`);
    button.setAttribute("aria-expanded", !old);
    if (old) return old.remove();
    const values = document.createElement("div");
    values.className = "values";
    values.id = `values-${id}`;
    values.tabIndex = 0;
    host.after(values);
    fillTable(id);
  });
  toggle.setAttribute("aria-expanded", false);
  addButton(caption, "csv", `Download ${heading} as CSV`, () => saveTable(id));
  if (!charts.some((chart) => chart.id === id)) return;
  host.tabIndex = 0;
  host.setAttribute("role", "group");
  host.setAttribute("aria-label", `${heading}: arrow keys read values, plus and minus zoom, Escape resets`);
  host.addEventListener("keydown", (event) => onKey(event, id));
}

function onKey(event, id) {
  const plot = plots.get(id), xs = plot.data[0], { min, max } = plot.scales.x;
  const at = plot.cursor.idx ?? xs.length - 1, middle = isKnown(plot.cursor.idx) ? xs[at] : (min + max) / 2;
  // An index of bins and events that the reader does not see would make many keys silent.
  const stride = Math.max(1, Math.round(xs.length / 200)) * (event.shiftKey ? 10 : 1);
  const moves = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: 0, End: xs.length - 1 };
  if (event.key in moves) moveCursor(plot, Math.min(xs.length - 1, Math.max(0, moves[event.key])));
  else if (event.key === "+" || event.key === "=") setZoom([middle - (middle - min) / 2, middle + (max - middle) / 2]);
  else if (event.key === "-") setZoom([Math.max(xs[0], min - (max - min) / 2), Math.min(xs.at(-1), max + (max - min) / 2)]);
  else if (event.key === "Escape") setZoom(null);
  else return;
  event.preventDefault();
}

function moveCursor(plot, index) {
  plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: plot.over.clientHeight / 2 });
  const rows = [...plot.root.querySelectorAll(".u-series")].filter((row) => row.offsetParent && !row.classList.contains("u-off"));
  byId("spoken").textContent = rows.map((row) => `${row.querySelector("th").innerText} ${row.querySelector("td").innerText}`).join(", ");
}

// --------------------------------------------------------------------------- the table of runs

function equipRuns() {
  const table = document.querySelector("table.runs");
  if (!table || table.querySelector("button")) return;
  document.body.classList.toggle("many", runs.length > MANY_RUNS);
  for (const cell of table.querySelectorAll(".run")) {
    const index = Number(cell.dataset.run), name = cell.textContent.trim();
    const button = addButton(cell.parentElement, "", `Show ${name} in all charts`, () => {
      if (!hiddenRuns.delete(index)) hiddenRuns.add(index);
      cell.classList.toggle("off", hiddenRuns.has(index));
      button.setAttribute("aria-pressed", !hiddenRuns.has(index));
      draw();
    });
    button.setAttribute("aria-pressed", !hiddenRuns.has(index));
    cell.classList.toggle("off", hiddenRuns.has(index));
    button.append(...cell.childNodes);
    cell.append(button);
  }
  for (const head of table.querySelectorAll("[data-sort]")) {
    const text = head.textContent;
    head.textContent = "";
    addButton(head, text, `Sort by ${text}`, () => {
      const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const value = (row) => Number(row.cells[Number(head.dataset.sort) + 2].dataset.value ?? NaN);
      const rows = [...table.tBodies[0].rows].sort((a, b) => (isNaN(value(a)) - isNaN(value(b))) || (order === "ascending" ? 1 : -1) * (value(a) - value(b)));
      table.tBodies[0].append(...rows);
    });
  }
}

// --------------------------------------------------------------------------- live updates

// Replace the parts that changed by those of the server's newest page; keep zoom and open details.
async function update() {
  try {
    const response = await fetch(location.pathname, { headers: { "If-None-Match": document.body.dataset.version }, cache: "no-store" });
    if (response.status !== 200) return;
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const data = JSON.parse(page.getElementById("data")?.textContent || "null");
    const shape = (value) => JSON.stringify([value.charts, value.maps.map((map) => map.id)]);
    const sections = [...document.querySelectorAll("main > section")], fresh = [...page.querySelectorAll("main > section")];
    if (!data || shape(data) !== shape({ charts, maps }) || sections.length !== fresh.length) return location.reload();
    ({ runs, charts, maps, time_unit } = data);
    document.body.dataset.version = page.body.dataset.version;
    for (const selector of ["#head", ".eyebrow"]) document.querySelector(selector).replaceWith(page.querySelector(selector));
    sections.forEach((section, i) => {
      if (section.querySelector(".charts") || section.innerHTML === fresh[i].innerHTML) return;
      const open = [...section.querySelectorAll("details")].map((details) => details.open);
      fresh[i].querySelectorAll("details").forEach((details, n) => (details.open = open[n]));
      section.replaceWith(fresh[i]);
    });
    equipRuns();
    draw();
  } catch {
    document.querySelector(".eyebrow span").textContent = "the server has ended; this is its last page";
  }
}

// --------------------------------------------------------------------------- start

function applyTheme(value) {
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
}

smoothing.value = initialSmoothing;
// Keep the controls' values when the page reloads.
for (const control of controls) {
  const value = control.type === "checkbox" ? "checked" : "value";
  const saved = sessionStorage.getItem(control.id);
  if (saved !== null) control[value] = JSON.parse(saved);
  control.addEventListener("input", () => {
    sessionStorage.setItem(control.id, JSON.stringify(control[value]));
    if (control === axis) zoom = null;
    if (control === theme) applyTheme(theme.value);
    draw();
  });
}
applyTheme(theme.value);
document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("beforeprint", () => (applyTheme("light"), draw()));
addEventListener("afterprint", () => (applyTheme(theme.value), draw()));
equipRuns();
[...charts, ...maps].forEach(equip);
let width = 0;
new ResizeObserver(([entry]) => {
  if (Math.abs(entry.contentRect.width - width) < 1) return;
  width = entry.contentRect.width;
  charts.forEach((chart) => plots.get(chart.id).setSize(sizeOf(chart)));
  maps.forEach(drawMap);
}).observe(document.querySelector(".charts"));
draw();
if (document.body.dataset.version) setInterval(update, 3000);
