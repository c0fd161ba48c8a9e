// Pointer and keys on a canvas.

function hit(panel, offsetX, offsetY) {
  const scale = panel.canvas.clientWidth / (state.end - state.start);
  const time = offsetX / scale + state.start + origin(panel), slack = 2 / scale;
  let best = null;
  for (const { item, y } of panel.items) {
    if (offsetY < y || offsetY > y + ROW || time < item.start - slack || time > item.end + slack) continue;
    const off = Math.max(item.start - time, time - item.end, 0);
    if (!best || off < best.off) best = { item, off };
  }
  return best?.item ?? null;
}

function listen(panel) {
  const canvas = panel.canvas;
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = { x: event.clientX, start: state.start, end: state.end, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const shift = event.clientX - drag.x;
      drag.moved ||= Math.abs(shift) > 3;
      if (drag.moved) {
        byId("tip").hidden = true;
        canvas.classList.add("moving");
        const time = (shift / canvas.clientWidth) * (drag.end - drag.start);
        view(drag.start - time, drag.end - time);
      }
      return;
    }
    const item = hit(panel, event.offsetX, event.offsetY);
    canvas.classList.toggle("over", item !== null);
    if (item) showTip(panel, item, event.clientX, event.clientY);
    else byId("tip").hidden = true;
    if (item !== (state.hovered?.item ?? null)) {
      state.hovered = item && { panel, item };
      drawAll();
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) {
      const item = hit(panel, event.offsetX, event.offsetY);
      keep(item && panel, item);
    }
    drag = null;
    canvas.classList.remove("moving");
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => {
    byId("tip").hidden = true;
    state.hovered = null;
    drawAll();
  });
  canvas.addEventListener("wheel", (event) => {
    const wide = state.end - state.start;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(1.0015 ** event.deltaY, state.start + (event.offsetX / canvas.clientWidth) * wide);
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      move((event.deltaX || event.deltaY) / canvas.clientWidth);
    }
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => {
    const item = hit(panel, event.offsetX, event.offsetY);
    if (!item) return fit();
    const wide = item.end - item.start, start = item.start - origin(panel);
    view(start - wide, start + 2 * wide);
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (press(panel, event.key, event.shiftKey)) event.preventDefault();
  });
}

function press(panel, key, shift) {
  if (key === "+" || key === "=") zoom(0.7);
  else if (key === "-" || key === "_") zoom(1 / 0.7);
  else if (key === "0") fit();
  else if (key === "Escape") keep(null, null);
  else if (shift && key === "ArrowLeft") move(-0.15);
  else if (shift && key === "ArrowRight") move(0.15);
  else if (key === "ArrowLeft" || key === "ArrowRight") along(panel, key === "ArrowLeft" ? -1 : 1);
  else if (key === "ArrowUp" || key === "ArrowDown") across(panel, key === "ArrowUp" ? -1 : 1);
  else return false;
  return true;
}

// The next operation of the row, or the first one in view.
function along(panel, by) {
  const now = panel.items.find((i) => i.item === state.kept?.item);
  if (!now) return step(panel, panel.items.find((i) => i.item.start - origin(panel) >= state.start));
  const row = panel.items.filter((i) => i.y === now.y);
  step(panel, row[row.indexOf(now) + by]);
}

// The operation of the row above or below that is nearest in time.
function across(panel, by) {
  const now = panel.items.find((i) => i.item === state.kept?.item);
  if (!now) return along(panel, 1);
  const rows = [...new Set(panel.items.map((i) => i.y))];
  const y = rows[rows.indexOf(now.y) + by];
  const near = panel.items.filter((i) => i.y === y);
  near.sort((a, b) => Math.abs(a.item.start - now.item.start) - Math.abs(b.item.start - now.item.start));
  step(panel, near[0]);
}

function step(panel, to) {
  if (!to) return;
  keep(panel, to.item);
  const start = to.item.start - origin(panel), end = to.item.end - origin(panel), wide = state.end - state.start;
  if (start < state.start) view(start - 0.1 * wide, start + 0.9 * wide);
  else if (end > state.end) view(end - 0.9 * wide, end + 0.1 * wide);
}
