// The pipeline as the loop that it is, drawn once and then only its texts and bars changed.
// Units are those of the viewBox; on a phone it is shown almost 1:1.

const SVG = "http://www.w3.org/2000/svg";
const NODES = {
  simulator: { x: 2, y: 18, title: "simulators" },
  generator: { x: 266, y: 18, title: "generators" },
  trainer: { x: 134, y: 242, title: "trainers" },
};
const WIDTH = 132, HEIGHT = 102;
const EDGES = {
  "obs-requests": { path: "M134 50 H258", at: [200, 42], lines: [[200, 65]], anchor: "middle" },
  actions: { path: "M266 96 H142", at: [200, 88], lines: [[200, 111]], anchor: "middle" },
  trajectories: { path: "M56 120 V293 H126", at: [66, 160], lines: [[66, 177], [66, 194]], anchor: "start" },
  weights: { path: "M266 293 H344 V128", at: [334, 160], lines: [[334, 177], [334, 194]], anchor: "end" },
};

function add(parent, name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

function drawNode(svg, { x, y, title }) {
  const group = add(svg, "g", { class: "node" });
  add(group, "rect", { class: "box", x, y, width: WIDTH, height: HEIGHT, rx: 11 });
  add(group, "text", { class: "title", x: x + 11, y: y + 22 }, title);
  const count = add(group, "text", { class: "title", x: x + WIDTH - 11, y: y + 22, "text-anchor": "end" });
  const rate = add(group, "text", { class: "value", x: x + 11, y: y + 42 });
  add(group, "rect", { class: "track", x: x + 11, y: y + 52, width: WIDTH - 22, height: 6, rx: 3 });
  const bar = add(group, "rect", { class: "busy", x: x + 11, y: y + 52, width: 0, height: 6, rx: 3 });
  const shares = [75, 92].map((down) => add(group, "text", { class: "dim", x: x + 11, y: y + down }));
  return { count, rate, bar, shares };
}

function drawEdge(svg, name, { path, at, lines, anchor }) {
  const group = add(svg, "g", { class: "edge", "data-edge": name });
  add(group, "path", { d: path, "marker-end": "url(#arrow)" });
  add(group, "text", { class: "name", x: at[0], y: at[1], "text-anchor": anchor }, name);
  return { group, lines: lines.map(([x, y]) => add(group, "text", { class: "value", x, y, "text-anchor": anchor })) };
}

export function drawLoop(place) {
  const svg = add(place, "svg", { viewBox: "0 0 400 350", role: "img", "aria-labelledby": "loop-title" });
  const title = add(svg, "title", { id: "loop-title" });
  const marker = add(add(svg, "defs", {}), "marker", {
    id: "arrow", viewBox: "0 0 8 8", refX: 3, refY: 4, markerWidth: 9, markerHeight: 9,
    markerUnits: "userSpaceOnUse", orient: "auto",
  });
  add(marker, "path", { d: "M0 0 L8 4 L0 8 z" });
  const edges = Object.fromEntries(Object.entries(EDGES).map(([name, edge]) => [name, drawEdge(svg, name, edge)]));
  const nodes = Object.fromEntries(Object.entries(NODES).map(([role, node]) => [role, drawNode(svg, node)]));

  // nodes: {role: {count, rate, busy: 0…1 or null, shares: [text, text]}}, edges: {name: {lines: [text…], flowing}}
  return function show(seen) {
    for (const [role, { count, rate, busy, shares }] of Object.entries(seen.nodes)) {
      nodes[role].count.textContent = count;
      nodes[role].rate.textContent = rate;
      nodes[role].bar.setAttribute("width", (busy ?? 0) * (WIDTH - 22));
      shares.forEach((text, index) => { nodes[role].shares[index].textContent = text; });
    }
    for (const [name, { lines, flowing }] of Object.entries(seen.edges)) {
      const shown = edges[name].lines.length === 1 ? [lines.filter(Boolean).join(" · ")] : lines;
      shown.forEach((text, index) => { edges[name].lines[index].textContent = text; });
      edges[name].group.classList.toggle("flowing", flowing);
    }
    title.textContent = Object.entries(seen.edges).map(([name, { lines }]) => `${name}: ${lines.join(", ")}`).join("; ");
  };
}
