// What is said of an operation or a wait: in the tip under the pointer, and of the one that is kept.

// [term, text] pairs on an operation or a wait.
function facts(panel, item) {
  if (isGap(item)) {
    return [
      ["nothing runs", "of the schedule: Python and autograd"],
      [panel.status, `${ms(item.end - item.start)}, starts at ${ms(item.start - origin(panel))}`],
    ];
  }
  if (isWait(item)) {
    return [
      ["waits for", item.launch],
      ["class", item.lane],
      [panel.status, `${ms(item.end - item.start)}, starts at ${ms(item.start - origin(panel))}`],
    ];
  }
  const operation = panel.operations[item.op];
  const found = [["kind", `${operation.kind.replace("_", "-")}, on lane ${operation.lane}`]];
  if (operation.serves.length) found.push(["serves", operation.serves.join(", ")]);
  if (operation.lane !== "compute") found.push(["sends", `${bytes(operation.sent_bytes)} per rank`]);
  if (operation.held_bytes) found.push(["holds", bytes(operation.held_bytes)]);
  const place = data.launchOrder.indexOf(operation.name);
  if (place >= 0) found.push(["launch", `${place + 1} of ${data.launchOrder.length}`]);
  found.push(["alone", ms(operation.duration_ms)]);
  const times = {};
  for (const other of data.panels) {
    const window = item.window - panel.first + other.first;
    const same = other.spans.filter((s) => other.operations[s.op].name === operation.name && s.window === window);
    const rank = same.some((s) => s.rank === item.rank) ? item.rank : other.ranks[0];
    const pieces = same.filter((s) => s.rank === rank);
    if (!pieces.length) continue;
    times[other.status] = lasts(pieces);
    const where = other.ranks.length > 1 ? ` on rank ${rank}` : "";
    const often = pieces.length > 1 ? ` in ${pieces.length} pieces` : "";
    const start = Math.min(...pieces.map((s) => s.start)) - origin(other);
    found.push([other.status, `${ms(times[other.status])}${where}${often}, starts at ${ms(start)}`]);
  }
  if (times.predicted && times.measured) found.push(["ratio", `${(times.measured / times.predicted).toFixed(2)} measured / predicted`]);
  if (panel.onCritical.has(panel.spans.indexOf(item))) found.push(["critical", "on the critical path"]);
  return found;
}

function described(panel, item, more = []) {
  const { window } = item;
  const name = isGap(item) ? "Between operations" : isWait(item) ? "Wait" : panel.operations[item.op].name;
  const list = element("dl", { className: "facts" });
  for (const [term, text] of [...facts(panel, item), ...more]) {
    list.append(element("dt", {}, term), element("dd", {}, text));
  }
  const where = `${panel.status}, rank ${item.rank}, window ${window ? `t${window > 0 ? "+" : ""}${window}` : "t"}`;
  return [element("strong", {}, name), ` (${where})`, list];
}

function showTip(panel, item, clientX, clientY) {
  const tip = byId("tip");
  tip.replaceChildren(...described(panel, item));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${clamp(clientX + 16, 4, Math.max(innerWidth - box.width - 8, 4))}px`;
  tip.style.top = `${clientY + 20 + box.height > innerHeight ? Math.max(clientY - box.height - 14, 4) : clientY + 20}px`;
}

function keep(panel, item) {
  state.kept = panel ? { panel, item } : null;
  state.hovered = null;
  const more = [];
  if (panel && !isWait(item)) {
    const name = panel.operations[item.op].name;
    const said = (d, other) => (d.distance ? `${other} (next window)` : other);
    const before = data.dependences.filter((d) => d.after === name).map((d) => (d.distance ? `${d.before} (window before)` : d.before));
    const after = data.dependences.filter((d) => d.before === name).map((d) => said(d, d.after));
    if (before.length) more.push(["needs", before.join(", ")]);
    if (after.length) more.push(["needed by", after.join(", ")]);
  }
  byId("detail").replaceChildren(...(panel ? described(panel, item, more) : []));
  drawAll();
}
