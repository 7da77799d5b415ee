// The curves of a report: what to draw lies in #data, how in the three controls.
"use strict";
const { runs, charts, time_unit } = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#3b82f6", "#ef7d2d", "#22a06b", "#b05fd8", "#e0519b", "#1aa3b8", "#b59410", "#8a8a8a"];
const controls = ["axis", "smooth", "log"].map((id) => document.getElementById(id));
const [axis, smoothing, log] = controls;

// A mean that forgets: of each value before it the weight is that of the next, times `weight`.
function smooth(values, weight) {
  let sum = 0;
  return values.map((value, i) => (sum = weight * sum + (1 - weight) * value) / (1 - weight ** (i + 1)));
}

function traces(chart) {
  const weight = Number(smoothing.value);
  // A few curves are told apart by their style, and runs by colour; else it is the other way round.
  const plain = chart.curves.filter(([, , style]) => !style).length;
  const coloured = chart.curves.length > 2 || plain > 1;
  const drawn = chart.curves.flatMap(([key, label, style], c) =>
    runs.flatMap((run, r) => {
      const curve = run.curves[key];
      if (!curve) return [];
      const color = style[0] === "#" ? style : COLOURS[(coloured ? c : r) % COLOURS.length];
      const names = [...(runs.length > 1 ? [run.name] : []), ...(chart.curves.length > 1 ? [label] : [])];
      const line = { color, width: 1.8, dash: style === "dash" || (coloured && r) ? "dash" : "solid" };
      const all = run.x[axis.value];
      const trace = {
        x: curve.at ? curve.at.map((i) => all[i]) : all,
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
      return [raw, { ...trace, y: smooth(curve.mean || curve.y, weight) }];
    }),
  );
  return [...drawn, ...marks()];
}

// What happened, on the axis: routine pale, trouble red.
function marks() {
  const x = [], text = [], color = [];
  for (const run of runs)
    for (const mark of run.marks) {
      x.push(mark[axis.value]);
      text.push((runs.length > 1 ? `${run.name}: ` : "") + mark.text);
      color.push(mark.routine ? "#8a8a8a" : "#d92d20");
    }
  if (!x.length) return [];
  const marker = { symbol: "triangle-up", size: 10, color };
  const place = { yaxis: "y2", cliponaxis: false, showlegend: false };
  return [{ x, y: x.map(() => 0), text, name: "events", mode: "markers", marker, hovertemplate: "%{text}", ...place }];
}

function layout(chart) {
  const style = getComputedStyle(document.documentElement);
  const [ink, faint, paper, line] = ["ink", "faint", "paper", "line"].map((n) => style.getPropertyValue(`--${n}`).trim());
  const along = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
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
    // A finger scrolls the page; the buttons zoom.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    uirevision: axis.value + log.checked,
    xaxis: { ...along, title: { text: axis.value === "time" ? time_unit : axis.value + "s" } },
    yaxis: { ...along, type: logs ? "log" : "linear", tickformat: chart.format || "", exponentformat: "SI" },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  };
}

function draw() {
  const buttons = ["select2d", "lasso2d", "autoScale2d"];
  // Nothing leaves this page: by itself plotly would offer to send its data to plotly's own servers.
  const config = { responsive: true, displaylogo: false, showSendToCloud: false, modeBarButtonsToRemove: buttons };
  for (const chart of charts) Plotly.react(`chart-${chart.id}`, traces(chart), layout(chart), config);
  document.getElementById("weight").textContent = smoothing.value;
}

// The choices outlive a running page's reload.
for (const control of controls) {
  const value = control.type === "checkbox" ? "checked" : "value";
  const kept = sessionStorage.getItem(control.id);
  if (kept !== null) control[value] = JSON.parse(kept);
  control.addEventListener("input", () => {
    sessionStorage.setItem(control.id, JSON.stringify(control[value]));
    draw();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
