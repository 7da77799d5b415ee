// Draw the curves of a report from the JSON in #data, as set by the three controls.
"use strict";
const { runs, charts, time_unit } = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#3b82f6", "#ef7d2d", "#22a06b", "#b05fd8", "#e0519b", "#1aa3b8", "#b59410", "#8a8a8a"];
const controls = ["axis", "smooth", "log"].map((id) => document.getElementById(id));
const [axis, smoothing, log] = controls;

// Exponential moving average, normalized so that the weights sum to one.
function smooth(values, weight) {
  let sum = 0;
  return values.map((value, i) => (sum = weight * sum + (1 - weight) * value) / (1 - weight ** (i + 1)));
}

function traces(chart) {
  const weight = Number(smoothing.value);
  // Color shows the run if the chart has at most two curves, which differ in style; else the curve.
  const unstyled = chart.curves.filter(([, , style]) => !style).length;
  const colorShowsCurve = chart.curves.length > 2 || unstyled > 1;
  const drawn = chart.curves.flatMap(([key, label, style], c) =>
    runs.flatMap((run, r) => {
      const curve = run.curves[key];
      if (!curve) return [];
      const color = style[0] === "#" ? style : COLORS[(colorShowsCurve ? c : r) % COLORS.length];
      const names = [...(runs.length > 1 ? [run.name] : []), ...(chart.curves.length > 1 ? [label] : [])];
      const line = { color, width: 1.8, dash: style === "dash" || (colorShowsCurve && r) ? "dash" : "solid" };
      const all = run.x[axis.value];
      const trace = {
        x: curve.indices ? curve.indices.map((i) => all[i]) : all,
        y: curve.y,
        name: names.join(", ") || chart.heading,
        mode: style === "dots" ? "lines+markers" : curve.y.length > 1 ? "lines" : "markers",
        line,
        marker: { color, size: 7 },
        hovertemplate: `%{y:${chart.format || ".5~g"}}`,
      };
      if (chart.stack) return [{ ...trace, stackgroup: "one", line: { color, width: 0.5 } }];
      if (!weight || style) return [trace];
      const raw = { ...trace, opacity: 0.25, showlegend: false, hoverinfo: "skip", hovertemplate: undefined };
      return [raw, { ...trace, y: smooth(curve.means || curve.y, weight) }];
    }),
  );
  return [...drawn, ...eventTraces()];
}

// Events as triangles on the x axis.
function eventTraces() {
  const x = [], text = [], color = [];
  for (const run of runs)
    for (const event of run.events) {
      x.push(event[axis.value]);
      text.push((runs.length > 1 ? `${run.name}: ` : "") + event.text);
      color.push(event.routine ? "#8a8a8a" : "#d92d20");
    }
  if (!x.length) return [];
  const marker = { symbol: "triangle-up", size: 10, color };
  const place = { yaxis: "y2", cliponaxis: false, showlegend: false };
  return [{ x, y: x.map(() => 0), text, name: "events", mode: "markers", marker, hovertemplate: "%{text}", ...place }];
}

function layout(chart) {
  const style = getComputedStyle(document.documentElement);
  const [ink, faint, paper, line] = ["ink", "faint", "paper", "line"].map((n) => style.getPropertyValue(`--${n}`).trim());
  const axisStyle = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const logs = log.checked && !chart.stack;
  return {
    margin: { l: 48, r: 36, t: 8, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, family: "system-ui, sans-serif", size: 12 },
    modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: faint, activecolor: ink },
    hoverlabel: { bgcolor: paper, bordercolor: line, font: { color: ink } },
    hovermode: "x unified",
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
    showlegend: chart.curves.length * runs.length > 1,
    // On a touch screen a drag scrolls the page, and the buttons zoom.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    uirevision: axis.value + log.checked,
    xaxis: { ...axisStyle, title: { text: axis.value === "time" ? time_unit : axis.value + "s" } },
    yaxis: { ...axisStyle, type: logs ? "log" : "linear", tickformat: chart.format || "", exponentformat: "SI" },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  };
}

function draw() {
  const buttons = ["select2d", "lasso2d", "autoScale2d"];
  // Disable the button that sends data to plotly's servers.
  const config = { responsive: true, displaylogo: false, showSendToCloud: false, modeBarButtonsToRemove: buttons };
  for (const chart of charts) Plotly.react(`chart-${chart.id}`, traces(chart), layout(chart), config);
  document.getElementById("weight").textContent = smoothing.value;
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
draw();
