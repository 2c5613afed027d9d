"use strict";
// Draws the plots of a comparison from the JSON in #data, with the plotly.js that #plotly holds compressed.
// Everything that comes from files reaches plotly through text(): plotly reads some HTML in its labels.

const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
// After Okabe and Ito: told apart by people who see fewer colors, the blue lighter for black grounds.
const COLORS = ["#2B8AD6", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
const X_TITLES = { steps: "steps", tokens: "tokens", gpu_seconds: "GPU-seconds" };
const drawn = {};

const text = (words) => words.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const color = (variant) => COLORS[data.variants.indexOf(variant) % COLORS.length];
const faint = (variant) => color(variant) + "30";
const chosen = (id) => document.getElementById(id).value;
const checked = (id) => document.getElementById(id).checked;

// Means over 2·half + 1 neighbors; at the ends over as many as lie on both sides, so that no point moves sideways.
function smooth(values, half) {
  if (half < 1) return values;
  const sums = [0], counts = [0];
  values.forEach((value, i) => {
    sums.push(sums[i] + (value ?? 0));
    counts.push(counts[i] + (value === null ? 0 : 1));
  });
  return values.map((value, i) => {
    const reach = Math.min(half, i, values.length - 1 - i);
    const count = counts[i + reach + 1] - counts[i - reach];
    return value === null || count === 0 ? null : (sums[i + reach + 1] - sums[i - reach]) / count;
  });
}

function lossTraces(kind) {
  const axis = chosen("axis"), percent = kind === "training" ? Number(chosen("smoothing")) : 0, shown = new Set();
  return data.runs.filter((run) => run[kind].losses.length && run[kind][axis].length).map((run) => {
    const curve = run[kind], first = !shown.has(run.variant);
    shown.add(run.variant);
    return {
      type: "scatter", mode: kind === "training" ? "lines" : "lines+markers", x: curve[axis],
      y: smooth(curve.losses, Math.round(curve.losses.length * percent / 200)), name: text(run.variant),
      legendgroup: run.variant, showlegend: first, opacity: 0.9,
      line: { color: color(run.variant), width: 1.5 },
      hovertemplate: `${text(run.name)}: %{y:.4f}<extra></extra>`,
    };
  });
}

const lossLayout = () => ({
  xaxis: { title: { text: X_TITLES[chosen("axis")] }, type: checked("log_x") ? "log" : "linear", autorange: true },
  yaxis: { title: { text: "loss (nats per token)" }, type: checked("log_y") ? "log" : "linear", autorange: true },
  hovermode: "x unified",
});

function gapFigure() {
  const axis = chosen("axis") === "steps" ? "steps" : "tokens", traces = [];
  for (const answer of data.answers) {
    const curve = answer.gap_curve, x = curve[axis].length ? curve[axis] : curve.steps;
    if (!x.length) continue;
    const common = { type: "scatter", mode: "lines", x, legendgroup: answer.variant };
    if (curve.lows.length) {
      const edge = { ...common, line: { width: 0 }, showlegend: false, hoverinfo: "skip" };
      traces.push({ ...edge, y: curve.lows.map(percents) });
      traces.push({ ...edge, y: curve.highs.map(percents), fill: "tonexty", fillcolor: faint(answer.variant) });
    }
    traces.push({
      ...common, y: curve.gaps.map(percents), name: text(answer.variant), line: { color: color(answer.variant), width: 2 },
      hovertemplate: `${text(answer.variant)}: %{y:+.3f}%<extra></extra>`,
    });
  }
  const layout = {
    xaxis: { title: { text: X_TITLES[axis] } }, hovermode: "x unified",
    yaxis: { title: { text: `loss against ${text(data.baseline)} (%)` }, zeroline: true, zerolinewidth: 2 },
  };
  return { traces, layout };
}

const percents = (value) => (value === null ? null : 100 * value);

function timesFigure() {
  const traces = data.answers.filter((answer) => answer.times.length).map((answer) => {
    const speedups = answer.times.map((time) => time.speedup);
    const distance = (end, sign) => speedups.map((each) => (each[end] === null ? 0 : sign * (each[end] - each.value)));
    return {
      type: "scatter", mode: "lines+markers", name: text(answer.variant), x: answer.times.map((time) => time.loss),
      y: speedups.map((each) => each.value), line: { color: color(answer.variant), width: 2 },
      error_y: { type: "data", symmetric: false, array: distance("high", 1), arrayminus: distance("low", -1), width: 3, thickness: 1 },
      customdata: answer.times.map((time) => [time.baseline_gpu_s, time.gpu_s]),
      hovertemplate: "loss %{x:.4f}: %{y:.3f}× (%{customdata[0]:.4~g} against %{customdata[1]:.4~g} GPU-seconds)"
        + `<extra>${text(answer.variant)}</extra>`,
    };
  });
  const layout = {
    xaxis: { title: { text: "loss (nats per token)" }, autorange: "reversed" },
    yaxis: { title: { text: "times sooner" } },
    shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: "#888", dash: "dash", width: 1 } }],
  };
  return { traces, layout };
}

// What a heat map shows: how a value becomes a color, and how the scale is called.
const QUANTITIES = {
  saturated: ["saturated (%)", percents],
  flushed: ["flushed to zero (%)", percents],
  amax: ["amax, log₂", (value) => (value > 0 ? Math.log2(value) : null)],
  scale_min: ["smallest scale, log₂", (value) => (value > 0 ? Math.log2(value) : null)],
  scale_max: ["largest scale, log₂", (value) => (value > 0 ? Math.log2(value) : null)],
};

function heatFigure() {
  const map = data.heat[Number(chosen("heat_run"))], kind = map.tensors[chosen("heat_tensor")];
  const [title, change] = QUANTITIES[chosen("heat_quantity")];
  const layers = kind.layers.map((layer) => text(layer.replace("decoder.layers.", "")));
  const trace = {
    // Step by step at equal width: statistics may be logged at uneven steps after a resume.
    type: "heatmap", x: map.steps.map(String), y: layers, z: kind[chosen("heat_quantity")].map((row) => row.map(change)),
    colorscale: "Viridis", hoverongaps: false, hovertemplate: "%{y}, step %{x}: %{z:.4~g}<extra></extra>",
    colorbar: { title: { text: title, side: "top" }, orientation: "h", y: 1.02, yanchor: "bottom", thickness: 10, len: 0.9 },
  };
  const layout = {
    xaxis: { title: { text: "step" }, type: "category" },
    yaxis: { autorange: "reversed", type: "category", automargin: true, tickfont: { size: 10 } },
    height: 190 + 15 * layers.length,
  };
  return { traces: [trace], layout };
}

const FIGURES = {
  training: () => ({ traces: lossTraces("training"), layout: lossLayout() }),
  validation: () => ({ traces: lossTraces("validation"), layout: lossLayout() }),
  gap: gapFigure,
  times: timesFigure,
  heat: heatFigure,
};

function themed(layout, isDark) {
  const ink = isDark ? "#e8e8e8" : "#1a1a1a", grid = isDark ? "#3a3f46" : "#e2e2e2";
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: ink, ...(innerWidth < 640 ? { nticks: 6 } : {}) };
  return {
    margin: { l: 60, r: 15, t: 30, b: 80 }, legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" },
    paper_bgcolor: isDark ? "#15181c" : "#ffffff", plot_bgcolor: isDark ? "#15181c" : "#ffffff",
    font: { color: ink, family: "system-ui, sans-serif", size: 13 }, hoverlabel: { bgcolor: isDark ? "#1f242a" : "#fff" },
    uirevision: chosen("axis"), ...layout,
    xaxis: { ...axis, automargin: true, ...layout.xaxis }, yaxis: { ...axis, automargin: true, ...layout.yaxis },
  };
}

function draw(id, isDark = dark.matches) {
  const place = document.getElementById(id);
  if (place === null) return;
  const figure = FIGURES[id]();
  drawn[id] = figure;
  if (figure.layout.height) place.style.height = `${figure.layout.height}px`;
  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["toImage", "lasso2d", "select2d"] };
  Plotly.react(place, figure.traces, themed(figure.layout, isDark), config);
}

const drawAll = (isDark = dark.matches) => Object.keys(FIGURES).forEach((id) => draw(id, isDark));

// For a paper: on white whatever the screen shows, as wide as a page, text as text.
function save(id, format) {
  const { traces, layout } = drawn[id], height = layout.height ?? 420;
  const size = { format, width: 800, height, scale: format === "png" ? 3 : 1, filename: `compare_${id}` };
  return Plotly.downloadImage({ data: traces, layout: { ...themed(layout, false), width: 800, height } }, size);
}

function listen() {
  for (const id of ["axis", "log_x", "log_y", "smoothing"]) {
    document.getElementById(id).addEventListener("input", () => ["training", "validation", "gap"].forEach((each) => draw(each)));
  }
  for (const id of ["heat_run", "heat_tensor", "heat_quantity"]) {
    document.getElementById(id)?.addEventListener("input", () => draw("heat"));
  }
  for (const button of document.querySelectorAll("button[data-save]")) {
    button.addEventListener("click", () => save(button.dataset.save, button.dataset.format));
  }
  dark.addEventListener("change", () => drawAll());
  addEventListener("beforeprint", () => drawAll(false));
  addEventListener("afterprint", () => drawAll());
}

async function start() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (letter) => letter.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(plain).text();
  document.head.append(script);
  drawAll();
  listen();
  document.body.dataset.state = "ready";
}

start().catch((error) => {
  const notice = document.getElementById("notice");
  notice.hidden = false;
  notice.textContent = `The plots cannot be drawn: ${error}. They need a browser of 2023 or later; compare.json has all figures.`;
});
