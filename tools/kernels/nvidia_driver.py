#!/usr/bin/env python3
"""What NVIDIA's own compiler makes of dumped kernels, on a machine with such a card: a line per
kernel in the form of nvidia.sh, for compare_reports.sh, and how many groups a multiprocessor of
compute capability 9.0 has room for. Needs only Python and libOpenCL.

usage: nvidia_driver.py DIR [PART-OF-A-NAME...] > DIR/driver.report
   where DIR was filled by clattn_dump_kernels
"""
import ctypes
import multiprocessing
import os
import pathlib
import re
import sys

GPU, PROGRAM_BINARY_SIZES, PROGRAM_BINARIES, BUILD_LOG = 4, 0x1165, 0x1166, 0x1183
REGISTERS, WARPS, LOCAL_BYTES, MOST_GROUPS = 65536, 64, 228 * 1024, 32  # of a multiprocessor
GROUP_BYTES = 1024  # that the driver keeps of each group's local memory
MARK = b"//@sm_90a "  # src/opencl/program/program.hpp


class Driver:
    """The first GPU of the first platform."""

    def __init__(self):
        self.cl = ctypes.CDLL("libOpenCL.so.1")
        for name in ("clCreateContext", "clCreateProgramWithSource", "clCreateProgramWithBinary"):
            getattr(self.cl, name).restype = ctypes.c_void_p
        platform, self.device = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cl.clGetPlatformIDs(1, ctypes.byref(platform), None))
        self.check(self.cl.clGetDeviceIDs(platform, ctypes.c_ulong(GPU), 1,
                                          ctypes.byref(self.device), None))
        self.context = ctypes.c_void_p(self.cl.clCreateContext(
            None, 1, ctypes.byref(self.device), None, None, None))

    @staticmethod
    def check(status):
        if status != 0:
            raise RuntimeError(f"OpenCL: {status}")

    def build(self, program, options):
        """The log of the build."""
        status = self.cl.clBuildProgram(program, 1, ctypes.byref(self.device), options, None, None)
        size = ctypes.c_size_t()
        self.check(self.cl.clGetProgramBuildInfo(program, self.device, BUILD_LOG, 0, None,
                                                 ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value + 1)
        self.check(self.cl.clGetProgramBuildInfo(program, self.device, BUILD_LOG, size, log, None))
        if status != 0:
            raise RuntimeError(f"build {status}: {log.value.decode(errors='replace')[:300]}")
        return log.value.decode(errors="replace")

    def build_source(self, source, options):
        text = ctypes.c_char_p(source)
        program = ctypes.c_void_p(self.cl.clCreateProgramWithSource(
            self.context, 1, ctypes.byref(text), None, None))
        log = self.build(program, options)
        if b'"' + MARK not in source:
            return log
        return self.build_ptx(enable_marked(self.ptx_of(program)))

    def ptx_of(self, program):
        size = ctypes.c_size_t()
        self.check(self.cl.clGetProgramInfo(program, PROGRAM_BINARY_SIZES, ctypes.sizeof(size),
                                            ctypes.byref(size), None))
        ptx = ctypes.create_string_buffer(size.value + 1)
        at = ctypes.c_void_p(ctypes.addressof(ptx))
        self.check(self.cl.clGetProgramInfo(program, PROGRAM_BINARIES, ctypes.sizeof(at),
                                            ctypes.byref(at), None))
        return ptx.value

    def build_ptx(self, ptx):
        size, text = ctypes.c_size_t(len(ptx)), ctypes.c_char_p(ptx)
        program = ctypes.c_void_p(self.cl.clCreateProgramWithBinary(
            self.context, 1, ctypes.byref(self.device), ctypes.byref(size), ctypes.byref(text),
            None, None))
        return self.build(program, b"-cl-nv-verbose")


def enable_marked(ptx):
    """As src/opencl/program/ptx.cpp does."""
    limited = b"setmaxnreg" in ptx
    lines = []
    for line in ptx.replace(MARK, b"").split(b"\n"):
        lines.append(re.sub(rb"^\.target sm_90(?!a)", b".target sm_90a", line))
        group = re.match(rb"\.reqntid (\d+)", line)
        if limited and group:
            lines.append(b".maxnreg %d" % (REGISTERS // int(group[1]) // 8 * 8))
    return b"\n".join(lines)


def resident_groups(registers, local_bytes, group_size):
    """Registers are dealt out in eights to warps, each of which is on one of four processors."""
    warps = -(-group_size // 32)
    of_warp = -(-registers // 8) * 8 * 32
    return min(REGISTERS // 4 // of_warp * 4 // warps, WARPS // warps, MOST_GROUPS,
               LOCAL_BYTES // (local_bytes + GROUP_BYTES))


def report(path):
    """Lines about the kernels of a file."""
    try:
        options = path.with_suffix(".options").read_text(encoding="utf-8").strip()
        if "-DCLA_PTX=0" not in options:  # as the library does from compute capability 8.9 on
            options = options.replace("-DCLA_FP8_CVT=0", "-DCLA_FP8_CVT=1")
        log = Driver().build_source(path.read_bytes(),
                                    f"-cl-std=CL1.2 -cl-nv-verbose {options}".encode())
    except RuntimeError as error:
        return [f"nvidia driver {path.stem} FAILED: {error}"]
    group_size = int(re.search(r"-DCLA_WG_SIZE=(\d+)", options)[1])
    lines, kernel, spilled = [], "?", 0
    for line in log.splitlines():
        if entry := re.search(r"entry function '(\w+)'", line):
            kernel = entry[1]
        if "spill stores" in line:
            spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", line))
        if used := re.search(r"Used (\d+) registers", line):
            local = re.search(r"(\d+) bytes smem", line)
            registers, local_bytes = int(used[1]), int(local[1]) if local else 0
            groups = resident_groups(registers, local_bytes, group_size)
            lines.append(f"nvidia driver {path.stem} {kernel}: {registers} registers, "
                         f"{local_bytes} B local, {spilled} B spilled, {groups} groups")
            spilled = 0
    return lines or [f"nvidia driver {path.stem} FAILED: its log names no registers"]


def is_for_nvidia(path):
    kind = path.with_suffix(".kind").read_text(encoding="utf-8")
    options = path.with_suffix(".options").read_text(encoding="utf-8")
    return not (kind.startswith(("cpu", "amd")) or "-cl-intel-" in options or
                "-DCLA_PTX=2" in options or "-DCLA_WG_SIZE=" not in options)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    names = sys.argv[2:] or [""]
    paths = [path for path in sorted(pathlib.Path(sys.argv[1]).glob("*.cl"))
             if is_for_nvidia(path) and any(name in path.stem for name in names)]
    failed = 0
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for lines in pool.imap(report, paths):
            failed += sum("FAILED" in line for line in lines)
            print("\n".join(lines), flush=True)
    sys.exit(1 if failed or not paths else 0)


if __name__ == "__main__":
    main()
