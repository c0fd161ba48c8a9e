// What stands around the panels: where tables lie, steps on other numbers of ranks, the words that are used.

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const cell = (text, number = false) => element("td", { className: number ? "number" : "" }, text);
const heads = (names) => element("thead", {}, element("tr", {}, ...names.map(([name, number]) => element("th", { scope: "col", className: number ? "number" : "" }, name))));

// A table as a strip of its ranks' parts, and its shares of memory and of what is sent.
function fillTables(tables) {
  const body = element("tbody");
  for (const table of tables) {
    const parts = element("div", { className: "parts" });
    const shown = table.parts.slice(0, 16);
    for (const [rank, part] of shown.entries()) {
      const said = table.parts.length === 1 ? `every rank: ${part}` : `rank ${rank}: ${part}`;
      parts.append(element("span", { title: said }, table.parts.length === 1 ? said : `${rank}`));
    }
    if (table.parts.length > shown.length) parts.append(element("span", {}, `+${table.parts.length - shown.length}`));
    const said = [...new Set(table.parts)].length === 1 ? "" : `rank 0: ${table.parts[0]}`;
    body.append(
      element("tr", {}, element("th", { scope: "row" }, table.name), cell(table.shape.join(" x "), true), cell(table.strategy),
        element("td", {}, parts), cell(said), cell(percent(table.memory_share), true), cell(percent(table.sent_share), true)),
    );
  }
  const names = [["table"], ["shape", 1], ["strategy"], ["held by ranks"], [""], ["of all parameters", 1], ["of what is sent", 1]];
  byId("tables").append(heads(names), body);
}

// Steps of the same plan on other numbers of ranks, estimated, beside DDP's: both with the compute that is predicted.
function fillRanks(steps) {
  const compute = data.panels[0].figures.find((f) => f.label === "compute").value;
  const longest = Math.max(...steps.flatMap((s) => [s.step_ms, compute + s.ddp_exposed_ms]));
  for (const step of steps) {
    const both = [["embrace_fx", step.step_ms, "embedding"], ["DDP", compute + step.ddp_exposed_ms, "dense"]];
    for (const [name, time, paint] of both) {
      const part = element("div", { className: "part", style: { width: `${(100 * time) / longest}%`, background: `var(--fill-${paint})` } });
      const row = element("div", { className: "bar" }, element("span", {}, `${step.ranks} ranks, ${name}`), element("div", { className: "track thin" }, part), element("span", { className: "total" }, ms(time)));
      byId("ranks").append(row);
    }
  }
}

function fillBackground() {
  const around = data.background;
  byId("around-tables").hidden = !around?.tables.length;
  byId("around-ranks").hidden = !around?.steps.length;
  if (around?.tables.length) fillTables(around.tables);
  if (around?.steps.length) fillRanks(around.steps);
}

function fillGlossary() {
  for (const [term, meaning] of Object.entries(data.glossary)) byId("words").append(element("dt", {}, term), element("dd", {}, meaning));
}
