"use strict";
// The drawing is in the page; what a stage holds is made when it is opened, from the data below it.
const data = JSON.parse(document.getElementById("data").textContent);
const strip = document.getElementById("stages");
const tiles = [...strip.querySelectorAll(".tile")];
const details = document.getElementById("details");
const field = document.getElementById("search");
const list = document.getElementById("found");
const count = document.getElementById("count");
const TABS = ["Segments", "Graph", "Code", "Actions"];
let open = -1, tab = 0, word = "";
field.placeholder = data.stages[data.stages.length >> 1].blocks[0][0];

function make(name, attributes, ...children) {
  const one = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) one.setAttribute(key, value);
  one.append(...children.filter((child) => child !== null && child !== ""));
  return one;
}

function vector(name, attributes, ...children) {
  const one = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes || {})) one.setAttribute(key, value);
  one.append(...children);
  return one;
}

// -- what a stage's panels show -----------------------------------------------------------------

function table(columns, rows, extra) {
  const cell = (tag, column, value) =>
    value instanceof Node ? make(tag, { class: column[1] }, value)
      : make(tag, { class: column[1] }, String(value));
  const head = make("tr", {}, ...columns.map((c) => cell("th", c, c[0])));
  head.querySelectorAll("th").forEach((th) => th.setAttribute("scope", "col"));
  const body = rows.map((row) => make("tr", {}, ...row.map((v, i) => cell("td", columns[i], v))));
  return make("table", { class: extra || "" }, make("thead", {}, head), make("tbody", {}, ...body));
}

function segments(stage) {
  const facts = stage.facts.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  const columns = [["segment", "path"], ["kind", ""], ["how or why", ""],
    ["parameters", "number"], ["FLOPs", "number"], ["work", "number"]];
  const rows = stage.blocks.map(([name, reversible, why, ...figures]) => [name,
    make("span", { class: reversible ? "kind reversible" : "kind" },
      reversible ? "reversible" : "opaque"), why, ...figures]);
  return [make("dl", {}, ...facts), table(columns, rows)];
}

// A box that opens pushes everything below it down and everything beside it aside.
const opened = new Set();

function spread([width, height, boxes, arrows], key) {
  const wide = boxes.map(([x, y, w, , , , inside], i) => {
    if (!inside || !opened.has(`${key}/${i}`)) return null;
    const inner = spread(inside, `${key}/${i}`);
    return { x, y, inner, width: Math.max(w, inner.width + 12), height: inner.height + 6,
      aside: Math.max(0, (inner.width + 12 - w) / 2) };
  });
  const open = wide.filter((one) => one);
  const left = open.reduce((sum, one) => sum + one.aside, 0);
  const rows = new Map();
  for (const one of open) rows.set(one.y, Math.max(rows.get(one.y) || 0, one.height));
  const moveX = (x) => left + open.reduce((at, one) => at + Math.sign(x - one.x) * one.aside, x);
  const moveY = (y) => [...rows].reduce((at, [row, h]) => at + (y > row ? h : 0), y);
  const bottom = new Map(open.map((one) => [`${one.x},${one.y}`, one.height]));
  const moved = arrows.map(([points, ...rest]) => {
    const below = bottom.get(`${points[0]},${points[1]}`) || 0, path = [];
    for (let i = 0; i < points.length; i += 2) {
      const [x, y, row] = [moveX(points[i]), moveY(points[i + 1]), rows.get(points[i + 1])];
      path.push(x, y);
      // straight down beside the boxes that are open in this row
      if (row && i + 2 < points.length && !(i === 0 && below)) path.push(x, y + row);
    }
    return [path, below, ...rest];
  });
  return { width: width + 2 * left, height: moveY(height), arrows: moved,
    boxes: boxes.map(([x, y, w, label, kind, about, inside], i) => ({ x: moveX(x), y: moveY(y),
      width: wide[i] ? wide[i].width : w, height: 24 + (wide[i] ? wide[i].height : 0), label, kind,
      about, opens: Boolean(inside), inner: wide[i] && wide[i].inner, key: `${key}/${i}` })) };
}

function paint({ boxes, arrows }) {
  const drawn = vector("g");
  const shapes = new Map(); // one for each box that gives another shape than it reads
  for (const [points, below, shape, stream, isNew] of arrows) {
    let d = `M${points[0]} ${points[1] + 12 + below}`;
    for (let i = 2; i < points.length; i += 2) {
      const last = i + 2 === points.length;
      const [x, y, fromX] = [points[i], points[i + 1] - (last ? 12 : 0), points[i - 2]];
      const fromY = points[i - 1] + (i === 2 ? 12 + below : 0), middle = (y + fromY) / 2;
      d += `C${fromX} ${middle} ${x} ${middle} ${x} ${y}`;
    }
    drawn.append(vector("path", { d, class: stream }, vector("title", {}, shape)));
    if (isNew) shapes.set(points.slice(0, 2).join(), [points[0] + 5, points[1] + 22 + below, shape]);
  }
  const lines = new Map(); // of equal labels that would overlap, only the first
  for (const [x, y, shape] of [...shapes.values()].sort((a, b) => a[0] - b[0])) {
    if (x < (lines.get(y + shape) ?? -Infinity)) continue;
    lines.set(y + shape, x + 6 * shape.length);
    drawn.append(vector("text", { class: "shape", x, y }, shape));
  }
  for (const { x, y, width, height, label, kind, about, opens, inner, key } of boxes) {
    const hit = word && (label + "\n" + about).toLowerCase().includes(word.toLowerCase());
    const box = vector("g", { class: hit ? kind + " hit" : kind },
      vector("title", {}, about),
      vector("rect", { x: x - width / 2, y: y - 12, width, height, rx: kind === "function" ? 11 : 4 }),
      vector("text", { x, y: y + 4 }, label));
    if (opens) {
      for (const [name, value] of Object.entries({ role: "button", tabindex: 0, "data-key": key,
        "aria-label": label, "aria-expanded": Boolean(inner) })) box.setAttribute(name, value);
    }
    drawn.append(box);
    if (inner) {
      const inside = paint(inner);
      inside.setAttribute("transform", `translate(${x - inner.width / 2} ${y + 12})`);
      drawn.append(inside);
    }
  }
  return drawn;
}

function graph(stage) {
  const frame = make("div", { class: "graph", tabindex: 0 });
  const redraw = () => {
    const all = spread(stage.graph, String(data.stages.indexOf(stage)));
    frame.replaceChildren(vector("svg", { width: all.width, height: all.height, role: "img",
      viewBox: `0 0 ${all.width} ${all.height}`, "aria-label": "the forward program's graph" },
      paint(all)));
  };
  const toggle = (event) => {
    const box = event.target.closest("[data-key]");
    if (!box || (event.key && event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    const key = box.dataset.key;
    if (!opened.delete(key)) opened.add(key);
    redraw();
    frame.querySelector(`[data-key="${key}"]`).focus();
  };
  frame.addEventListener("click", toggle);
  frame.addEventListener("keydown", toggle);
  redraw();
  const note = "Sizes, weights and bookkeeping are not drawn. Boxes with a thick border, if any, open.";
  return [make("p", { class: "note" }, note), frame];
}

const TOKEN = new RegExp([
  "(#[^\\n]*)", "(\"(?:[^\"\\\\\\n]|\\\\.)*\"|'(?:[^'\\\\\\n]|\\\\.)*')", "(;  [^\\n]* = None)",
  "\\b(def|return|None|True|False|for|in|if|else|with|not|and|or|lambda)\\b",
  "\\b(\\d+(?:\\.\\d+)?(?:e[+-]?\\d+)?)\\b", "\\b([A-Za-z_]\\w*)(?=\\()"].join("|"), "g");
const CLASSES = ["c", "s", "x", "k", "n", "f"];

function escaped(text) {
  return text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
}

function coloured(text) {
  let html = "", at = 0;
  for (const match of text.matchAll(TOKEN)) {
    const kind = CLASSES[match.slice(1).findIndex((group) => group !== undefined)];
    html += escaped(text.slice(at, match.index)) + `<span class="${kind}">${escaped(match[0])}</span>`;
    at = match.index + match[0].length;
  }
  return html + escaped(text.slice(at));
}

function mentions(line) {
  // `self.layers[5].down` and `getattr(self, "5").down` are the modules layers.5.down and 5.down;
  // functions are named after them, with underscores.
  const path = line.replace(/getattr\(([\w.]+), ["'](\w+)["']\)/g, "$1.$2").replace(/\[["']?(\w+)["']?\]/g, ".$1");
  return word && (path.includes(word) || line.includes(word.replace(/\W/g, "_")));
}

function code(stage) {
  return stage.code.split(/\n\n(?=def )/).flatMap((text) => {
    const name = (/^def (\w+)/.exec(text) || [, "interface"])[1];
    const lines = text.split("\n").map((line) =>
      mentions(line) ? `<mark>${coloured(line)}</mark>` : coloured(line));
    const pre = make("pre", { tabindex: 0, "data-program": name });
    pre.innerHTML = lines.join("\n");
    return [make("h3", {}, name), pre];
  });
}

function actions(stage) {
  const said = "What the stage does, a line for each micro-batch m that enters; u is an update.";
  return [make("p", { class: "note" }, said), make("pre", { tabindex: 0, class: "actions" },
    ...stage.actions.map((line) => make("div", {}, line)))];
}

const PANELS = [segments, graph, code, actions];

// -- opening and closing ------------------------------------------------------------------------

function place() {
  if (open < 0) return;
  const row = tiles[open].offsetTop;
  const last = tiles.filter((tile) => tile.offsetTop === row).pop();
  if (last.nextElementSibling !== details) last.after(details);
}

function show(stage, { focus = false, scroll = true } = {}) {
  details.hidden = true;
  tiles.forEach((tile, i) => {
    tile.setAttribute("aria-expanded", i === stage);
    tile.tabIndex = i === (stage < 0 ? Math.max(open, 0) : stage) ? 0 : -1;
  });
  const before = open;
  open = stage;
  if (stage < 0) {
    remember(location.pathname + location.search);
    if (before >= 0 && focus) tiles[before].focus();
    return;
  }
  place();
  fill();
  details.hidden = false;
  remember("#stage-" + stage);
  if (scroll) tiles[stage].scrollIntoView({ block: "nearest" });
  if (focus) details.querySelector("[aria-selected=true]").focus();
}

function remember(address) {
  // A page inside a page may have no address of its own.
  try { history.replaceState(null, "", address); } catch { }
}

function fill() {
  const stage = data.stages[open];
  const close = make("button", { type: "button", id: "close" }, "Close");
  close.onclick = () => show(-1, { focus: true });
  const tabs = TABS.map((name, i) => {
    const one = make("button", { type: "button", role: "tab", id: "tab-" + i,
      "aria-controls": "panel-" + i, "aria-selected": i === tab, tabindex: i === tab ? 0 : -1 }, name);
    one.onclick = () => choose(i);
    return one;
  });
  const panels = TABS.map((name, i) => make("div", { class: "panel", role: "tabpanel", id: "panel-" + i,
    "aria-labelledby": "tab-" + i }));
  const title = make("h2", {}, `Stage ${open}: ${stage.name}`);
  details.replaceChildren(make("div", { class: "bar" }, title, close),
    make("div", { class: "tabs", role: "tablist", "aria-label": "about the stage" }, ...tabs), ...panels);
  choose(tab);
}

function choose(which) {
  tab = which;
  TABS.forEach((_, i) => {
    const [head, panel] = [document.getElementById("tab-" + i), document.getElementById("panel-" + i)];
    head.setAttribute("aria-selected", i === which);
    head.tabIndex = i === which ? 0 : -1;
    panel.hidden = i !== which;
    if (i === which && !panel.firstChild) panel.append(...PANELS[i](data.stages[open]));
  });
  const mark = document.querySelector(`#panel-${which} mark, #panel-${which} .hit`);
  if (mark && !details.hidden) mark.scrollIntoView({ block: "nearest", inline: "nearest" });
}

strip.addEventListener("click", (event) => {
  const tile = event.target.closest(".tile");
  if (!tile || String(getSelection())) return;  // somebody is copying a name
  const stage = tiles.indexOf(tile);
  word = "";
  show(stage === open ? -1 : stage);
});

strip.addEventListener("keydown", (event) => {
  const tile = event.target.closest(".tile"), here = tiles.indexOf(tile);
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (tile && step && tiles[here + step]) {
    event.preventDefault();
    tile.tabIndex = -1;
    tiles[here + step].tabIndex = 0;
    tiles[here + step].focus();
  } else if (tile && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    word = "";
    show(here === open ? -1 : here, { focus: here !== open });
  } else if (!tile && step && event.target.role === "tab") {
    event.preventDefault();
    choose((tab + step + TABS.length) % TABS.length);
    document.getElementById("tab-" + tab).focus();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && event.target === field) { field.value = ""; look(); }
  else if (event.key === "Escape" && open >= 0) show(-1, { focus: true });
  else if (event.key === "/" && event.target !== field) { event.preventDefault(); field.focus(); }
});

addEventListener("resize", place);
addEventListener("beforeprint", () => {
  if (open >= 0) TABS.forEach((_, i) => {
    const panel = document.getElementById("panel-" + i);
    if (!panel.firstChild) panel.append(...PANELS[i](data.stages[open]));
  });
});
addEventListener("hashchange", arrive);

function arrive() {
  const wanted = /^#stage-(\d+)$/.exec(location.hash);
  if (wanted && tiles[+wanted[1]] && +wanted[1] !== open) show(+wanted[1]);
}

// -- search -------------------------------------------------------------------------------------

function look() {
  const asked = field.value.trim().toLowerCase();
  const found = [];
  if (asked) data.stages.forEach((stage, i) => {
    for (const one of stage.names) if (one.toLowerCase().includes(asked)) found.push([one, i]);
  });
  // What begins or ends with the search text comes first.
  const rank = ([one]) => (one.toLowerCase() === asked ? 0 : one.toLowerCase().startsWith(asked) ? 1 : 2);
  found.sort((a, b) => rank(a) - rank(b) || a[1] - b[1]);
  const stages = new Set(found.map((pair) => pair[1]));
  tiles.forEach((tile, i) => tile.classList.toggle("hit", stages.has(i)));
  count.value = !asked ? "" : found.length === 0 ? "nothing found"
    : `${found.length} found in ${stages.size} stage${stages.size > 1 ? "s" : ""}`;
  list.replaceChildren(...found.slice(0, 40).map(([one, i]) => {
    const button = make("button", { type: "button" }, one, make("span", {}, "stage " + i));
    button.onclick = () => jump(one, i);
    return make("li", {}, button);
  }));
  return found;
}

function jump(one, stage) {
  list.replaceChildren();
  word = one;
  tiles.forEach((tile, i) => tile.classList.toggle("hit", i === stage));
  tab = TABS.indexOf("Code");
  show(stage, { scroll: false });
  tiles[stage].scrollIntoView({ block: "start" });
  choose(tab);
}

field.addEventListener("input", look);
field.addEventListener("keydown", (event) => {
  const buttons = [...list.querySelectorAll("button")];
  if (event.key === "Enter") { const found = look(); if (found.length) jump(...found[0]); }
  else if (event.key === "ArrowDown" && buttons.length) { event.preventDefault(); buttons[0].focus(); }
});
list.addEventListener("keydown", (event) => {
  const buttons = [...list.querySelectorAll("button")], here = buttons.indexOf(event.target);
  if (event.key === "ArrowDown" && buttons[here + 1]) { event.preventDefault(); buttons[here + 1].focus(); }
  if (event.key === "ArrowUp") { event.preventDefault(); (buttons[here - 1] || field).focus(); }
  if (event.key === "Escape") { list.replaceChildren(); field.focus(); }
});
document.addEventListener("click", (event) => {
  if (!event.target.closest(".search")) list.replaceChildren();
});

if (tiles.length) tiles[0].tabIndex = 0;
arrive();
