// The table of workers: one row per worker, made once and then only changed, so that hundreds stay cheap.

import { byId, duration, element, figure, percent, setText } from "./dom.js";

// extra: left out on a narrow screen.
const COLUMNS = [
  { name: "worker", text: (worker) => worker.id },
  { name: "state", text: (worker) => worker.state },
  { name: "at work", share: (worker) => worker.shares?.work },
  { name: "waits", number: true, text: (worker) => percent(worker.shares?.input) },
  { name: "held back", number: true, extra: true, text: (worker) => percent(worker.shares?.output) },
  { name: "rate", number: true, extra: true, text: (worker) => (worker.rate === null ? "" : `${figure(worker.rate)} ${worker.unit}`) },
  { name: "weights", number: true, extra: true, text: (worker) => (worker.role === "simulator" ? "" : String(worker.version)) },
  { name: "cores", number: true, extra: true, text: (worker) => figure(worker.cpu) },
  { name: "MB", number: true, extra: true, text: (worker) => figure(worker.memory_mb) },
  { name: "host", extra: true, text: (worker) => worker.host },
  { name: "device", extra: true, text: (worker) => worker.device },
  { name: "pid", number: true, extra: true, text: (worker) => String(worker.pid) },
  { name: "alive", number: true, extra: true, text: (worker) => duration(worker.alive_s) },
];
const table = byId("workers"), body = table.tBodies[0], filter = byId("filter"), count = byId("worker-count");
const rows = new Map();
let workers = [], inAll = 0;

const className = ({ number, extra }) => [number && "number", extra && "extra"].filter(Boolean).join(" ");

table.tHead.append(element("tr", {}, ...COLUMNS.map((column) =>
  element("th", { scope: "col", textContent: column.name, className: className(column) }))));

function makeRow() {
  const cells = COLUMNS.map((column, index) => {
    const cell = element(index ? "td" : "th", { className: className(column) });
    if (!index) cell.scope = "row";
    if (column.share) cell.append(element("meter", { min: 0, max: 1 }), element("span"));
    return cell;
  });
  return element("tr", {}, ...cells);
}

function fill(row, worker) {
  COLUMNS.forEach((column, index) => {
    const cell = row.cells[index];
    if (!column.share) return setText(cell, column.text(worker));
    const share = column.share(worker);
    cell.firstChild.hidden = share === undefined;
    cell.firstChild.value = share ?? 0;
    setText(cell.lastChild, percent(share));
  });
}

const matches = (worker, words) => words.every((word) => `${worker.id} ${worker.host} ${worker.state} ${worker.device}`.toLowerCase().includes(word));

function draw() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = workers.filter((worker) => matches(worker, words));
  const there = new Set(shown.map((worker) => worker.id));
  for (const [id, row] of rows) if (!there.has(id)) { row.remove(); rows.delete(id); }
  shown.forEach((worker, index) => {
    if (!rows.has(worker.id)) rows.set(worker.id, makeRow());
    const row = rows.get(worker.id);
    fill(row, worker);
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
  setText(count, shown.length === inAll ? `${inAll}` : `${shown.length} of ${inAll}`);
}

export function showWorkers(snapshot) {
  workers = snapshot.workers;
  inAll = Object.values(snapshot.alive).reduce((sum, number) => sum + number, 0);
  draw();
}

filter.addEventListener("input", draw);
