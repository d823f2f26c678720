// What the robots of one chosen slot see.

import { byId, duration, element, setText } from "./dom.js";
import { getJson } from "./server_link.js";

const choice = byId("slot"), place = byId("cameras"), note = byId("camera-note");

function showSlots(slots) {
  const known = [...choice.options].map((option) => option.value);
  if (known.join("\n") === slots.join("\n")) return;
  const chosen = choice.value;
  choice.replaceChildren(...slots.map((slot) => element("option", { value: slot, textContent: slot })));
  if (slots.includes(chosen)) choice.value = chosen;
}

function showRow(figure, row, number) {
  const views = figure.querySelector(".views"), caption = figure.querySelector("figcaption");
  while (views.children.length < row.cameras.length) views.append(element("img"));
  while (views.children.length > row.cameras.length) views.lastChild.remove();
  row.cameras.forEach((camera, index) => {
    views.children[index].src = camera.src;
    views.children[index].alt = `${camera.name} camera of row ${number}`;
  });
  setText(caption, row.told);
}

function showPicture(picture) {
  const rows = picture?.rows ?? [];
  while (place.children.length < rows.length) {
    place.append(element("figure", {}, element("div", { className: "views" }), element("figcaption")));
  }
  while (place.children.length > rows.length) place.lastChild.remove();
  rows.forEach((row, number) => showRow(place.children[number], row, number));
}

function describe(seen, picture) {
  if (seen.problem && !picture) return `No image: ${seen.problem}`;
  if (!seen.slots.length) return "No request of a slot has come yet.";
  if (!picture) return "Waiting for the slot's next request.";
  const hidden = picture.rows_in_all - picture.rows.length;
  const age = Date.now() / 1000 - picture.time;
  const words = [`ticket ${picture.ticket}, chunk step ${picture.step}`];
  if (picture.rows.length && !picture.rows[0].cameras.length) words.push("this environment has no camera");
  if (hidden > 0) words.push(`${hidden} more rows are not shown`);
  if (age > 3) words.push(`${duration(age)} ago`);
  return words.join(" · ");
}

export async function lookThroughCameras() {
  const seen = await getJson(`cameras?slot=${encodeURIComponent(choice.value)}`);
  showSlots(seen.slots);
  const picture = seen.pictures[choice.value] ?? null;
  showPicture(picture);
  setText(note, describe(seen, picture));
}
