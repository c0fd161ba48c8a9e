// What a panel shows, on its canvas.

function hatch(context, lane, ratio) {
  const size = Math.round(7 * ratio);
  const tile = element("canvas", { width: size, height: size });
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour(`fill-${lane}`);
  pen.lineWidth = 2.2 * ratio;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift - 2, size + 2);
    pen.lineTo(shift + size + 2, -2);
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

function ticks(start, end, most) {
  const rough = (end - start) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(start / step); k * step <= end; k++) found.push(k * step);
  return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function draw(panel) {
  const canvas = panel.canvas, ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = panel.height;
  canvas.style.height = panel.labels.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  const scale = width / (state.end - state.start), zero = origin(panel);
  const x = (time) => (time - zero - state.start) * scale;
  const look = { pen, x, width, height, ratio, theme: theme() };
  drawStrips(panel, look);
  drawAxis(panel, look);
  drawItems(panel, look);
  if (state.critical) drawCritical(panel, look);
  drawMarks(panel, look);
}

let cachedTheme = null;
function theme() {
  if (cachedTheme) return cachedTheme;
  const names = ["page", "strip", "line", "faint", "text", "critical"];
  const paints = Object.keys(data.paints);
  cachedTheme = Object.fromEntries(
    [...names, ...paints.map((p) => `fill-${p}`), ...paints.map((p) => `ink-${p}`)].map((n) => [n, colour(n)]),
  );
  return cachedTheme;
}

// Lanes' grounds, and per rank where a window and each of its phases begins.
function drawStrips(panel, { pen, x, width, theme }) {
  pen.fillStyle = theme.strip;
  for (const place of panel.places.values()) {
    for (let k = 0; k < place.count; k++) pen.fillRect(0, place.top + k * (ROW + GAP), width, ROW);
  }
  for (const [number, strip] of panel.strips.entries()) {
    for (const phase of panel.phases.filter((p) => p.rank === strip.rank)) {
      const left = x(phase.start), right = x(phase.end);
      if (right < 0 || left > width) continue;
      const isBoundary = phase.name === "backward";
      pen.strokeStyle = isBoundary ? theme.text : theme.faint;
      pen.lineWidth = isBoundary ? 1.5 : 1;
      pen.setLineDash(isBoundary ? [] : [3, 3]);
      pen.beginPath();
      pen.moveTo(left, number === 0 ? 3 : strip.top - 4);
      pen.lineTo(left, strip.bottom + 3);
      pen.stroke();
      pen.setLineDash([]);
      if (number > 0) continue;
      const from = Math.max(left, 0);
      pen.fillStyle = theme.text;
      if (pen.measureText(phase.label).width < Math.min(right, width) - from - 8) pen.fillText(phase.label, from + 5, HEAD / 2 - 1);
    }
  }
}

function drawAxis(panel, { pen, x, width, height, theme }) {
  const base = height - AXIS + 5, zero = origin(panel);
  const { found, digits } = ticks(state.start, state.end, width / 90);
  pen.strokeStyle = theme.faint;
  pen.fillStyle = theme.faint;
  pen.lineWidth = 1;
  pen.textAlign = "center";
  for (const tick of found) {
    const at = x(tick + zero);
    pen.beginPath();
    pen.moveTo(at, base);
    pen.lineTo(at, base + 4);
    pen.stroke();
    const text = `${tick.toFixed(digits)} ms`;
    pen.fillText(text, clamp(at, pen.measureText(text).width / 2, width - pen.measureText(text).width / 2), base + 12);
  }
  pen.textAlign = "left";
}

function drawItems(panel, { pen, x, width, ratio, theme }) {
  const hatches = {};
  for (const { item, operation, y } of panel.items) {
    const left = x(item.start), right = x(item.end);
    if (right < 0 || left > width) continue;
    const wide = Math.max(right - left, 1);
    if (isGap(item)) {
      pen.strokeStyle = theme.line;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(left, y + ROW / 2);
      pen.lineTo(left + wide, y + ROW / 2);
      pen.stroke();
      continue;
    }
    if (isWait(item)) {
      hatches[item.lane] ??= hatch(pen, item.lane, ratio);
      pen.fillStyle = theme.page;
      pen.fillRect(left, y, wide, ROW);
      pen.fillStyle = hatches[item.lane];
      pen.fillRect(left, y, wide, ROW);
      pen.strokeStyle = theme[`fill-${item.lane}`];
      pen.lineWidth = 1;
      if (wide > 2) pen.strokeRect(left + 0.5, y + 0.5, wide - 1, ROW - 1);
      continue;
    }
    pen.fillStyle = theme[`fill-${operation.paint}`];
    pen.fillRect(left, y, Math.max(wide - (wide > 3 ? 0.75 : 0), 1), ROW);
    const from = Math.max(left, 0), room = Math.min(right, width) - from - 7;
    const text = operation.labels.find((l) => pen.measureText(l).width <= room);
    if (!text) continue;
    pen.fillStyle = theme[`ink-${operation.paint}`];
    pen.fillText(text, from + 4, y + ROW / 2 + 0.5);
  }
}

// Each operation of the path is framed; a line leads from its end to the start of the next.
function drawCritical(panel, { pen, x, theme }) {
  const onPath = new Map(panel.items.filter((i) => !isWait(i.item)).map((i) => [i.index, i]));
  const path = panel.critical.map((index) => onPath.get(index)).filter(Boolean);
  pen.strokeStyle = pen.fillStyle = theme.critical;
  pen.lineWidth = 2;
  pen.lineJoin = "round";
  for (const [k, { item, y }] of path.entries()) {
    const left = x(item.start), right = x(item.end);
    pen.lineWidth = right - left > 6 ? 2 : 1; // what is framed stays to be seen
    pen.strokeRect(left + 1, y + 1, Math.max(right - left - 2.5, 0.5), ROW - 2);
    pen.lineWidth = 2;
    const next = path[k + 1];
    if (!next || next.y === y) continue;
    arrow(pen, right, y + ROW / 2, x(next.item.start), next.y + (next.y > y ? 0 : ROW));
  }
}

// Straight up or down where it can be, with a head at its end.
function arrow(pen, x1, y1, x2, y2) {
  const down = Math.sign(y2 - y1);
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, x2 - x1 > 6 ? y1 : y1 + down * 6);
  pen.lineTo(x2, y2 - down * 5);
  pen.stroke();
  pen.beginPath();
  pen.moveTo(x2, y2);
  pen.lineTo(x2 - 4, y2 - down * 7);
  pen.lineTo(x2 + 4, y2 - down * 7);
  pen.fill();
}

// The operation under the pointer or kept: framed wherever else it ran, with what it depends on where it is.
function drawMarks(panel, { pen, x, theme }) {
  const mark = state.hovered ?? state.kept;
  if (!mark) return;
  const name = keyOf(mark.panel, mark.item), step = mark.item.window - mark.panel.first;
  pen.lineWidth = 2.5;
  for (const { item, y } of panel.items) {
    if (keyOf(panel, item) !== name || item.window - panel.first !== step) continue;
    const left = x(item.start), wide = Math.max(x(item.end) - left, 2);
    pen.strokeStyle = theme.page;
    pen.strokeRect(left - 0.5, y - 0.5, wide + 1, ROW + 1);
    pen.strokeStyle = theme.text;
    pen.strokeRect(left - 2.5, y - 2.5, wide + 5, ROW + 5);
  }
  if (mark.panel !== panel || isWait(mark.item)) return;
  pen.lineWidth = 1.5;
  pen.strokeStyle = theme.text;
  pen.setLineDash([4, 3]);
  for (const [from, to] of neighbours(panel, mark.item)) {
    const x1 = x(from.item.end), y1 = from.y + ROW / 2, x2 = x(to.item.start), y2 = to.y + ROW / 2;
    const bend = Math.max(Math.abs(x2 - x1) / 2, 12);
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
    pen.stroke();
  }
  pen.setLineDash([]);
}

// Pairs (before, after) of drawn items on the same rank, for the dependences that `span` is part of.
function neighbours(panel, span) {
  const name = panel.operations[span.op].name;
  const pieces = (other, window) =>
    panel.items.filter((i) => i.operation?.name === other && i.item.window === window && i.item.rank === span.rank);
  const found = [];
  for (const { before, after, distance } of data.dependences) {
    if (after === name) found.push([pieces(before, span.window - distance).at(-1), pieces(name, span.window)[0]]);
    if (before === name) found.push([pieces(name, span.window).at(-1), pieces(after, span.window + distance)[0]]);
  }
  return found.filter(([before, after]) => before && after);
}
