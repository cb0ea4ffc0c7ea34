#!/usr/bin/env python3
"""Counts what a reader of the kernels meets and prints it beside limits and goals.

usage: floor.py [WHAT]     ends with 1 where a count exceeds its limit; WHAT, the first words of a
                           row, lists what that row counts

Limits are the numbers reached: whoever lowers a count lowers its limit."""

import re
import sys
from collections import defaultdict
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
KERNELS = TOP / "kernels_cl"
ASYNCHRONOUS = "attention/wgmma/prefill_wgmma.cl"  # the kernel that meets most, and its unit
ASYNCHRONOUS_UNIT = "tile/sm90.clh"
# What the host defines for kernels (variants.cpp, runtime.cpp, device_info.cpp).
HOST = set("""AT_ONCE BLOCK_KV BLOCK_ROWS BOXES CHUNK_LOOKBACK COPY_BYTES DOT ELEMENT_BYTES
    F16_FLUSHED FP8_CVT FP8_PRODUCTS GAPS GROUP HEADS_PER_ITEM HEAD_CHUNKS HEAD_DIM KV_DTYPE
    KV_HEADS LISTED_ROWS LSE_LOG2 MASK MERGE_TAIL NATIVE NATIVE_EXP2 OUT_FP8 PADDED_DIM PAGE_SIZE
    PTX Q_DTYPE ROPE_DIM SELFTEST SINK SOFT_CAP SUB_GROUP VALUE_DIM VEC WG_SIZE WINDOW ALIBI
    X86_PREFETCH LOCAL_BYTES""".split())

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
DEFINE = re.compile(r"^\s*#\s*define\s+(\w+)", re.M)
NAME = re.compile(r"\bCLA_\w+\b(?!##)")
CHECK = re.compile(r"(?:defined\(|#\s*ifn?def\s+)(\w+)")
FUNCTION = re.compile(r"^(?:static|CLA_INLINE|CLA_CALLED|CLA_KERNEL|__kernel)\b", re.M)
MAP = re.compile(r"^CLA_MAP\((\w+)", re.M)
STRUCT = re.compile(r"^typedef struct (\w+)", re.M)
SOFTMAX = re.compile(r"^cla_(?:\w+_)?softmax\w*$|^cla_rows_to_probabilities$")


def code_of(path):
    """A file without its comments, line by line as it was."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n") or " ", path.read_text(),
                  flags=re.S)
    return re.sub(r'//[^\n"]*$', "", text, flags=re.M)


FILES = {str(path.relative_to(KERNELS)): code_of(path)
         for path in sorted(KERNELS.rglob("*")) if path.suffix in (".cl", ".clh", ".h")}


def includes_of(name, unit):
    """The file and all that it includes, the deepest first."""
    found = {}

    def visit(at):
        if at in found or at not in FILES:  # tile/unit.clh where no unit is named
            return
        found[at] = None
        for other in INCLUDE.findall(FILES[at]):
            visit(unit if other == "tile/unit.clh" and unit else other)

    visit(name)
    return list(found)


def functions_of(code):
    """(name, first line, last line) of the functions that a file defines."""
    lines = code.split("\n")
    for match in FUNCTION.finditer(code):
        head = code[match.start():code.find("{", match.start())]
        name = re.search(r"\b(cla\w+)\s*\(", head.split(";")[0])
        if "#" in head or ";" in head or not name:
            continue
        first = code.count("\n", 0, match.start())
        last = next((i for i in range(first, len(lines)) if lines[i].rstrip() == "}"), first)
        yield name.group(1), first + 1, last + 1
    for match in MAP.finditer(code):
        line = code.count("\n", 0, match.start()) + 1
        yield match.group(1), line, line


def met_macros():
    """Macros that a reader of the asynchronous kernel meets, with all that it includes."""
    names = set()
    for file in includes_of(ASYNCHRONOUS, ASYNCHRONOUS_UNIT):
        names |= set(NAME.findall(FILES[file])) | set(DEFINE.findall(FILES[file]))
    return sorted(names)


def conditions():
    """Per 100 lines of code of that kernel's file."""
    lines = [line for line in FILES[ASYNCHRONOUS].split("\n") if line.strip()]
    asked = [line for line in lines if re.match(r"\s*#\s*(if|ifdef|ifndef|elif)\b", line)]
    return round(100 * len(asked) / len(lines), 1), asked


def uses_of(name):
    return [f"{file}: {line.strip()}" for file, code in FILES.items() for line in code.split("\n")
            for _ in re.findall(rf"\b{name}\b", line)]


def homonyms(names_of):
    """Names that several files define, of which one at least is not in tile/."""
    places = defaultdict(set)
    for file, code in FILES.items():
        for name in names_of(code):
            places[name].add(file)
    return [f"{name}: {' '.join(sorted(files))}" for name, files in sorted(places.items())
            if len(files) > 1 and any(not file.startswith("tile/") for file in files)]


def softmaxes():
    return [f"{file}: {name}" for file, code in FILES.items()
            for name, _, _ in functions_of(code) if SOFTMAX.match(name)]


def unit_tables():
    """Files of the library that list the units' headers."""
    return [str(path.relative_to(TOP)) for path in sorted((TOP / "src").rglob("*.*pp")) +
            sorted((TOP / "src").rglob("*.inc")) if '"tile/mfma.clh"' in path.read_text()]


def ambient_headers():
    """Headers with macros that they and what they include neither define nor check. What the
    contract names is the unit's to define."""
    contract = set(NAME.findall((KERNELS / "tile/CONTRACT.md").read_text()))
    given = contract | {"CLA_" + name for name in HOST}
    found = []
    for file, code in FILES.items():
        if not file.endswith(".clh"):
            continue
        known = set(given)
        for other in includes_of(file, ""):
            known |= set(DEFINE.findall(FILES[other])) | set(CHECK.findall(FILES[other]))
        missing = set(NAME.findall(code)) - known
        if missing:
            found.append(f"{file}: {' '.join(sorted(missing))}")
    return found


def late_includes():
    """Includes after a definition that follows the file's first include."""
    found = []
    for file, code in FILES.items():
        started = defined = False
        for number, line in enumerate(code.split("\n"), 1):
            if INCLUDE.match(line):
                if defined:
                    found.append(f"{file}:{number}: {line.strip()}")
                started = True
            elif started and (re.match(r"\s*#\s*define\b", line) or
                              (line.strip() and not line.lstrip().startswith("#"))):
                defined = True
    return found


def lengths():
    return sorted((last - first + 1, f"{file}:{first} {name}") for file, code in FILES.items()
                  for name, first, last in functions_of(code))


def table():
    """(what, count, limit, goal, what is counted)"""
    macros = met_macros()
    density, asked = conditions()
    functions = homonyms(lambda code: [name for name, _, _ in functions_of(code)])
    structs = homonyms(STRUCT.findall)
    longest = lengths()
    of_attention = [file for file in FILES if not file.startswith("recurrent/")]
    size = sum((KERNELS / file).read_text().count("\n") for file in of_attention)
    counted = [
        ("macros met by prefill_wgmma", len(macros), 234, 120, macros),
        ("#if per 100 lines of prefill_wgmma", density, 7.5, 8, asked),
        ("uses of CLA_FP8_PRODUCTS", None, 0, 10, uses_of("CLA_FP8_PRODUCTS")),
        ("functions of one name in several files", None, 4, 10, functions),
        ("structs of one name in several files", None, 0, 0, structs),
        ("softmaxes", None, 3, 3, softmaxes()),
        ("tables that list units", None, 1, 1, unit_tables()),
        ("headers that their includer sets unchecked", None, 0, 0, ambient_headers()),
        ("includes between definitions", None, 0, 0, late_includes()),
        ("lines of the longest function", longest[-1][0], 97, 90,
         [f"{lines} {at}" for lines, at in longest[-20:]]),
        ("lines of kernels_cl but for recurrent layers", size, 17439, 15150, []),
    ]
    return [(what, len(of) if count is None else count, limit, goal, of)
            for what, count, limit, goal, of in counted]


def main():
    rows = table()
    if len(sys.argv) > 1:
        for what, _, _, _, of in rows:
            if what.startswith(sys.argv[1]):
                print("\n".join(of))
        return 0
    print(f"{'count':>7} {'limit':>7} {'goal':>7}  of the kernels (tools/kernels/floor.py)")
    over = [what for what, count, limit, _, _ in rows if count > limit]
    for what, count, limit, goal, _ in rows:
        print(f"{count:>7} {limit:>7} {goal:>7}  {what}{'  OVER' if what in over else ''}")
    return 1 if over else 0


sys.exit(main())
