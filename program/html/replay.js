"use strict";
const report = JSON.parse(document.getElementById("report").textContent);
const series = report.series;
const WIDTH = 600, HEIGHT = 230, LEFT = 64, RIGHT = 12, TOP = 10, BOTTOM = 40;

function element(parent, name, attributes = {}, text = "") {
  const svg = ["svg", "path", "line", "text", "rect"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name)
                   : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  parent.appendChild(node);
  return node;
}
const format = value => value === null ? "not finite" : typeof value !== "number" ? value :
  Math.abs(value) >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") :
  value.toPrecision(3);
const percent = share => (100 * share).toFixed(1) + " %";

function average(values, columns) {
  const result = [];
  for (let c = 0; c < columns; ++c) {
    const from = Math.floor(c * values.length / columns);
    const to = Math.max(from + 1, Math.floor((c + 1) * values.length / columns));
    let sum = 0;
    for (let i = from; i < to; ++i) sum += values[i] ?? 0;
    result.push(sum / (to - from));
  }
  return result;
}

function niceStep(range) {
  const power = 10 ** Math.floor(Math.log10(range / 6 || 1));
  return [1, 2, 5, 10].map(n => n * power).find(n => n >= range / 6);
}

// The steps along x, values along y: an axis's numbers, its name, and places on it.
function axes(svg, {steps, columns, unit, highest, whole}) {
  const x = i => LEFT + (WIDTH - LEFT - RIGHT) * (columns > 1 ? i / (columns - 1) : 0.5);
  const y = v => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * v / highest;
  for (let v = 0, gap = Math.max(whole ? 1 : 0, niceStep(highest)); v <= highest; v += gap) {
    element(svg, "line", {x1: LEFT, x2: WIDTH - RIGHT, y1: y(v), y2: y(v), class: "grid"});
    element(svg, "text", {x: LEFT - 6, y: y(v) + 4, "text-anchor": "end"}, format(v));
  }
  for (let s = 0, gap = Math.max(1, niceStep(steps)); s < steps; s += gap) {
    const at = x(steps > 1 ? s / (steps - 1) * (columns - 1) : 0);
    element(svg, "text", {x: at, y: HEIGHT - BOTTOM + 16, "text-anchor": "middle"}, format(s));
  }
  element(svg, "text", {x: (LEFT + WIDTH) / 2, y: HEIGHT - 6, "text-anchor": "middle"},
    "number of the step");
  element(svg, "text", {transform: `translate(14 ${(HEIGHT - BOTTOM) / 2}) rotate(-90)`,
    "text-anchor": "middle"}, unit);
  return {x, y};
}

// A line under the plot that shows the numbers of the step that is pointed at.
function cursor(figure, svg, {steps, columns, x, tell}) {
  const tip = element(figure, "div", {class: "tip dim"});
  const line = element(svg, "line",
    {y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--dim)", opacity: 0});
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * WIDTH;
    const i = Math.min(columns - 1, Math.max(0,
      Math.round((at - LEFT) / (WIDTH - LEFT - RIGHT) * (columns - 1))));
    for (const end of ["x1", "x2"]) line.setAttribute(end, x(i));
    line.setAttribute("opacity", 1);
    tip.textContent = `step ${Math.floor(i * steps / columns)}: ${tell(i)}`;
  });
}

// lines: [{title, color, values}]; stacked: areas on top of one another; limit: {title, value};
// whole: what is counted, so that between 0 and 1 there is nothing to label.
function plot({title, unit, lines, stacked = false, limit = null, whole = false}) {
  const steps = report.steps;
  if (!steps) return;
  const figure = element(plots, "div");
  element(figure, "h2", {}, title);
  const keys = element(figure, "div");
  // Steps are averaged into at most 540 columns, so that a page of any length draws quickly.
  const columns = Math.min(steps, 540);
  const data = lines.map(line => average(line.values, columns));
  const tops = data.map(values => values.slice());
  if (stacked)
    for (let s = 1; s < tops.length; ++s) tops[s] = tops[s].map((v, i) => v + tops[s - 1][i]);
  const highest = Math.max(...tops.flat(), limit ? limit.value : 0) * 1.04 || 1;
  const svg = element(figure, "svg",
    {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title});
  const {x, y} = axes(svg, {steps, columns, unit, highest, whole});
  const point = (v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`;
  lines.forEach((line, s) => {
    const color = `var(--c${line.color})`;
    const top = tops[s].map(point).join("L");
    if (stacked) {
      const base = (s ? tops[s - 1] : tops[s].map(() => 0)).map(point).reverse().join("L");
      element(svg, "path",
        {d: `M${top}L${base}Z`, fill: color, stroke: color, "stroke-width": 0.5});
    } else {
      element(svg, "path", {d: "M" + top, fill: "none", stroke: color, "stroke-width": 1.5});
    }
    const key = element(keys, "span", {class: "key"});
    element(key, "i", {style: `background: ${color}`});
    key.append(line.title);
  });
  if (limit) {
    element(svg, "line", {x1: LEFT, x2: WIDTH - RIGHT, y1: y(limit.value), y2: y(limit.value),
      stroke: "var(--c6)", "stroke-dasharray": "5 4"});
    element(keys, "span", {class: "key bad"}, "- - " + limit.title);
  }
  cursor(figure, svg, {steps, columns, x, tell: i => lines.map(
    (line, s) => `${line.title}: ${format(data[s][i])}`).join("; ") + ` (${unit})`});
}

const {kv_cache: cache, tokens, achieved, ceilings, verify} = report;
const UNITS = {fma: "f32 multiply-adds", bf16: "bf16 products of x86",
  mma: "16-bit products by mma.sync", wgmma: "16-bit products by wgmma"};
ceilings.arithmetic = UNITS[ceilings.arithmetic] ?? ceilings.arithmetic;
const read = `${format(ceilings.read_gb_per_s)} GB/s read`;
const compute = `${format(ceilings.arithmetic_gflop_per_s)} GFLOP/s (${ceilings.arithmetic})`;
for (const node of document.querySelectorAll("[data-value]"))
  node.textContent = format(node.dataset.value.split(".").reduce((at, name) => at[name], report));

const cards = document.getElementById("cards"), plots = document.getElementById("plots");
const card = (value, text) => {
  const box = element(cards, "div");
  element(box, "b", {}, value);
  box.append(text);
};
card(format(tokens.decode_per_s), "tokens decoded per second");
card(format(tokens.prefill_per_s), "tokens prefilled per second");
card(percent(achieved.decode_steps_share_of_read), `of the ceiling, ${read}, in decode steps`);
card(`${verify.rows - verify.failed_rows} of ${verify.rows}`, "checked rows are right");
for (const failure of verify.failures) element(cards, "span", {class: "bad"}, failure);

const parts = Object.entries(report.step_time_us).filter(([name]) => name !== "total_us");
plot({title: "Time of each step, by what it was spent on", unit: "time, ms", stacked: true,
  lines: parts.map(([name, part], i) => (
    {title: part.title, color: i, values: series[name].map(us => us / 1e3)}))});
plot({title: "Tokens in each step's batch", unit: "tokens", stacked: true, whole: true, lines: [
  {title: "decode tokens", color: 4, values: series.decode_tokens},
  {title: "prefill tokens", color: 1, values: series.prefill_tokens}]});
plot({title: "Requests in each step's batch, and preempted for want of blocks", unit: "requests",
  whole: true, lines: [
  {title: "in the batch", color: 2, values: series.num_reqs},
  {title: "preempted", color: 6, values: series.preemptions}]});
plot({title: "Cache blocks that requests hold in each step",
  unit: `blocks of ${cache.block_size} tokens`, stacked: true, whole: true,
  limit: {title: `all blocks: ${format(cache.num_blocks)}`, value: cache.num_blocks},
  lines: [{title: "held", color: 3, values: series.blocks_used}]});
const share = (values, ceiling) => values.map(value => ceiling > 0 ? 100 * value / ceiling : 0);
plot({title: "What attention reaches of what this device can do", unit: "% of the ceiling",
  limit: {title: "100 %: the ceiling", value: 100}, lines: [
  {title: `keys and values, % of ${read}`, color: 4,
    values: share(series.gb_per_s, ceilings.read_gb_per_s)},
  {title: `operations, % of ${compute}`, color: 1,
    values: share(series.gflop_per_s, ceilings.arithmetic_gflop_per_s)}]});
