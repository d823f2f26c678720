// Small helpers. Data of the run is shown as text only, never as HTML: anybody may have written it.

export const byId = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// 1,234 or 12.3 or 0.42, and nothing for nothing.
export function figure(value) {
  if (value === null || value === undefined) return "";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export const percent = (share) => (share === null || share === undefined ? "" : `${Math.round(100 * share)} %`);

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");
