#!/usr/bin/env python3
"""Draws docs/images/speed.svg: CLAttn's speed compared with other libraries, from bench/results/.

usage: bench/chart.py [--check] [--results FOLDER] [--picture FILE]

A bar is a geometric mean of the ratios in a table of docs/results.md, over the batches that both
sides ran. --check changes nothing and exits with 1 if the picture is not what the reports say.
Exits with 2 for reports and pictures that it cannot read.
"""
import argparse
import math
import pathlib
from xml.sax.saxutils import escape

from compare_report import geometric_mean
from results_tables import ROOT, Refused, fail, ratios_of, read_comparison, wrapped

PANELS = {
    "h200-aims": "NVIDIA H200",
    "h100-aims": "NVIDIA H100",
    "xeon-16-cores": "16 cores of a Xeon with AMX, through PoCL",
}
PEERS = {
    "flash-attn-4": "FlashAttention 4",
    "flashinfer": "FlashInfer",
    "sdpa-cudnn": "cuDNN",
    "sdpa": "PyTorch",
    "vllm": "vLLM",
}
WIDTH, MARGIN, ROW, BAR = 840, 24, 24, 14
STEP = 0.5  # of the axis
ORIGIN, RIGHT = 204, 632  # where the axis begins and ends
# A reader's theme is the browser's, not the page's: the picture brings its own background.
STYLE = """
text { font: 13px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif }
.title { font-size: 17px; font-weight: 600 }
.panel, .mean { font-weight: 600 }
.mean { paint-order: stroke; stroke: #ffffff; stroke-width: 4px }
.end { text-anchor: end }
.middle { text-anchor: middle }
.page { fill: #ffffff; stroke: #d0d7de }
text { fill: #1f2328 }
.quiet { fill: #59636e; font-size: 12px }
.grid { stroke: #d8dee4 }
.one { stroke: #1f2328; stroke-width: 1.5 }
.ahead { fill: #3b78b5 }
.behind { fill: #c2782e }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; stroke: #3d444d }
  text { fill: #f0f6fc }
  .mean { stroke: #0d1117 }
  .quiet { fill: #9198a1 }
  .grid { stroke: #2a313c }
  .one { stroke: #f0f6fc }
  .ahead { fill: #5b9bd9 }
  .behind { fill: #d99a52 }
}"""


def text(x, y, words, kind):
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def line(x, top, bottom, kind):
    return f'<line x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{bottom:g}" class="{kind}"/>'


def bar(y, name, ratios, scale):
    """A row of the picture, whose middle is y."""
    mean = geometric_mean(ratios)
    kind = "ahead" if mean >= 1 else "behind"
    spread = (f"{len(ratios)} batch{'es' if len(ratios) > 1 else ''}, {min(ratios):.2f} to "
              f"{max(ratios):.2f}")
    return [
        text(ORIGIN - 10, y + 4.5, name, "end"),
        f'<rect x="{ORIGIN}" y="{y - BAR / 2:g}" width="{scale * mean:.1f}" height="{BAR}" '
        f'class="{kind}"/>',
        text(round(ORIGIN + scale * max(mean, 1)) + 7, y + 4.5, f"{mean:.2f}", "mean"),
        text(WIDTH - MARGIN, y + 4.5, spread, "quiet end"),
    ]


def read_panels(results):
    """Title, origin and the rows (name, ratios) of each device."""
    panels = []
    for folder, title in PANELS.items():
        own, times, _ = read_comparison(results / folder)
        by_peer, fastest = ratios_of(own, times)
        rows = [(PEERS.get(name, name), ratios) for name, ratios in by_peer.items() if ratios]
        if not rows:
            raise Refused(f"{results / folder}: no row that a peer has")
        origin = (f"driver {own['device']['driver_version']}, CLAttn {own['commit']}, "
                  f"{own['date'][:10]}")
        panels.append((title, origin, [*rows, ("the fastest of each", fastest)]))
    return panels


def picture(results):
    panels = read_panels(results)
    largest = max(geometric_mean(ratios) for _, _, rows in panels for _, ratios in rows)
    steps = math.ceil(max(largest, 1) / STEP)
    scale = (RIGHT - ORIGIN) / (STEP * steps)
    ticks = [(STEP * step, round(ORIGIN + scale * STEP * step) + 0.5)
             for step in range(steps + 1)]
    shapes, y = [], 72
    for title, origin, rows in panels:
        shapes += [text(MARGIN, y + 14, title, "panel"),
                   text(WIDTH - MARGIN, y + 14, origin, "quiet end")]
        y += 24
        end = y + ROW * len(rows)
        shapes += [line(x, y, end, "one" if tick == 1 else "grid") for tick, x in ticks]
        for i, (name, ratios) in enumerate(rows):
            shapes += bar(y + ROW * (i + 0.5), name, ratios, scale)
        y = end + 12
    shapes += [text(x, y + 4, f"{tick:.1f}", "quiet middle") for tick, x in ticks]
    height = y + 20
    summary = [part for title, _, rows in panels for part in wrapped(f"{title}: " + ", ".join(
        f"{geometric_mean(ratios):.2f} beside {name}" for name, ratios in rows) + ".")]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"',
        f'  width="{WIDTH}" height="{height}">',
        "<!-- written by bench/chart.py from bench/results/: do not edit -->",
        "<title>How many times as fast as other libraries CLAttn is</title>",
        "<desc>", *map(escape, summary), "</desc>",
        f"<style>{STYLE}\n</style>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" class="page"/>',
        text(MARGIN, 34, "How many times as fast as other libraries CLAttn is", "title"),
        text(MARGIN, 56, "Geometric mean and range over the batches that both ran", "quiet"),
        text(WIDTH - MARGIN, 56, "Right of 1.0 CLAttn is ahead", "quiet end"),
        *shapes, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--picture", type=pathlib.Path,
                        default=ROOT / "docs" / "images" / "speed.svg")
    arguments = parser.parse_args()
    try:
        wanted = picture(arguments.results)
        kept = arguments.picture.read_text(encoding="utf-8") if arguments.check else None
    except (OSError, Refused) as error:
        fail(2, error)
    except KeyError as error:
        fail(2, f"{arguments.results}: lacks {error}")
    if arguments.check and kept != wanted:
        fail(1, f"{arguments.picture} is not what {arguments.results} says; run bench/chart.py")
    if not arguments.check:
        arguments.picture.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
