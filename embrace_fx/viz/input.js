// Pointer and keys on a panel; what is said of an item, in the tip under the pointer and of the one that is kept.

// The lines of an item as a list; the tip leaves out what it needs and is needed by, which may be long.
function described(item, isTip) {
  const [head, ...lines] = item.about.split("\n"), list = element("dl", { className: "facts" });
  for (const line of lines.filter((each) => !isTip || !each.startsWith("needs: ") && !each.startsWith("needed by: "))) {
    const [term, text] = [line.slice(0, line.indexOf(": ")), line.slice(line.indexOf(": ") + 2)];
    list.append(element("dt", {}, term), element("dd", {}, text));
  }
  return [element("strong", {}, head), list];
}

function showTip(item, clientX, clientY) {
  const tip = byId("tip");
  tip.replaceChildren(...described(item, true));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${clamp(clientX + 16, 4, Math.max(innerWidth - box.width - 8, 4))}px`;
  tip.style.top = `${clientY + 20 + box.height > innerHeight ? Math.max(clientY - box.height - 14, 4) : clientY + 20}px`;
}

function hover(item) {
  if (item === state.hovered) return;
  state.hovered = item;
  mark();
}

function keep(item) {
  state.kept = item;
  state.hovered = null;
  byId("detail").replaceChildren(...(item ? described(item, false) : []));
  mark();
}

// The item under the pointer or kept: framed wherever else it ran, with what it depends on where it is.
function mark() {
  for (const node of document.querySelectorAll(".marked")) node.classList.remove("marked");
  for (const curve of document.querySelectorAll(".dependence")) curve.remove();
  const one = state.hovered ?? state.kept;
  if (!one) return;
  const step = one.window - one.panel.first;
  for (const panel of visiblePanels()) {
    for (const each of panel.items) {
      if (each.name === one.name && each.window - panel.first === step) each.node.classList.add("marked");
    }
  }
  const edge = (item, side) => Number(item.rects[0].getAttribute("x")) + (side ? Number(item.rects[0].getAttribute("width")) : 0);
  for (const [from, to] of neighbours(one)) {
    const x1 = edge(from, 1), y1 = from.y + data.row / 2, x2 = edge(to, 0), y2 = to.y + data.row / 2, bend = Math.max(Math.abs(x2 - x1) / 2, 12);
    one.strip.append(drawn("path", { d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`, class: "dependence" }));
  }
}

// Pairs (before, after) of items in view on the same rank, for the dependences that an item is part of.
function neighbours(one) {
  const pieces = (name, window) => one.panel.items.filter((i) => i.name === name && i.window === window && i.strip === one.strip && !i.isOut);
  const found = [];
  for (const { before, after, distance } of data.dependences) {
    if (after === one.name) found.push([pieces(before, one.window - distance).at(-1), pieces(after, one.window)[0]]);
    if (before === one.name) found.push([pieces(before, one.window).at(-1), pieces(after, one.window + distance)[0]]);
  }
  return found.filter(([before, after]) => before && after);
}

// --------------------------------------------------------------------------------------------- pointer and keys

function listen(panel) {
  const section = panel.section;
  let drag = null;
  const under = (event) => itemOf.get(event.target.closest("g.item")) ?? null;
  section.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = { x: event.clientX, start: state.start, end: state.end, moved: false, item: under(event) };
  });
  section.addEventListener("pointermove", (event) => {
    if (drag) {
      const shift = event.clientX - drag.x;
      if (!drag.moved && Math.abs(shift) > 3) section.setPointerCapture(event.pointerId);
      drag.moved ||= Math.abs(shift) > 3;
      if (!drag.moved) return;
      byId("tip").hidden = true;
      section.classList.add("moving");
      const time = (shift / room(panel)) * (drag.end - drag.start);
      view(drag.start - time, drag.end - time);
      return;
    }
    const item = under(event);
    if (item) showTip(item, event.clientX, event.clientY);
    else byId("tip").hidden = true;
    hover(item);
  });
  section.addEventListener("pointerup", () => {
    if (drag && !drag.moved) keep(drag.item);
    drag = null;
    section.classList.remove("moving");
  });
  section.addEventListener("pointercancel", () => { drag = null; });
  section.addEventListener("pointerleave", () => {
    byId("tip").hidden = true;
    hover(null);
  });
  section.addEventListener("wheel", (event) => {
    const wide = state.end - state.start, at = event.clientX - section.getBoundingClientRect().left - data.left;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(1.0015 ** event.deltaY, state.start + (at / room(panel)) * wide);
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      move((event.deltaX || event.deltaY) / room(panel));
    }
  }, { passive: false });
  section.addEventListener("dblclick", (event) => {
    const item = under(event);
    if (!item) return fit();
    const wide = item.end - item.start, start = item.start - origin(panel);
    view(start - wide, start + 2 * wide);
  });
  section.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (press(panel, event.key, event.shiftKey)) event.preventDefault();
  });
}

function press(panel, key, shift) {
  if (key === "+" || key === "=") zoom(0.7);
  else if (key === "-" || key === "_") zoom(1 / 0.7);
  else if (key === "0") fit();
  else if (key === "Escape") keep(null);
  else if (shift && key === "ArrowLeft") move(-0.15);
  else if (shift && key === "ArrowRight") move(0.15);
  else if (key === "ArrowLeft" || key === "ArrowRight") along(panel, key === "ArrowLeft" ? -1 : 1);
  else if (key === "ArrowUp" || key === "ArrowDown") across(panel, key === "ArrowUp" ? -1 : 1);
  else return false;
  return true;
}

// Rows from top to bottom, each its items in order of time; a wait stands in the row of what computes.
function rows(panel) {
  const found = new Map();
  for (const item of visibleItems(panel)) {
    const row = `${item.strip.dataset.rank} ${item.y}`;
    if (!found.has(row)) found.set(row, []);
    found.get(row).push(item);
  }
  for (const row of found.values()) row.sort((a, b) => a.start - b.start);
  return [...found.values()].sort((a, b) => panel.strips.indexOf(a[0].strip) - panel.strips.indexOf(b[0].strip) || a[0].y - b[0].y);
}

// The next item of the row, or the first one in view.
function along(panel, by) {
  const all = rows(panel), row = all.find((r) => r.includes(state.kept));
  step(row ? row[row.indexOf(state.kept) + by] : all[0].find((item) => item.start - origin(panel) >= state.start));
}

// The item of the row above or below that is nearest in time.
function across(panel, by) {
  const all = rows(panel), row = all.findIndex((r) => r.includes(state.kept));
  if (row < 0) return along(panel, 1);
  const near = [...(all[row + by] ?? [])].sort((a, b) => Math.abs(a.start - state.kept.start) - Math.abs(b.start - state.kept.start));
  step(near[0]);
}

function step(to) {
  if (!to) return;
  keep(to);
  const start = to.start - origin(to.panel), end = to.end - origin(to.panel), wide = state.end - state.start;
  if (start < state.start) view(start - 0.1 * wide, start + 0.9 * wide);
  else if (end > state.end) view(end - 0.9 * wide, end + 0.1 * wide);
}
