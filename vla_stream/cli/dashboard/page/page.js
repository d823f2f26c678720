// Asks the server once a second, as long as somebody sees the page, and shows what came.

import { lookThroughCameras } from "./cameras.js";
import { showCharts } from "./charts.js";
import { byId, clock, duration, element, figure, percent, setText } from "./dom.js";
import { drawLoop } from "./loop.js";
import { getJson, press, token } from "./server_link.js";
import { showWorkers } from "./workers.js";

const PERIOD_MS = 1000, OLD_S = 4;
const showLoop = drawLoop(byId("loop"));
let desired = "";

// ---- what came

function showProblem(text) {
  byId("problem").hidden = !text;
  setText(byId("problem"), text);
  document.body.classList.toggle("stale", Boolean(text));
}

function showNow(snapshot) {
  desired = snapshot.flow.desired;
  setText(byId("run"), snapshot.run);
  document.title = `${snapshot.run} · vla-stream`;
  setText(byId("desired"), desired);
  byId("desired").className = `badge ${desired}`;
  setText(byId("bottleneck"), sentence(snapshot));
  byId("bar").max = Math.max(1, snapshot.updates);
  byId("bar").value = snapshot.flow.update;
  setText(byId("updates"), `update ${snapshot.flow.update} of ${snapshot.updates}`);
  showFigures(snapshot.figures);
}

function sentence(snapshot) {
  const pausedBecause = { paused: "The run is paused: no new segments begin.", draining: "The run drains: it ends after the segments in flight.", stopped: "The run has ended." };
  const said = pausedBecause[desired] ?? (snapshot.bottleneck || snapshot.waiting || "Not all roles have been heard of yet.");
  return said[0].toUpperCase() + said.slice(1);
}

function showFigures(figures) {
  const place = byId("figures");
  while (place.children.length < figures.length) place.append(element("div", {}, element("dt"), element("dd")));
  while (place.children.length > figures.length) place.lastChild.remove();
  figures.forEach(([label, value], index) => {
    setText(place.children[index].firstChild, label);
    setText(place.children[index].lastChild, value);
  });
}

function node(snapshot, role, rate) {
  const shares = snapshot.shares[role];
  const words = shares ? [`works ${percent(shares.work)}`, `waits ${percent(shares.input + shares.output)}`] : ["", ""];
  return { count: `${snapshot.alive[role] ?? 0}`, rate, busy: shares?.work ?? null, shares: words };
}

function showPipeline(snapshot) {
  const { rates, queues, alive } = snapshot;
  const per = (rate, unit) => (rate === null ? "" : `${figure(rate)} ${unit}`);
  showLoop({
    nodes: {
      simulator: node(snapshot, "simulator", per(rates.env_steps, "env-steps/s")),
      generator: node(snapshot, "generator", snapshot.fill === null ? "" : `batches ${percent(snapshot.fill)} full`),
      trainer: node(snapshot, "trainer", per(rates.trained, "env-steps/s")),
    },
    edges: {
      "obs-requests": { lines: [`${figure(queues["obs-requests"])} wait`, per(rates.requests, "/s")], flowing: rates.requests > 0 },
      actions: { lines: ["", per(rates.rows, "rows/s")], flowing: rates.rows > 0 },
      trajectories: { lines: [`${figure(queues.trajectories)} wait`, `${per(rates.segments, "/s")}`], flowing: rates.segments > 0 },
      weights: { lines: [`version ${snapshot.flow.version}`, per(rates.updates, "/s")], flowing: Boolean(alive.trainer && rates.updates) },
    },
  });
  setText(byId("books"), `${snapshot.books.sentence}, of which ${snapshot.making} in the making · dead letters ${snapshot.dead_letters} · lane ${snapshot.flow.lane}`);
}

function showEvents(events) {
  const place = byId("events");
  const known = new Set([...place.children].map((line) => line.dataset.id));
  const coming = new Set(events.map(({ id }) => id));
  for (const line of [...place.children]) if (!coming.has(line.dataset.id)) line.remove();
  for (const { id, time, worker, kind, text } of [...events].reverse()) {
    if (known.has(id)) continue;
    const line = element("li", {},
      element("time", { textContent: clock(time), dateTime: new Date(1000 * time).toISOString() }), " ",
      element("b", { textContent: worker }), ` ${kind}: ${text}`);
    line.dataset.id = id;
    place.prepend(line);
  }
}

function show({ age_s, problem, snapshot }) {
  const old = age_s !== null && age_s > OLD_S ? `These figures are ${duration(age_s)} old.` : "";
  showProblem([problem, old].filter(Boolean).join(" "));
  if (!snapshot) return;
  showNow(snapshot);
  showPipeline(snapshot);
  showWorkers(snapshot);
  showEvents(snapshot.events);
  showButtons(!problem);
  return showCharts(snapshot);
}

// ---- buttons

function showButtons(there) {
  const possible = { pause: desired === "running", resume: desired === "paused", drain: desired === "running" || desired === "paused" };
  for (const button of document.querySelectorAll("[data-press]")) {
    button.disabled = !token || !there || !possible[button.dataset.press];
  }
}

function answer(text) {
  byId("answer").hidden = !text;
  setText(byId("answer"), text);
}

async function pressed(button) {
  answer("");
  try {
    await press(button);
    answer({ pause: "Paused: segments in flight are finished and trained.", resume: "The run goes on.", drain: "The run ends after the segments in flight." }[button]);
  } catch (error) {
    answer(`${button}: ${error.message}`);
  }
}

const sure = byId("sure");
sure.addEventListener("close", () => { if (sure.returnValue === "yes") pressed("drain"); });
for (const button of document.querySelectorAll("[data-press]")) {
  button.addEventListener("click", () => {
    if (button.dataset.press !== "drain") return pressed(button.dataset.press);
    sure.returnValue = "";
    sure.showModal();
  });
}

// ---- the beat

async function look() {
  try {
    await show(await getJson("snapshot"));
    await lookThroughCameras();
  } catch (error) {
    showProblem(error instanceof TypeError || error.name === "TimeoutError" ? "The dashboard does not answer: start vla-stream dashboard again." : error.message);
  }
}

const seen = () => new Promise((go) => {
  if (!document.hidden) return go();
  document.addEventListener("visibilitychange", go, { once: true });
});

showButtons(false);
if (!token) answer("You may look. The buttons need the token: open the address that vla-stream dashboard printed.");
for (;;) {
  await seen();
  const began = performance.now();
  await look();
  await new Promise((go) => setTimeout(go, Math.max(100, PERIOD_MS - (performance.now() - began))));
}
