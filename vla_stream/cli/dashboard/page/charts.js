// Learning curves and histograms, drawn by Plotly in the colours of the page.

import { byId, element, figure, setText } from "./dom.js";
import { getJson } from "./server_link.js";

const CURVES = [
  { title: "success", series: { success: "success" }, range: [-0.03, 1.03] },
  { title: "return", series: { return: "return" } },
  { title: "loss", series: { policy_loss: "policy", value_loss: "value", imitation_loss: "imitation" } },
  { title: "KL to the behaviour policy", series: { kl_behaviour: "KL" } },
  { title: "entropy", series: { entropy: "entropy" } },
  { title: "staleness, versions", series: { staleness: "mean" } },
];
const HISTOGRAMS = {
  staleness: { title: "staleness of segments, last updates", unit: "versions" },
  fill: { title: "batch fill, last seconds", unit: "rows ÷ max_batch_size, up to" },
  age_ms: { title: "age of the oldest request when sent", unit: "ms, up to" },
};
const axis = byId("axis");
let curves = null, shownPoints = -1, histograms = null;

function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["text", "dim", "line", "blue", "amber", "green"].map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
}

function layout(plot, colour, more) {
  const line = { gridcolor: colour.line, zerolinecolor: colour.line, linecolor: colour.line, automargin: true, fixedrange: true };
  return {
    margin: { l: 44, r: 10, t: 8, b: 34 }, height: 190, width: plot.clientWidth, showlegend: false, dragmode: false,
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { color: colour.dim, size: 11, family: "system-ui, sans-serif" },
    ...more, xaxis: { ...line, ...more.xaxis }, yaxis: { ...line, ...more.yaxis },
  };
}

const OPTIONS = { displayModeBar: false };

// All places are made before the first is drawn: a chart takes the width that its place then has.
function makePlaces(parent, keys) {
  return Object.fromEntries(keys.map((key) => {
    const caption = element("figcaption"), plot = element("div", { className: "plot" });
    plot.setAttribute("role", "img");
    parent.append(element("figure", {}, caption, plot));
    return [key, { caption, plot }];
  }));
}

const places = {
  ...makePlaces(byId("curves"), CURVES.map(({ title }) => title)),
  ...makePlaces(byId("histograms"), Object.keys(HISTOGRAMS)),
};

function drawCurve({ title, series, range }, colour) {
  const names = Object.keys(series).filter((name) => curves.series[name].some((value) => value !== null));
  const { caption, plot } = places[title];
  const last = names.map((name) => {
    const value = curves.series[name].findLast((found) => found !== null);
    return names.length > 1 ? `${series[name]} ${figure(value)}` : figure(value);
  });
  setText(caption, `${title}: ${last.join(", ") || "nothing yet"}`);
  plot.setAttribute("aria-label", caption.textContent);
  const palette = [colour.blue, colour.amber, colour.green];
  const x = curves.x[axis.value];
  const traces = names.map((name, index) => ({
    x, y: curves.series[name], name: series[name], mode: x.length > 1 ? "lines" : "markers", connectgaps: true,
    line: { color: palette[index], width: 2, dash: ["solid", "dot", "dash"][index] }, marker: { color: palette[index] },
  }));
  Plotly.react(plot, traces, layout(plot, colour, {
    showlegend: names.length > 1, legend: { orientation: "h", y: 1.16 }, yaxis: { range, autorange: !range },
    xaxis: { rangemode: "tozero" },
  }), OPTIONS);
}

function drawHistogram(key, buckets, colour) {
  const { title, unit } = HISTOGRAMS[key];
  const { caption, plot } = places[key];
  const bounds = buckets.map(([bound]) => bound.replace("inf", "more")), counts = buckets.map(([, count]) => count);
  const total = counts.reduce((sum, count) => sum + count, 0);
  setText(caption, total ? title : `${title}: nothing yet`);
  const shares = counts.map((count) => 100 * count / total);
  plot.setAttribute("aria-label", `${title}: ${bounds.map((bound, i) => `${bound}: ${Math.round(shares[i])} %`).join(", ")}`);
  Plotly.react(plot, [{ type: "bar", x: bounds, y: total ? shares : [], marker: { color: colour.blue } }], layout(plot, colour, {
    xaxis: { type: "category", title: { text: unit, standoff: 4 } }, yaxis: { ticksuffix: " %", rangemode: "tozero" }, bargap: 0.15,
  }), OPTIONS);
}

function drawAll() {
  if (typeof Plotly === "undefined") return;
  const colour = colours();
  if (curves) CURVES.forEach((curve) => drawCurve(curve, colour));
  if (histograms) Object.keys(HISTOGRAMS).forEach((key) => drawHistogram(key, histograms[key] ?? [], colour));
}

export async function showCharts(snapshot) {
  const changed = JSON.stringify(histograms) !== JSON.stringify(snapshot.histograms);
  histograms = snapshot.histograms;
  const grown = shownPoints !== snapshot.curve_points;
  if (grown) {
    curves = await getJson("curves");
    shownPoints = snapshot.curve_points;
  }
  if (changed || grown) drawAll();
}

let width = 0;
new ResizeObserver(() => {
  if (width !== byId("curves").clientWidth) drawAll();
  width = byId("curves").clientWidth;
}).observe(byId("curves"));

axis.addEventListener("change", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
