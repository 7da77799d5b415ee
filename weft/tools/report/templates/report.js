// Draw the curves of a report from the JSON in #data, as set by the three controls.
"use strict";
const { runs, charts, time_unit } = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#3b82f6", "#ef7d2d", "#22a06b", "#b05fd8", "#e0519b", "#1aa3b8", "#b59410", "#8a8a8a"];
const controls = ["axis", "smooth", "log"].map((id) => document.getElementById(id));
const [axis, smoothing, log] = controls;
const plots = new Map(); // chart id -> uPlot

// Exponential moving average, normalized so that the weights sum to one.
function smooth(values, weight) {
  let sum = 0;
  return values.map((value, i) => (sum = weight * sum + (1 - weight) * value) / (1 - weight ** (i + 1)));
}

function formatNumber(value) {
  const size = Math.abs(value);
  if (size && size < 1e-3) return value.toExponential(2).replace(/\.?0*e/, "e");
  const [unit, suffix] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]].find(([unit]) => size >= unit) || [1, ""];
  return Number((value / (suffix === "k" ? 1e3 : unit)).toPrecision(4)) + suffix;
}

function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function formatter(chart) {
  return chart.format === "%" ? (value) => `${Number((100 * value).toPrecision(4))}%` : formatNumber;
}

// The curves of a chart with their looks: { label, color, dash, dots, area, exact, x, y, means }.
function curvesOf(chart) {
  // Color shows the run if the chart has at most two curves, which differ in style; else the curve.
  const unstyled = chart.curves.filter(([, , style]) => !style).length;
  const colorShowsCurve = chart.curves.length > 2 || unstyled > 1;
  const curves = chart.curves.flatMap(([key, label, style], c) =>
    runs.flatMap((run, r) => {
      const curve = run.curves[key];
      if (!curve) return [];
      const all = run.x[axis.value];
      const names = [...(runs.length > 1 ? [run.name] : []), ...(chart.curves.length > 1 ? [label] : [])];
      return [{
        label: names.join(", ") || chart.heading,
        color: chart.stack ? cssColor(key.split(".").at(-1)) : COLORS[(colorShowsCurve ? c : r) % COLORS.length],
        dash: style === "dash" || (colorShowsCurve && r) ? [6, 4] : [],
        dots: style === "dots",
        exact: Boolean(style),
        x: curve.indices ? curve.indices.map((i) => all[i]) : all,
        y: curve.y,
        means: curve.means,
      }];
    }),
  );
  return chart.stack ? curves.reverse() : curves; // the legend of a stack reads from top to bottom
}

// The columns of uPlot's data for curves with their own x; places without x are left out.
function align(curves) {
  const tables = curves.map(({ x, y }) => {
    const known = x.map((_, i) => i).filter((i) => x[i] !== null);
    return [known.map((i) => x[i]), known.map((i) => y[i])];
  });
  const places = runs.flatMap((run) => run.events.map((event) => event[axis.value])).filter((x) => x !== null);
  return uPlot.join([...tables, [places.sort((a, b) => a - b)]]);
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
  const last = columns[index].findLast((y) => y !== null && y !== undefined);
  return {
    label: curve.label,
    class: curve.dots ? "dots" : undefined,
    stroke: curve.color,
    width: chart.stack ? 1 : 1.8,
    dash: curve.dash,
    fill: chart.stack ? curve.color : undefined,
    points: { show: chart.stack ? false : curve.dots || undefined, size: 7, fill: curve.color },
    value: (plot, y, _, at) => {
      const value = at == null ? last : columns[index][at];
      return value === null || value === undefined ? "–" : format(value);
    },
  };
}

// Triangles on the x axis, with the text of the event as tooltip.
function placeEvents(plot) {
  for (const mark of plot.over.querySelectorAll(".event")) mark.remove();
  for (const run of runs)
    for (const event of run.events) {
      const x = event[axis.value];
      if (x === null || x < plot.scales.x.min || x > plot.scales.x.max) continue;
      const mark = document.createElement("span");
      mark.className = event.routine ? "event routine" : "event";
      mark.title = (runs.length > 1 ? `${run.name}: ` : "") + event.text;
      mark.style.left = `${plot.valToPos(x, "x")}px`;
      plot.over.append(mark);
    }
}

function options(chart, curves, columns) {
  const [ink, line] = [cssColor("ink"), cssColor("line")];
  const look = { stroke: ink, font: "12px system-ui, sans-serif", grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const name = axis.value === "time" ? time_unit : `${axis.value}s`;
  const labels = (format) => (_, marks) => marks.map((mark) => (mark === null ? "" : format(mark)));
  const isLog = log.checked && !chart.stack;
  // uPlot would extend a logarithmic axis to whole decades, and begin a stack above zero.
  const ranges = {
    log: { range: (_, min, max) => (min > 0 && max > 1.2 * min ? [min / 1.1, max * 1.1] : uPlot.rangeLog(min > 0 ? min : 1, max > 0 ? max : 10, 10, true)) },
    stack: { range: (_, __, max) => [0, 1.05 * max || 1] },
  };
  const series = curves.map((curve, i) => seriesOf(curve, chart, columns, i + 1));
  curves.forEach((curve, i) => {
    if (curve.raw) Object.assign(series[i], { class: "raw", stroke: `${curve.color}40`, points: { show: false } });
  });
  return {
    ...sizeOf(chart),
    scales: {
      x: { time: false },
      y: { distr: isLog ? 3 : 1, ...(ranges[isLog ? "log" : chart.stack ? "stack" : ""] || {}) },
    },
    series: [{ label: name, value: (plot, x) => formatNumber(x ?? plot.data[0].at(-1)) }, ...series],
    axes: [
      { ...look, label: name, labelSize: 18, labelFont: look.font, size: 34, values: labels(formatNumber) },
      { ...look, size: 62, values: labels(formatter(chart)) },
    ],
    legend: {
      markers: {
        fill: (_, i) => (curves[i - 1].dash.length ? "transparent" : curves[i - 1].color),
        dash: (_, i) => (curves[i - 1].dash.length ? "dashed" : "solid"),
      },
    },
    cursor: { sync: { key: "report", setSeries: false }, y: false },
    drawOrder: chart.stack ? ["series", "axes"] : ["axes", "series"],
    hooks: {
      draw: [placeEvents],
      setSeries: [
        (plot, index) => {
          if (index === null) return;
          // The faint curve of a smoothed one follows it.
          const raw = curves[index - 2];
          if (raw && raw.raw && plot.series[index - 1].show !== plot.series[index].show)
            plot.setSeries(index - 1, { show: plot.series[index].show });
          if (!chart.stack) return;
          const { min, max } = plot.scales.x;
          plot.setData(stacked(columns, (i) => plot.series[i].show), false);
          plot.setScale("x", { min, max });
        },
      ],
    },
  };
}

function sizeOf(chart) {
  const element = document.getElementById(`chart-${chart.id}`);
  return { width: element.clientWidth, height: chart.id === "loss" ? 340 : 260 };
}

function draw() {
  const weight = Number(smoothing.value);
  document.getElementById("weight").textContent = smoothing.value;
  for (const chart of charts) {
    const curves = curvesOf(chart).flatMap((curve) =>
      weight && !curve.exact
        ? [{ ...curve, raw: true }, { ...curve, y: smooth(curve.means || curve.y, weight) }]
        : [curve],
    );
    const columns = align(curves);
    const before = plots.get(chart.id);
    const data = chart.stack ? stacked(columns, () => true) : columns;
    const plot = new uPlot(options(chart, curves, columns), data);
    plot.axisName = axis.value;
    if (before && before.axisName === axis.value) {
      const { min, max } = before.scales.x;
      plot.setScale("x", { min, max });
    }
    if (before) before.destroy();
    document.getElementById(`chart-${chart.id}`).replaceChildren(plot.root);
    plots.set(chart.id, plot);
  }
}

// Keep the controls' values when the page reloads.
for (const control of controls) {
  const value = control.type === "checkbox" ? "checked" : "value";
  const saved = sessionStorage.getItem(control.id);
  if (saved !== null) control[value] = JSON.parse(saved);
  control.addEventListener("input", () => {
    sessionStorage.setItem(control.id, JSON.stringify(control[value]));
    draw();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(() => charts.forEach((chart) => plots.get(chart.id).setSize(sizeOf(chart)))).observe(
  document.querySelector(".charts"),
);
draw();
