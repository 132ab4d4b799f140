// The data of the page, its charts, and small things that all of them share.

const data = JSON.parse(document.getElementById("data").textContent);
const plots = []; // every chart, to draw again in another theme
const DASHES = [[], [8, 4], [2, 3], [12, 3, 2, 3], [5, 5], [1, 5]];
const VIRIDIS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"];
const MISSING = 65535, WRONG = 65534, LAST = 65533; // codes of a grid: no value, inf or NaN, the largest value
const NO_NUMBER = "inf or NaN";

// ---- small things

const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function number(x, unit = "") {
  if (x === null || x === undefined) return "none";
  const share = unit === "share", y = share ? 100 * x : x, size = Math.abs(y);
  const digits = share ? 3 : 6;
  const small = size && (size < (share ? 1e-4 : 1e-3) || size >= 1e7);
  const options = { maximumSignificantDigits: digits };
  const text = small ? String(Number(y.toPrecision(digits - 2)).toExponential()) : y.toLocaleString("en-US", options);
  return share ? `${text} %` : unit ? `${text} ${unit}` : text;
}

function superscript(n) {
  return String(n).replace(/./g, (digit) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(digit)]);
}

function shorten(names, most) { // the number of the block and the end of a layer's name say more than its beginning
  if (names.every((name) => name.length <= most)) return names;
  const tails = names.map((name) => name.replace(/^.*?(?=\d)/, ""));
  return tails.map((tail) => (tail.length > most ? `…${tail.slice(1 - most)}` : tail));
}

const decode = (() => { // base64 to an array, when it is first shown
  const known = new Map();
  return (text, Kind) => {
    if (!known.has(text)) {
      const raw = atob(text), bytes = new Uint8Array(raw.length);
      for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
      known.set(text, new Kind(bytes.buffer));
    }
    return known.get(text);
  };
})();

// ---- what all charts share

function axis(label, more = {}) {
  const line = { stroke: () => css("--line"), width: 1 }, font = "12px system-ui";
  return { label, labelSize: 22, size: 62, font, labelFont: font, stroke: () => css("--ink"), grid: line, ticks: line, ...more };
}

/* Put a uPlot into `box` that is as wide as the box, also when the window changes. */
function plot(box, height, options, values) {
  const size = () => ({ width: Math.max(box.clientWidth, 240), height: height() });
  const made = new uPlot({ ...size(), legend: { show: false }, ...options }, values, box);
  const observer = new ResizeObserver(() => made.width === size().width || made.setSize(size()));
  observer.observe(box);
  made.hooks.destroy = [() => { observer.disconnect(); plots.splice(plots.indexOf(made), 1); }];
  plots.push(made);
  return made;
}

/* The parts of a chart: the box of the plot, the values at its cursor, and its data as a table.
 *
 * `press` takes the name of a key, and is false for a key that it does not know. `rows` gives the table's texts. */
function parts(figure, label, press, rows) {
  const box = make("div", { class: "plot", tabindex: 0, role: "application", "aria-label": label });
  const readout = make("p", { class: "readout", "aria-live": "polite" });
  const wide = make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "The data as a table" });
  const details = make("details", {}, make("summary", {}, "The data as a table"), wide);
  const fill = () => {
    if (!details.open) return;
    const [head, ...body] = rows(), table = make("table");
    table.append(make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text))));
    for (const row of body) table.append(make("tr", {}, ...row.map((text) => make("td", {}, text))));
    wide.replaceChildren(table);
  };
  details.addEventListener("toggle", fill);
  box.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.altKey && !event.metaKey && press(event.key)) event.preventDefault();
  });
  figure.append(box, readout, details);
  return { box, readout, fill };
}
