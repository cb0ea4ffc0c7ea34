"""Python has what the C++ headers have, or docs/bindings.md says where it is or why not."""

import re
from pathlib import Path

import clattn
import headers
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "bindings.md"
#: Headers of compat/ whose names Python has; docs/bindings.md names the others.
COMPAT = (
    "derived_batches.hpp", "packed_cache.hpp", "page.hpp", "paged_attention.hpp",
    "virtual_batches.hpp", "vllm_layer.hpp",
)  # fmt: skip


def functions():
    """C++ names of the tables in docs/bindings.md, each with Python's cell."""
    rows = re.findall(r"^\| `([\w:]+)` \| [^|]* \| ([^|]*) \|$", PAGE.read_text(), re.M)
    return dict(rows)


def others():
    """C++ names of the list in docs/bindings.md, each with what stands for it."""
    part = PAGE.read_text().split("## What has another form in Python")[1].split("\n## ")[0]
    items = [" ".join(item.split()) for item in part.split("\n- ")[1:]]
    rows = [item.split(": ", 1) for item in items]
    return {name: row[1] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def public():
    names = headers.public_names()
    for header in COMPAT:
        names |= headers.public_names(headers.INCLUDE / "compat", header)
    return names


def in_python(name):
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name[1:])
    return hasattr(clattn, name) or (name[0] == "k" and hasattr(clattn, words.upper()))


def arguments():
    """Names of the arguments of every function of the module."""
    found = set()

    def visit(scope):
        for name in dir(scope):
            each = getattr(scope, name)
            if isinstance(each, type) and each.__module__.startswith("clattn"):
                if scope is clattn._clattn:
                    visit(each)
            elif callable(each):
                found.update(re.findall(r"(\w+): ", each.__doc__ or ""))

    visit(clattn._clattn)
    return found


def missing(names, table):
    """What is neither in Python nor in the table. Fields of structs may be arguments."""
    known_arguments = arguments()
    for name, members in names.items():
        if not in_python(name):
            if name not in table:
                yield name
                continue
            there = set(members)
            if "argument" in table[name]:
                there = known_arguments
            elif owner := re.match(r"fields of `(\w+)`", table[name]):
                there = set(dir(getattr(clattn, owner[1])))
            fields = (f"{name}::{f}" for f in members if f not in there)
            yield from (field for field in fields if field not in table)
            continue
        for member in members:
            if not hasattr(getattr(clattn, name, None), member):
                has_constant = hasattr(getattr(clattn, name, None), "MAX_BLOCKS")
                if f"{name}::{member}" not in table and not (
                    member == "kMaxBlocks" and has_constant
                ):
                    yield f"{name}::{member}"


def test_python_has_every_name():
    assert list(missing(public(), functions() | others())) == []


def names_of(function, cell):
    """What a cell says that Python has, as paths from the module on."""
    if cell == "yes":
        return [function.replace("::", ".")]
    if cell.startswith("- "):
        return []
    scope = function.split("::")[0]
    return [scope + name if name[0] == "." else name for name in re.findall(r"`([\w.]+)`", cell)]


def test_python_has_what_the_table_says():
    absent = []
    for function, cell in functions().items():
        names = names_of(function, cell)
        if not names and not cell.startswith("- "):
            absent.append(f"{function}: '{cell}' is neither names nor '- reason'")
        for name in names:
            found = clattn
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is None:
                absent.append(f"{function}: no {name}")
    assert absent == []


def test_configurations_have_every_field():
    rows = (headers.INCLUDE / "attention_config.inc").read_text()
    fields = re.findall(r"^CLATTN_FIELD\(\w+, (\w+)", rows, re.M)
    assert "num_heads" in fields
    for made in (clattn.AttentionConfig(), clattn.AttentionOptions()):
        assert [field for field in fields if not hasattr(made, field)] == []


def test_every_signature_has_types_of_python():
    """nanobind names those of C++ where a conversion is missing; such calls fail."""
    wrong = []

    def visit(scope, path):
        for name, each in vars(scope).items():
            if isinstance(each, type):
                visit(each, f"{path}{name}.")
            elif re.search(r"std::|clattn::", getattr(each, "__doc__", None) or ""):
                wrong.append(path + name)

    visit(clattn._clattn, "")
    assert wrong == []


def test_the_list_names_what_is_there_and_needed():
    names = public()
    every = {*names, *(f"{name}::{member}" for name in names for member in names[name])}
    unknown = [name for name in others() if name not in every and not name.endswith(".hpp")]
    assert unknown == []
    needless = [name for name in others() if "::" not in name and name in names and in_python(name)]
    assert needless == []


def test_every_header_of_compat_is_bound_or_listed():
    found = {path.name for path in (headers.INCLUDE / "compat").glob("*.hpp")}
    listed = {name.split("/")[-1] for name in others() if name.endswith(".hpp")}
    assert found == listed | set(COMPAT)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("namespace A clattn { int f(int a = 3); struct S { int a = 1; void g() const; }; }",
         {"f": {}, "S": {"a": {}, "g": {}}}),
        ("namespace clattn { class C { public: C(); ~C(); int x() { return 1; } private: int y_; "
         "}; enum class E : int { kA }; inline constexpr int kN = 3; using T = int; }",
         {"C": {"x": {}}, "E": {}, "kN": {}, "T": {}}),
        ("namespace clattn::detail { int hidden(); } namespace clattn { struct S { "
         "std::vector<int> v = {}; std::function<void(int)> f = {}; }; class S; }",
         {"S": {"v": {}, "f": {}}}),
    ],
)  # fmt: skip
def test_the_parser(code, names):
    found = {}
    headers._parse(headers._code(code), "", found)
    assert found == names


def test_a_gap_is_noticed():
    assert list(missing({"no_such_function": {}, "Buffer": {"no_such": {}}}, {})) == [
        "no_such_function", "Buffer::no_such",
    ]  # fmt: skip
    fields = {"ForwardOptions": {"lse": {}, "no_such_field": {}}}
    assert list(missing(fields, {"ForwardOptions": "arguments"})) == [
        "ForwardOptions::no_such_field"
    ]
