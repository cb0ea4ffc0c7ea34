#!/usr/bin/env python3
"""Whether a tile that does not spill is left for each option of attention on Intel's matrix units:
compiles the dumped kernels of theirs with each option alone, with none and with all, over caches
of 16 and of 8 bits. Prints the shapes of which some tile spills, with each tile's scratch memory in
bytes; ends with 1 if all tiles of a shape spill. Takes half an hour of a core.

usage: intel_spills.py DIR, which clattn_dump_kernels has filled
"""
import collections
import concurrent.futures
import itertools
import os
import pathlib
import re
import subprocess
import sys

OPTIONS = ("WINDOW", "SOFT_CAP", "ALIBI", "SINK", "MASK", "OUT_FP8")
SETS = {"none": (), **{option: (option,) for option in OPTIONS}, "all": OPTIONS}
TYPES = {"f16": 1, "bf16": 2, "fp8_e4m3": 3, "fp8_e5m2": 4, "int8": 5}  # CLA_KV_DTYPE
ROW = re.compile(r"(?P<role>decode|prefill)_(?P<unit>dpas\d+)__(?P<tile>\w+?)__d(?P<head>\d+)_"
                 r"(?P<query>f16|bf16)_")
INTEL = pathlib.Path(__file__).with_name("intel.sh")


def scratch(directory, name, cache, chosen):
    """The bytes of scratch of a dumped kernel over this cache with these options."""
    text = (directory / f"{name}.options").read_text()
    text = re.sub(r"-DCLA_KV_DTYPE=\d", f"-DCLA_KV_DTYPE={TYPES[cache]}", text)
    text = re.sub(f"-DCLA_({'|'.join(OPTIONS)})=1", "", text)
    text = re.sub(r"-DCLA_CACHE_X=\d+", f"-DCLA_CACHE_X={8 if TYPES[cache] <= 2 else 16}", text)
    copy = directory / f"{name}.{cache}.{'_'.join(chosen)}.cl"
    copy.write_text((directory / f"{name}.cl").read_text())
    copy.with_suffix(".options").write_text(text + "".join(f" -DCLA_{o}=1" for o in chosen))
    run = subprocess.run(["sh", INTEL, copy], capture_output=True, text=True, check=False)
    copy.unlink()
    copy.with_suffix(".options").unlink()
    found = re.search(r"(\d+) B scratch", run.stdout)
    if run.returncode != 0 or not found:
        sys.exit(f"{copy.name}: {run.stdout}{run.stderr}")
    return int(found[1])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = pathlib.Path(sys.argv[1])
    rows = {row.groups(): (path.stem, row)  # one of each tile, head size and type of query
            for path in sorted(directory.glob("*_dpas*.cl")) if (row := ROW.match(path.stem))}
    jobs = [(name, row, cache, options)
            for (name, row), options in itertools.product(rows.values(), SETS)
            for cache in (row["query"], "fp8_e4m3", "int8")]
    if not jobs:
        sys.exit(f"{directory}: no kernels of Intel's matrix units")
    tiles = collections.defaultdict(dict)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda job: scratch(directory, job[0], job[2], SETS[job[3]]), jobs)
        for (_, row, cache, options), size in zip(jobs, results):
            shape = (row["role"], row["unit"], row["head"], row["query"], cache, options)
            tiles[shape][row["tile"]] = size
    for shape, sizes in sorted(tiles.items()):
        if any(sizes.values()):
            print(*shape, sizes, "" if min(sizes.values()) == 0 else "ALL SPILL")
    print(f"{len(jobs)} kernels, {len(tiles)} shapes")
    sys.exit(any(min(sizes.values()) > 0 for sizes in tiles.values()))


if __name__ == "__main__":
    main()
