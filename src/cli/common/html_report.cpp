#include "cli/common/html_report.hpp"

namespace clattn::cli {
namespace {

constexpr std::string_view kHead = R"html(<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@title@</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #667080; --grid: #d9dee5; --paper: #fff;
  --c0: #9aa5b1; --c1: #e0a100; --c2: #8f5bd6; --c3: #2f9e6e; --c4: #2f6fde; --c5: #d0d5dc;
  --c6: #d6453d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --dim: #98a2b0; --grid: #343b45; --paper: #14181d; --c0: #7b8794;
    --c1: #f2bd35; --c2: #b28af0; --c3: #4fc596; --c4: #6ea0ff; --c5: #454e5a; --c6: #ff7a70; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem; }
table { border-collapse: collapse; margin: .6rem 0; }
td, th { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.dim, svg text { color: var(--dim); fill: var(--dim); } svg { width: 100%; height: auto; }
svg text { font-size: 12px; } .grid { stroke: var(--grid); } .bad { color: var(--c6); }
.key { display: inline-block; margin-right: 1.1rem; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
.cards, .tables { display: flex; flex-wrap: wrap; gap: .8rem 2.6rem; align-items: flex-start; }
.cards div { color: var(--dim); }
.cards b { display: block; font-size: 1.7rem; line-height: 1.3; color: var(--ink); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr));
  gap: 0 2rem; }
.tip { min-height: 1.5em; font-variant-numeric: tabular-nums; }
</style></head><body>
<h1>@title@</h1>
)html";

constexpr std::string_view kData = R"html(<div id="page"></div>
<script id="report" type="application/json">)html";

// Steps are averaged into at most 540 columns, so that a page of any length draws quickly.
constexpr std::string_view kTail = R"html(</script>
<script>
"use strict";
const report = JSON.parse(document.getElementById("report").textContent);
const page = document.getElementById("page"), series = report.series;
const section = name => element(page, "div", {class: name});
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

function table(parent, head, rows) {
  const node = element(parent, "table");
  const add = (cells, tag) => {
    const row = element(node, "tr");
    cells.forEach((cell, i) => element(row, tag, head && i ? {class: "n"} : {}, format(cell)));
  };
  if (head) add(head, "th");
  rows.forEach(cells => add(cells, "td"));
}

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

// lines: [{title, color, values}]; stacked: areas on top of one another; limit: {title, value}.
function plot({title, unit, lines, stacked = false, limit = null}) {
  const steps = report.steps;
  if (!steps) return;
  const figure = element(plots, "div");
  element(figure, "h2", {}, title);
  const keys = element(figure, "div");
  const columns = Math.min(steps, 540);
  const data = lines.map(line => average(line.values, columns));
  const tops = data.map(values => values.slice());
  if (stacked)
    for (let s = 1; s < tops.length; ++s) tops[s] = tops[s].map((v, i) => v + tops[s - 1][i]);
  const highest = Math.max(...tops.flat(), limit ? limit.value : 0) * 1.04 || 1;
  const x = i => LEFT + (WIDTH - LEFT - RIGHT) * (columns > 1 ? i / (columns - 1) : 0.5);
  const y = v => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * v / highest;
  const svg = element(figure, "svg",
    {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title});
  for (let v = 0, gap = niceStep(highest); v <= highest; v += gap) {
    element(svg, "line", {x1: LEFT, x2: WIDTH - RIGHT, y1: y(v), y2: y(v), class: "grid"});
    element(svg, "text", {x: LEFT - 6, y: y(v) + 4, "text-anchor": "end"}, format(v));
  }
  for (let s = 0, gap = Math.max(1, niceStep(steps)); s < steps; s += gap) {
    const at = x(steps > 1 ? s / (steps - 1) * (columns - 1) : 0);
    element(svg, "text", {x: at, y: HEIGHT - BOTTOM + 16, "text-anchor": "middle"}, format(s));
  }
  element(svg, "text", {x: (LEFT + WIDTH) / 2, y: HEIGHT - 6, "text-anchor": "middle"}, "step");
  element(svg, "text", {transform: `translate(14 ${(HEIGHT - BOTTOM) / 2}) rotate(-90)`,
    "text-anchor": "middle"}, unit);
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
  const tip = element(figure, "div", {class: "tip dim"});
  const cursor = element(svg, "line",
    {y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--dim)", opacity: 0});
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * WIDTH;
    const i = Math.min(columns - 1, Math.max(0,
      Math.round((at - LEFT) / (WIDTH - LEFT - RIGHT) * (columns - 1))));
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(i));
    cursor.setAttribute("opacity", 1);
    tip.textContent = `step ${Math.floor(i * steps / columns)}: ` +
      lines.map((line, s) => `${line.title} ${format(data[s][i])}`).join(", ") + ` (${unit})`;
  });
}

const {model, device, kv_cache: cache, requests, tokens, achieved, ceilings, verify} = report;
const cards = section("cards");
const card = (value, text) => {
  const box = element(cards, "div");
  element(box, "b", {}, value);
  box.append(text);
};
card(format(tokens.decode_per_s), "tokens decoded per second");
card(format(tokens.prefill_per_s), "tokens prefilled per second");
card(percent(achieved.decode_steps_share_of_read), "of the read ceiling, in decode steps");
card(`${verify.rows - verify.failed_rows} of ${verify.rows}`, "checked rows are right");
table(page, null, [
  ["device", `${device.name}, driver ${device.driver}, ${device.platform}`],
  ["trace", report.trace],
  ["model", `${model.name}: ${model.num_heads} query / ${model.num_kv_heads} KV heads x ` +
    `${model.head_size}, ${model.num_layers} layers, ${model.dtype}, ` +
    `cache ${model.kv_cache_dtype} ${cache.layout}`],
  ["backend", report.backend],
  ["requests", `${requests.finished} of ${requests.total} finished, ${requests.preemptions} ` +
    `preemptions, ${format(requests.prefix_hit_tokens)} tokens found in the cache`],
  ["steps", `${format(report.steps)} in ${format(report.step_s)} s of step time`],
  ["prefill", `${format(tokens.prefill)} tokens, ${format(tokens.prefill_per_s)} tokens/s`],
  ["decode", `${format(tokens.decode)} tokens, ${format(tokens.decode_per_s)} tokens/s`],
  ["blocks", `peak ${cache.peak_blocks} of ${cache.num_blocks}, ${cache.block_size} tokens each`],
  ["verified", `${verify.rows} rows in ${verify.steps} steps, ${verify.failed_rows} failed; ` +
    `worst error ${format(verify.worst_error)}, ` +
    (verify.worst_share_of_allowance === null ? "not finite" :
     `${percent(verify.worst_share_of_allowance)} of what is allowed`)],
]);
for (const failure of verify.failures) element(page, "div", {class: "bad"}, failure);
const tables = section("tables"), plots = section("plots"), ms = us => (us / 1e3).toFixed(3);
table(tables, ["step time", "p50 ms", "p99 ms", "share"], Object.values(report.step_time_us).map(
  part => [part.title, ms(part.p50), ms(part.p99), percent(part.share)]));
const beside = element(tables, "div");
table(beside, ["attention", "achieved", "ceiling", "share"], [
  ["decode steps, GB/s", achieved.decode_steps_gb_per_s, ceilings.read_gb_per_s,
    percent(achieved.decode_steps_share_of_read)],
  [`prefill steps, GFLOP/s, of ${ceilings.arithmetic}`,
    achieved.prefill_steps_gflop_per_s, ceilings.arithmetic_gflop_per_s,
    percent(achieved.prefill_steps_share_of_arithmetic)]]);
table(beside, ["kernel", "work-group", "launches", "ms"], report.kernels.map(
  kernel => [`${kernel.role}: ${kernel.name}`, kernel.work_group_size, kernel.launches,
    kernel.time_us / 1e3]));

const parts = Object.entries(report.step_time_us).filter(([name]) => name !== "total_us");
plot({title: "Step time", unit: "ms", stacked: true, lines: parts.map(([name, part], i) => (
  {title: part.title, color: i, values: series[name].map(us => us / 1e3)}))});
plot({title: "Batch composition", unit: "tokens", stacked: true, lines: [
  {title: "decode tokens", color: 4, values: series.decode_tokens},
  {title: "prefill tokens", color: 1, values: series.prefill_tokens}]});
plot({title: "Requests in the batch", unit: "requests", lines: [
  {title: "requests", color: 2, values: series.num_reqs},
  {title: "preemptions", color: 6, values: series.preemptions}]});
plot({title: "Cache blocks held", unit: "blocks", stacked: true,
  limit: {title: "all blocks", value: cache.num_blocks},
  lines: [{title: "held", color: 3, values: series.blocks_used}]});
const share = (values, ceiling) => values.map(value => ceiling > 0 ? 100 * value / ceiling : 0);
plot({title: "Attention's share of the ceilings", unit: "%",
  limit: {title: "ceiling", value: 100}, lines: [
  {title: `KV bytes read, of ${format(ceilings.read_gb_per_s)} GB/s`, color: 4,
    values: share(series.gb_per_s, ceilings.read_gb_per_s)},
  {title: `arithmetic, of ${ceilings.arithmetic}'s ` +
      `${format(ceilings.arithmetic_gflop_per_s)} GFLOP/s`, color: 1,
    values: share(series.gflop_per_s, ceilings.arithmetic_gflop_per_s)}]});
</script></body></html>
)html";

}  // namespace

std::string to_html(const nlohmann::ordered_json& report) {
  std::string data = report.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  // Inside a script element only "<" could end it; in JSON it occurs in strings alone.
  for (std::size_t at = data.find('<'); at != std::string::npos; at = data.find('<', at)) {
    data.replace(at, 1, "\\u003c");
  }
  return html_head("clattn replay") + std::string(kData) + data + std::string(kTail);
}

std::string html_head(std::string_view title) {
  constexpr std::string_view kTitle = "@title@";
  std::string head(kHead);
  for (std::size_t at = head.find(kTitle); at != std::string::npos; at = head.find(kTitle)) {
    head.replace(at, kTitle.size(), title);
  }
  return head;
}

}  // namespace clattn::cli
