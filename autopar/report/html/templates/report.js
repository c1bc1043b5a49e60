"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

/* The model: children of a module are made when it is opened. */
const {texts, notes, legend, root} = data.tree;
const rowsInside = (module) => module.rows.length + module.children.reduce((sum, [, child]) => sum + rowsInside(child), 0);

function rowElement(row, prefix) {
  const [name, kind, stored, used, colour, note] = row;
  const made = element("div", `row layout-${colour}`), button = element("button");
  const layout = stored === used ? texts[stored] : `${texts[stored]} -> ${texts[used]}`;
  button.append(element("code", "", prefix + name), ` ${kind === "operator" ? "gives" : "stored"} ${layout}`);
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => {
    const open = made.querySelector(".note");
    if (open) open.remove(); else made.append(element("div", "note", notes[note]));
    button.setAttribute("aria-expanded", String(!open));
  });
  made.append(button);
  return made;
}

function moduleElement(name, module) {
  const made = element("details");
  const summary = element("summary", "", name + " ");
  summary.append(element("span", "count", `${rowsInside(module)}`));
  made.append(summary);
  made.fill = () => {
    if (!made.open || made.dataset.made) return;
    made.dataset.made = "yes";
    for (const [childName, child] of module.children) made.append(moduleElement(childName, child));
    for (const row of module.rows) made.append(rowElement(row, ""));
  };
  made.addEventListener("toggle", made.fill);
  return made;
}

function showTree() {
  const place = document.getElementById("tree"), top = moduleElement("model", root);
  top.open = true;
  top.fill();
  place.append(top);
  const key = document.getElementById("legend");
  const entry = (colour, text) => {
    const item = element("li");
    item.append(element("span", `key layout-${colour}`), ` ${text}`);
    key.append(item);
  };
  entry(0, "whole on every device");
  for (const [text, colour] of legend) entry(colour, text);
  entry(9, "partial sum");
}

/* Search: names that hold the text, at most so many. */
const MOST_MATCHES = 200;
function search(text) {
  const matches = document.getElementById("matches"), tree = document.getElementById("tree");
  const found = document.getElementById("found");
  matches.replaceChildren();
  matches.hidden = text === "";
  tree.hidden = text !== "";
  found.textContent = "";
  if (text === "") return;
  let count = 0;
  const visit = (module, path) => {
    for (const row of module.rows) {
      const prefix = path === "" ? "" : path + (row[1] === "operator" ? "/" : ".");
      if (!(prefix + row[0]).includes(text)) continue;
      count += 1;
      if (count <= MOST_MATCHES) matches.append(rowElement(row, prefix));
    }
    for (const [name, child] of module.children) visit(child, path === "" ? name : `${path}.${name}`);
  };
  visit(root, "");
  found.textContent = count > MOST_MATCHES ? `${count} found, the first ${MOST_MATCHES} shown` : `${count} found`;
}

/* The timeline: spans in view are drawn anew whenever the view changes. */
const SVG = "http://www.w3.org/2000/svg", WIDTH = 1000, FINEST = 0.5;
const view = {start: 0, length: 1, whole: 1};
const asTime = (microseconds) => microseconds >= 1e6 ? `${(microseconds / 1e6).toPrecision(4)} s`
  : microseconds >= 1e3 ? `${(microseconds / 1e3).toPrecision(4)} ms` : `${Number(microseconds.toPrecision(4))} us`;

function spanClass(track, name) {
  if (track.stream !== "compute") return "span communication";
  if (/^\d+F\d+|forward/.test(name)) return "span forward";
  return /^\d+W\d+/.test(name) ? "span weight" : "span";
}

let picked = null;
const isPicked = ([track, , start]) => picked !== null && picked[0] === track && picked[2] === start;
function pick(span) {
  picked = span;
  const [track, name, start, length] = span;
  document.getElementById("span-text").textContent = `${name}: ${asTime(length)}, from ${asTime(start)}, ` +
    `${data.row} ${track.rank} ${track.stream}`;
}

/* The span so many places behind the picked one on its track, brought into view. */
function pickNear(tracks, by) {
  const track = picked === null ? tracks[0] : picked[0];
  const at = picked === null ? -1 : track.spans.findIndex((span) => span[1] === picked[2]);
  const next = Math.min(track.spans.length - 1, Math.max(0, at + by));
  pick([track, ...track.spans[next]]);
  const [, , start, length] = picked;
  if (start < view.start || start + length > view.start + view.length) view.start = start + (length - view.length) / 2;
}

function drawTrack(track, svg) {
  svg.replaceChildren();
  const scale = WIDTH / view.length;
  for (const [name, start, length] of track.spans) {
    if (start + length < view.start || start > view.start + view.length) continue;
    const rect = document.createElementNS(SVG, "rect");
    const from = Math.max(0, (start - view.start) * scale);
    const to = Math.min(WIDTH, (start + length - view.start) * scale);
    rect.setAttribute("x", from);
    rect.setAttribute("width", Math.max(FINEST, to - from));
    rect.setAttribute("y", 2);
    rect.setAttribute("height", 18);
    const span = [track, name, start, length];
    rect.setAttribute("class", spanClass(track, name) + (isPicked(span) ? " picked" : ""));
    rect.addEventListener("click", () => {
      for (const other of document.querySelectorAll(".picked")) other.classList.remove("picked");
      rect.classList.add("picked");
      pick(span);
    });
    svg.append(rect);
  }
}

function showTimeline(timeline) {
  document.getElementById("no-timeline").hidden = true;
  document.getElementById("timeline-view").hidden = false;
  view.whole = view.length = timeline.seconds * 1e6;
  const drawn = timeline.tracks.map((track) => {
    const line = element("div", "track"), svg = document.createElementNS(SVG, "svg");
    line.append(element("span", "label", `${data.row} ${track.rank} ${track.stream}, ${(100 * track.busy).toFixed(1)} % busy`));
    svg.setAttribute("viewBox", `0 0 ${WIDTH} 22`);
    svg.setAttribute("preserveAspectRatio", "none");
    line.append(svg);
    document.getElementById("tracks").append(line);
    return [track, svg];
  });
  const redraw = () => {
    view.length = Math.min(view.whole, Math.max(view.length, view.whole * 1e-6));
    view.start = Math.min(view.whole - view.length, Math.max(0, view.start));
    for (const [track, svg] of drawn) drawTrack(track, svg);
    document.getElementById("window").textContent = `${asTime(view.start)} to ${asTime(view.start + view.length)}`;
  };
  const zoom = (by, at = 0.5) => {
    const point = view.start + at * view.length;
    view.length *= by;
    view.start = point - at * Math.min(view.length, view.whole);
    redraw();
  };
  document.getElementById("zoom-in").addEventListener("click", () => zoom(0.5));
  document.getElementById("zoom-out").addEventListener("click", () => zoom(2));
  document.getElementById("zoom-all").addEventListener("click", () => zoom(Infinity));
  const near = (by) => { pickNear(timeline.tracks, by); redraw(); };
  document.getElementById("span-before").addEventListener("click", () => near(-1));
  document.getElementById("span-after").addEventListener("click", () => near(1));
  const keys = {
    "ArrowLeft": () => { view.start -= view.length / 4; redraw(); },
    "ArrowRight": () => { view.start += view.length / 4; redraw(); },
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => zoom(Infinity),
  };
  document.getElementById("tracks").addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  for (const [, svg] of drawn) {
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / svg.clientWidth);
    }, {passive: false});
    svg.addEventListener("pointermove", (event) => {
      if (!event.buttons) return;
      view.start -= event.movementX / svg.clientWidth * view.length;
      redraw();
    });
  }
  redraw();
}

showTree();
document.getElementById("search").addEventListener("input", (event) => search(event.target.value.trim()));
if (data.timeline) showTimeline(data.timeline);
