// What surrounds the panels: the figures, the legend, the list of operations, the controls. Begins the page.

function fillFigures() {
  const columns = data.panels.map((p) => new Map(p.figures.map((f) => [f.label, f])));
  const both = columns.length > 1;
  const labels = [...new Set(data.panels.toReversed().flatMap((p) => p.figures.map((f) => f.label)))];
  const number = (text) => element("td", { className: "number" }, text);
  const head = element("tr", {}, element("th", { scope: "col" }, "per step"));
  for (const panel of data.panels) head.append(element("th", { scope: "col", className: "number" }, panel.status));
  if (both) head.append(element("th", { scope: "col", className: "number" }, "ratio"));
  const body = element("tbody");
  for (const label of labels) {
    const figures = columns.map((c) => c.get(label));
    const known = figures.find(Boolean);
    const name = element("th", { scope: "row" });
    const paint = known.paint ?? (known.lane === "compute" ? null : known.lane);
    name.append(...(paint ? [swatch(paint, known.is_wait)] : []), label);
    if (known.lane === "compute" && known.paint) name.className = "part-of";
    const row = element("tr", {}, name, ...figures.map((f) => number(f ? f.text : "")));
    if (both) row.append(number(data.ratios[label]));
    body.append(row);
  }
  byId("figures").append(element("thead", {}, head), body);
}

// Steps as bars on one scale: compute, what is exposed of each class, and the time in which no operation runs.
function fillBars() {
  const longest = Math.max(...data.bars.map((bar) => bar.total));
  for (const bar of data.bars) {
    const track = element("div", { className: "track" });
    track.setAttribute("role", "img");
    track.setAttribute("aria-label", bar.parts.map((f) => `${f.label} ${f.text}`).join(", "));
    for (const figure of bar.parts) {
      const said = `${figure.label} ${figure.text}`;
      const words = figure.is_wait ? [] : [figure.label, figure.text].map((text) => element("span", {}, text));
      const part = element("div", { className: "part", title: said }, ...words);
      part.style.width = `${(100 * figure.value) / longest}%`;
      if (figure.is_wait) {
        part.style.background = hatched(figure.lane);
        part.style.boxShadow = `inset 0 0 0 1px var(--fill-${figure.lane})`;
      } else if (figure.paint) {
        part.style.background = `var(--fill-${figure.paint})`;
        part.style.color = `var(--ink-${figure.paint})`;
      } else {
        part.classList.add("between");
      }
      if (figure.value > 0) track.append(part);
    }
    byId("bars").append(element("div", { className: "bar" }, element("span", {}, bar.name), track, element("span", { className: "total" }, ms(bar.total))));
  }
}

function fillLegend() {
  for (const [kind, paint, meaning] of data.legend) {
    const mark = kind === "gap" ? "between" : kind === "path" ? "critical" : null;
    const shown = mark ? element("span", { className: `swatch ${mark}` }) : swatch(paint, kind === "wait");
    byId("legend").append(element("li", {}, shown, meaning));
  }
}

// One window's operations: what the pictures show, for reading and for searching.
function fillOperations() {
  const heads = ["operation", "lane", "serves", "sends", "alone", ...data.panels.map((p) => p.status)];
  const body = element("tbody");
  for (const operation of data.operations) {
    const button = element("button", { type: "button" }, operation.name);
    const isIt = (item) => item.name === operation.name;
    button.addEventListener("click", () => {
      const from = visiblePanels().find((p) => visibleItems(p).some(isIt));
      if (from) step(visibleItems(from).find((i) => isIt(i) && i.window === from.first) ?? visibleItems(from).find(isIt));
    });
    const texts = [operation.lane, operation.serves.join(", "), operation.sends];
    const numbers = [operation.duration_ms, ...operation.times].map((time) => element("td", { className: "number" }, time === null ? "" : ms(time)));
    body.append(element("tr", {}, element("td", {}, button), ...texts.map((t) => element("td", {}, t)), ...numbers));
  }
  const head = element("tr", {}, ...heads.map((h, k) => element("th", { scope: "col", className: k > 3 ? "number" : "" }, h)));
  byId("operations").append(element("thead", {}, head), body);
}

function fillControls() {
  const choices = data.panels.length > 1 ? ["both", ...data.panels.map((p) => p.status)] : [];
  byId("shown").hidden = choices.length === 0;
  for (const choice of choices) {
    const radio = element("input", { type: "radio", name: "shown", value: choice, checked: choice === state.shown });
    radio.addEventListener("change", () => {
      state.shown = choice;
      rearrange();
      view(state.start, state.end);
    });
    byId("shown").append(element("label", {}, radio, choice[0].toUpperCase() + choice.slice(1)));
  }
  const ranks = [...new Set(data.panels.flatMap((p) => p.ranks))];
  byId("rank-choice").hidden = ranks.length < 2;
  byId("rank").append(...["all", ...ranks].map((r) => element("option", { value: r, selected: String(r) === state.rank }, r)));
  byId("rank").addEventListener("change", (event) => {
    state.rank = event.target.value;
    rearrange();
    drawAll();
  });
  const measured = data.panels.find((p) => p.status === "measured");
  const firsts = measured ? measured.windows.slice(0, -1).map((w) => w.number) : [];
  byId("window-choice").hidden = firsts.length < 2;
  byId("window").append(...firsts.map((w) => element("option", { value: w, selected: w === measured.first }, `${w} and ${w + 1}`)));
  byId("window").addEventListener("change", (event) => {
    measured.first = Number(event.target.value);
    keep(null);
    fit();
  });
  byId("critical-choice").hidden = !data.panels.some((p) => p.hasPath);
  byId("critical").addEventListener("change", (event) => byId("panels").classList.toggle("without-path", !event.target.checked));
  byId("zoom-in").addEventListener("click", () => zoom(0.7));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 0.7));
  byId("zoom-fit").addEventListener("click", fit);
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const retheme = () => {
    byId("theme").textContent = isDark() ? "Light" : "Dark";
  };
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    retheme();
  });
  system.addEventListener("change", retheme);
  retheme();
}

// The sentence that tells why: what most of a step goes to, the parts by size, and what would change it most.
function fillWhy() {
  if (!data.why) return;
  byId("why").hidden = false;
  byId("headline").textContent = data.why.headline;
  byId("change").textContent = data.why.change;
  const share = (part) => `${(100 * part).toFixed(0)}%`;
  byId("parts").append(...data.why.parts.map(([name, part, time]) => element("li", {}, `${share(part)} ${name} (${time.toFixed(1)} ms)`)));
}

fillWhy();
fillFigures();
fillBars();
fillLegend();
fillOperations();
fillBackground();
fillGlossary();
fillControls();
rearrange();
for (const panel of data.panels) listen(panel);
fit();
new ResizeObserver(drawAll).observe(byId("panels"));
