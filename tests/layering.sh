#!/bin/sh
# Fails when a module includes, calls or prints what its row does not allow. The rows are the table
# "Modules" of docs/architecture.md.
# usage: tests/layering.sh [ROOT]
set -eu
export LC_ALL=C
cd "${1:-$(dirname "$0")/..}"

folders=
for folder in include src program oracle kernels_cl bench python tools/amd-emulator; do
  if [ -d "$folder" ]; then folders="$folders $folder"; fi
done
if [ -z "$folders" ]; then
  echo "layering: no sources under $PWD" >&2
  exit 1
fi

# awk text; a list of folders; file names of the tree have no blanks
# shellcheck disable=SC2016,SC2086
find $folders -type f \( -name '*.[ch]pp' -o -name '*.h' -o -name '*.inc' -o -name '*.cl' \
  -o -name '*.clh' \) | sort | xargs awk '
  # Quoted includes: the modules whose files a module may include. "shared" is kernels_cl/shared.
  function room_may(room, rooms) { allowed[room] = " " room " " rooms " " }
  # Angle includes that only some modules may use.
  function only(prefix, rooms) { restricted[prefix] = " " rooms " " }
  BEGIN {
    room_may("base", "")
    room_may("metadata", "base shared")
    room_may("files", "")
    room_may("tuning", "base files")
    room_may("opencl", "base files tuning shared")
    room_may("capture", "base files shared")
    room_may("kernels", "base metadata tuning opencl capture shared")
    room_may("kv_cache", "base opencl capture kernels shared")
    room_may("recurrent", "base opencl kernels kv_cache shared")
    room_may("backends", "base metadata opencl capture kernels kv_cache shared")
    room_may("attention", "base metadata opencl capture kernels kv_cache backends shared")
    room_may("compat", "base metadata opencl capture kernels kv_cache backends shared")
    room_may("c_api", "base metadata opencl kernels kv_cache backends attention shared")
    room_may("program", "ceilings oracle files")   # otherwise the public headers
    room_may("ceilings", "base opencl")  # program/ceilings/: launches kernels of its own
    room_may("bench", "oracle")      # likewise
    room_may("python", "")           # the public headers
    room_may("oracle", "")           # shares nothing with what it judges
    room_may("include", "")
    room_may("amd-emulator", "machine decode exec driver")  # its own folders: a project apart
    room_may("kernels_cl/shared", "shared")
    room_may("kernels_cl/core", "core shared")
    room_may("kernels_cl/tile", "tile core shared")    # units, whatever is computed by them
    room_may("kernels_cl/attention", "attention tile core shared")
    room_may("kernels_cl/cache", "cache core shared")
    room_may("kernels_cl/recurrent", "recurrent tile core shared")
    own = "base files metadata tuning opencl capture kernels kv_cache recurrent backends"
    own = own " attention"
    own = own " compat c_api program bench python"
    only("clattn/", own " ceilings include")
    only("clattn/compat/", "compat c_api program bench python include")
    only("CL/", "opencl include c_api amd-emulator")
    only("clattn/opencl.hpp", "opencl include c_api")
    only("fmt/", own " ceilings")
    only("xxhash", "metadata opencl")
    only("nlohmann/", "program bench")
    only("CLI/", "program")
  }
  function complain(what) { print FILENAME ":" FNR ": " what; bad = 1 }
  function base_name(path) { sub(/.*\//, "", path); return path }
  # "xformers" for src/backends/xformers_backend.hpp, "" for what several backends share.
  function backend_of(path) {
    path = base_name(path)
    return sub(/_backend\.[a-z]+$/, "", path) ? path : ""
  }
  FNR == 1 {
    split(FILENAME, part, "/")
    room = part[1] == "src" || part[1] == "tools" ? part[2] : part[1]
    program = room == "program"
    if (program && part[2] == "ceilings") room = "ceilings"
    in_kernels = room == "kernels_cl"
    if (in_kernels) room = room "/" part[2]
    library = part[1] == "src"
    in_comment = 0
    files++
    if (!(room in allowed)) complain("no row for the module " room)
  }
  in_kernels && /[^\t -~]/ { complain("not ASCII") }
  {
    line = $0
    if (in_comment) {
      if (!match(line, /\*\//)) next
      line = substr(line, RSTART + 2)
      in_comment = 0
    }
    sub(/\/\/.*/, "", line)
    while (match(line, /\/\*/)) {
      head = substr(line, 1, RSTART - 1)
      tail = substr(line, RSTART + 2)
      if (!match(tail, /\*\//)) { line = head; in_comment = 1; break }
      line = head " " substr(tail, RSTART + 2)
    }
  }
  line ~ /^[ \t]*#[ \t]*include[ \t]*"/ {
    split(line, part, "\"")
    path = part[2]
    target = path ~ /\// ? substr(path, 1, index(path, "/") - 1) : room
    if (target == "program" && index(path, "program/ceilings/") == 1) target = "ceilings"
    if (target == "..") complain("\"" path "\": name the module, not a way out of this one")
    else if (!index(allowed[room], " " target " ")) complain(room " may not include \"" path "\"")
    other = backend_of(path)
    own = backend_of(FILENAME)
    if ((target == "backends" || target == "compat") && own != "" && other != "" && other != own)
      complain("backend " own " includes backend " other)
  }
  line ~ /^[ \t]*#[ \t]*include[ \t]*</ {
    path = line
    sub(/^[^<]*</, "", path)
    for (prefix in restricted)
      if (index(path, prefix) == 1 && !index(restricted[prefix], " " room " "))
        complain(room " may not include <" path)
  }
  in_kernels || room == "amd-emulator" { next }
  # The program is one namespace, and two types of one name are one to the linker.
  program && FILENAME ~ /\.hpp$/ && line ~ /^(struct|class|enum class) [A-Za-z]+[^;]* [:{]/ {
    name = line
    sub(/^(struct|class|enum class) /, "", name)
    sub(/[^A-Za-z].*/, "", name)
    if (name in defined) complain(name " is defined in " defined[name] ", too")
    defined[name] = FILENAME
  }
  line ~ /getenv/ && FILENAME != "src/base/environment.cpp" {
    complain("only src/base/environment.cpp reads the environment")
  }
  room != "opencl" && line ~ /(^|[^A-Za-z0-9_])cl[A-Z][A-Za-z0-9]*[ \t]*\(/ {
    complain("only src/opencl calls the driver")
  }
  library && FILENAME != "src/base/log.cpp" &&
    (line ~ /std::(cout|cerr|clog|abort|exit|terminate|quick_exit)|fmt::print/ ||
     line ~ /(^|[^A-Za-z0-9_])(printf|fprintf|puts|fputs|putchar|abort|exit)[ \t]*\(/) {
    complain("the library prints only in src/base/log.cpp and never ends the process")
  }
  END {
    if (bad) exit 1
    print "layering: " files " files keep to the table"
  }'
