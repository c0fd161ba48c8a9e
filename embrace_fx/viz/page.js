"use strict";
// Draws the panels of a picture on one canvas each, over a common time axis. Times are milliseconds; a panel's origin
// is the start of the first of its windows that are compared, so that a prediction and a measurement stand in line.

const data = JSON.parse(document.getElementById("data").textContent);
const ROW = 18, GAP = 3, RANK_GAP = 12, HEAD = 22, AXIS = 24, MANY_RANKS = 8;
const root = document.documentElement;
const byId = (id) => document.getElementById(id);

const state = {
  shown: data.panels.length > 1 ? "both" : data.panels[0].status,
  rank: data.panels.some((p) => p.ranks.length > MANY_RANKS) ? String(data.panels.at(-1).ranks[0]) : "all",
  critical: true,
  start: 0,
  end: 1,
  kept: null, // {panel, item}: an operation or a wait that was clicked
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

const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
const ms = (time) => `${time.toFixed(Math.abs(time) < 10 ? 3 : 2)} ms`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const isWait = (item) => "launch" in item;
const isGap = (item) => item.launch === "";
const keyOf = (panel, item) => (isGap(item) ? `gap ${item.start}` : isWait(item) ? `wait ${item.launch}` : panel.operations[item.op].name);

function bytes(count) {
  if (count === 0) return "0 B";
  const unit = Math.min(Math.floor(Math.log2(count) / 10), 3);
  return `${(count / 2 ** (10 * unit)).toFixed(unit ? 2 : 0)} ${["B", "KiB", "MiB", "GiB"][unit]}`;
}

const hatched = (lane) =>
  `repeating-linear-gradient(135deg, var(--fill-${lane}) 0 2.5px, transparent 2.5px 6px) var(--page)`;

// A class's swatch is its fill, hatched for waits.
function swatch(paint, wait = false) {
  const style = wait
    ? { background: hatched(paint), border: `1px solid var(--fill-${paint})` }
    : { background: `var(--fill-${paint})` };
  return element("span", { className: "swatch", style, ariaHidden: "true" });
}

// Compute may be cut into pieces, by waits: an operation lasts as long as all of them.
const lasts = (pieces) => pieces.reduce((sum, s) => sum + s.end - s.start, 0);

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// --------------------------------------------------------------------------------------------- panels

for (const panel of data.panels) {
  panel.first = panel.windows.at(-2)?.number ?? panel.windows[0].number;
  panel.onCritical = new Set(panel.critical);
  panel.canvas = element("canvas", { tabIndex: 0 });
  panel.canvas.setAttribute("role", "application");
  panel.canvas.setAttribute("aria-roledescription", "timeline");
  panel.canvas.setAttribute("aria-label", `${panel.status} timeline`);
  panel.canvas.setAttribute("aria-describedby", "hint");
  panel.labels = element("div", { className: "labels" });
  const title = panel.status[0].toUpperCase() + panel.status.slice(1);
  panel.section = element(
    "section",
    { className: "panel", id: panel.status },
    element("h2", {}, title),
    element("div", { className: "chart" }, panel.labels, panel.canvas),
  );
  byId("panels").append(panel.section);
}

const visiblePanels = () => data.panels.filter((p) => state.shown === "both" || p.status === state.shown);
const origin = (panel) => panel.windows.find((w) => w.number === panel.first).start;

// Every panel shows its ranks, or the one that was chosen where it has it.
function shownRanks(panel) {
  const chosen = panel.ranks.filter((rank) => state.rank === "all" || String(rank) === state.rank);
  return chosen.length ? chosen : panel.ranks.slice(0, 1);
}

// Where each rank's lanes stand: a list of {rank, lane, top, count}, and the height of all.
function arrange(panel) {
  let top = HEAD;
  panel.strips = [];
  panel.places = new Map();
  for (const rank of shownRanks(panel)) {
    const strip = { rank, top };
    for (const row of panel.rows.filter((r) => r.rank === rank)) {
      panel.places.set(`${rank} ${row.lane}`, { ...row, top });
      top += row.count * (ROW + GAP);
    }
    strip.bottom = top - GAP;
    panel.strips.push(strip);
    top += RANK_GAP;
  }
  panel.height = top - RANK_GAP + AXIS;
  const labels = [];
  for (const strip of panel.strips) {
    labels.push(element("div", { className: "rank", style: { top: `${strip.top}px`, height: `${ROW}px` } }, `rank ${strip.rank}`));
  }
  for (const place of panel.places.values()) {
    const paint = place.lane === "compute" ? "backward" : place.lane;
    const box = { top: `${place.top}px`, height: `${ROW}px` };
    labels.push(element("div", { className: "lane", style: box }, place.lane, swatch(paint)));
  }
  panel.labels.replaceChildren(...labels);
  panel.items = [];
  const ranks = new Set(shownRanks(panel));
  for (const [index, span] of panel.spans.entries()) {
    if (!ranks.has(span.rank)) continue;
    const operation = panel.operations[span.op];
    const place = panel.places.get(`${span.rank} ${operation.lane}`);
    panel.items.push({ item: span, index, operation, y: place.top + span.row * (ROW + GAP) });
  }
  for (const wait of panel.waits) {
    if (!ranks.has(wait.rank)) continue;
    const place = panel.places.get(`${wait.rank} compute`);
    if (place) panel.items.push({ item: wait, y: place.top });
  }
  for (const rank of ranks) panel.items.push(...gaps(panel, rank));
  panel.items.sort((a, b) => a.y - b.y || a.item.start - b.item.start);
}

// Time of a rank's processor in which nothing of the schedule runs, as items of its compute lane.
function gaps(panel, rank) {
  const place = panel.places.get(`${rank} compute`);
  if (!place) return [];
  const busy = panel.items.filter((i) => i.item.rank === rank && i.y >= place.top && i.y < place.top + place.count * (ROW + GAP));
  busy.sort((a, b) => a.item.start - b.item.start);
  const found = [];
  let end = busy.length ? busy[0].item.start : 0;
  for (const { item } of busy) {
    if (item.start - end > 0.001) found.push({ item: { launch: "", lane: "", window: item.window, rank, start: end, end: item.start }, y: place.top });
    end = Math.max(end, item.end);
  }
  return found;
}

// --------------------------------------------------------------------------------------------- time

function limits() {
  let low = Infinity, high = -Infinity;
  for (const panel of visiblePanels()) {
    const zero = origin(panel);
    for (const { item } of panel.items) {
      low = Math.min(low, item.start - zero);
      high = Math.max(high, item.end - zero);
    }
  }
  return [low, high];
}

function fit() {
  let low = 0, high = 0;
  for (const panel of visiblePanels()) {
    const zero = origin(panel);
    for (const { item } of panel.items) {
      if (item.window !== panel.first && item.window !== panel.first + 1) continue;
      low = Math.min(low, item.start - zero);
      high = Math.max(high, item.end - zero);
    }
  }
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
    for (const panel of visiblePanels()) draw(panel);
  });
}

function rearrange() {
  for (const panel of data.panels) panel.section.hidden = !visiblePanels().includes(panel);
  for (const panel of visiblePanels()) arrange(panel);
}
