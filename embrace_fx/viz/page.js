"use strict";
// The strips of a picture are drawn; here they are placed in time. Times are milliseconds; a panel's origin is the
// start of the first of its windows that are compared, so that a prediction and a measurement stand in line.

const data = JSON.parse(document.getElementById("data").textContent);
const MANY_RANKS = 8;
const root = document.documentElement;
const byId = (id) => document.getElementById(id);

const state = {
  shown: data.panels.length > 1 ? "both" : data.panels[0].status,
  rank: data.panels.some((p) => p.ranks.length > MANY_RANKS) ? String(data.panels.at(-1).ranks[0]) : "all",
  start: 0,
  end: 1,
  kept: null, // an item that was clicked
  hovered: null,
};

// --------------------------------------------------------------------------------------------- small tools

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function drawn(tag, attributes, text = "") {
  const made = document.createElementNS(byId("definitions").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

const ms = (time) => `${time.toFixed(Math.abs(time) < 10 ? 3 : 2)} ms`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

const hatched = (lane) =>
  `repeating-linear-gradient(135deg, var(--fill-${lane}) 0 2.5px, transparent 2.5px 6px) var(--page)`;

// A class's swatch is its fill, hatched for waits.
function swatch(paint, wait = false) {
  const style = wait
    ? { background: hatched(paint), border: `1px solid var(--fill-${paint})` }
    : { background: `var(--fill-${paint})` };
  return element("span", { className: "swatch", style, ariaHidden: "true" });
}

// --------------------------------------------------------------------------------------------- panels

// What carries times, as {node, start, end, ...}: items, which are pointed at, and lines and words beside them.
function timed(panel, strip, node) {
  const { s, e, of, w, l, y } = node.dataset;
  return {
    panel, strip, node, start: Number(s), end: Number(e), name: of, window: Number(w), names: l?.split("\n"),
    about: node.querySelector("title")?.textContent, rects: node.querySelectorAll("rect"),
    text: node.tagName === "text" ? node : node.querySelector("text"), isLine: node.tagName === "line", isOut: false, y: Number(y),
  };
}

const itemOf = new WeakMap();
for (const panel of data.panels) {
  panel.first = panel.windows.at(-2)?.number ?? panel.windows[0].number;
  panel.section = byId(panel.status);
  panel.strips = [...panel.section.querySelectorAll(".strip-of")];
  panel.timed = panel.strips.flatMap((strip) => [...strip.querySelectorAll("[data-s]")].map((node) => timed(panel, strip, node)));
  panel.items = panel.timed.filter(({ node }) => node.classList.contains("item"));
  for (const item of panel.items) {
    itemOf.set(item.node, item);
    item.node.querySelector("title").remove(); // told in the page's own tip
  }
}

const visiblePanels = () => data.panels.filter((p) => state.shown === "both" || p.status === state.shown);
const visibleItems = (panel) => panel.items.filter((item) => item.strip.style.display !== "none");
const origin = (panel) => panel.windows.find((w) => w.number === panel.first).start;
const room = (panel) => Math.max(panel.section.clientWidth - data.left - data.right, 40);

// Every panel shows its ranks, or the one that was chosen where it has it.
function rearrange() {
  for (const panel of data.panels) {
    panel.section.hidden = !visiblePanels().includes(panel);
    const chosen = panel.ranks.some((rank) => String(rank) === state.rank) ? state.rank : String(panel.ranks[0]);
    for (const strip of panel.strips) strip.style.display = state.rank === "all" || strip.dataset.rank === chosen ? "" : "none";
  }
}

function place(panel) {
  const wide = room(panel), scale = wide / (state.end - state.start), zero = origin(panel), last = data.left + wide;
  const x = (time) => clamp(data.left + (time - zero - state.start) * scale, data.left, last);
  for (const ground of panel.section.querySelectorAll("rect.strip")) ground.setAttribute("width", wide);
  for (const line of panel.section.querySelectorAll("[data-t]")) {
    const heights = line.getAttribute("points").split(" ").map((point) => point.split(",")[1]);
    line.setAttribute("points", line.dataset.t.split(" ").map((time, k) => `${x(time).toFixed(1)},${heights[k]}`).join(" "));
  }
  for (const each of panel.timed) {
    if (each.strip.style.display === "none") continue;
    const left = x(each.start), right = x(each.end), isOut = each.end < state.start + zero || each.start > state.end + zero;
    if (isOut !== each.isOut) each.node.style.display = isOut ? "none" : "";
    each.isOut = isOut;
    if (isOut) continue;
    if (each.isLine) {
      each.node.setAttribute("x1", left);
      each.node.setAttribute("x2", right);
    }
    for (const rect of each.rects) {
      rect.setAttribute("x", left);
      rect.setAttribute("width", Math.max(right - left - 0.5, 0.5));
    }
    if (each.text) {
      each.text.setAttribute("x", left + 3);
      each.text.textContent = each.names.find((name) => name.length * data.character <= right - left - 4) ?? "";
    }
  }
  drawTicks(panel, x);
}

function drawTicks(panel, x) {
  const rough = (state.end - state.start) / (room(panel) / 70), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), made = [drawn("text", { x: data.left - 18, y: 16, class: "lane" }, "ms")];
  for (let k = Math.ceil(state.start / step); k * step <= state.end; k++) {
    const at = x(k * step + origin(panel));
    made.push(drawn("line", { x1: at, x2: at, y1: 2, y2: 6, class: "axis" }), drawn("text", { x: at, y: 16, class: "tick" }, (k * step).toFixed(digits)));
  }
  panel.section.querySelector(".ticks").replaceChildren(...made);
}

// --------------------------------------------------------------------------------------------- time

function ends(panel, isCounted) {
  const counted = visibleItems(panel).filter(isCounted), zero = origin(panel);
  return [Math.min(...counted.map((i) => i.start - zero)), Math.max(...counted.map((i) => i.end - zero))];
}

function limits(isCounted = () => () => true) {
  const all = visiblePanels().map((panel) => ends(panel, isCounted(panel)));
  return [Math.min(...all.map(([low]) => low)), Math.max(...all.map(([, high]) => high))];
}

function fit() {
  const [low, high] = limits((panel) => (item) => item.window === panel.first || item.window === panel.first + 1);
  const slack = 0.01 * (high - low);
  view(low - slack, high + slack);
}

function view(start, end) {
  const [low, high] = limits();
  const slack = 0.02 * (high - low);
  const wide = clamp(end - start, 0.002, high - low + 2 * slack);
  state.start = clamp(start + (end - start - wide) / 2, low - slack, high + slack - wide);
  state.end = state.start + wide;
  drawAll();
}

function zoom(factor, at = (state.start + state.end) / 2) {
  view(at - (at - state.start) * factor, at + (state.end - at) * factor);
}

const move = (share) => view(state.start + share * (state.end - state.start), state.end + share * (state.end - state.start));

let waiting = false;
function drawAll() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const panel of visiblePanels()) place(panel);
    mark();
  });
}
