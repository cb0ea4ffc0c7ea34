#!/usr/bin/env python3
"""Writes the lists of docs/vllm-map.md from docs/vllm-map.tsv.

usage: tools/vllm_map.py [--check]

A row of the TSV is a section's number, vLLM's name, ours, what differs, and tests; the page shows
all but the tests, after its section's mark <!-- SECTION -->. All other text is the page's own.
--check changes nothing and exits with 1 if the page does not say what the TSV says.
"""
import pathlib
import re
import sys
import textwrap

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
SECTION = re.compile(r"(^<!-- (\w+) -->\n)((?:(?:- |  ).*\n)*)", re.MULTILINE)
# What would begin a block of its own at the start of a line, with the space before it.
MARKUP = re.compile(r" (?=(?:[-+*#>]|\d+[.)])(?: |$))")


def item(cells):
    """- vLLM's name → ours. What differs."""
    names, ours, differs = cells
    names = re.sub(r"^(\d+)\.", r"\1\\.", names)  # numbered, but no list in the list
    text = f"{names} → {ours}." + (f" {differs}" if differs else "")
    kept = MARKUP.sub("\0", text)  # no line may break there
    lines = textwrap.wrap(kept, 98, break_long_words=False, break_on_hyphens=False)
    return "- " + "\n  ".join(lines).replace("\0", " ") + "\n"


def main():
    page = DOCS / "vllm-map.md"
    text = page.read_text(encoding="utf-8")
    lists = {section: "" for _, section, _ in SECTION.findall(text)}
    rows = (DOCS / "vllm-map.tsv").read_text(encoding="utf-8").splitlines()
    for number, row in enumerate(rows[1:], 2):
        section, *cells = row.split("\t")
        if len(cells) != 4 or section not in lists or not all(cells[:2]):
            sys.exit(f"vllm_map: line {number}: legal: SECTION, a mark of the page, and four "
                     "columns, the first two with text")
        lists[section] += item(cells[:3])
    wanted = SECTION.sub(lambda match: match[1] + lists[match[2]], text)
    if "--check" not in sys.argv[1:]:
        page.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        sys.exit("vllm_map: the page is not what the TSV says; run tools/vllm_map.py")


if __name__ == "__main__":
    main()
