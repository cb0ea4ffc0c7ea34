"""The public names of the C++ headers, by a parser that knows just their style."""

import re
from pathlib import Path

INCLUDE = Path(__file__).parents[2] / "include" / "clattn"
_SCOPE = re.compile(r"\b(?:class|struct|enum class)\s+(\w+)[^;=()]*$")
_NOT_NAMES = {"noexcept", "decltype", "sizeof", "alignas", "operator", "requires", "static_assert"}


def _code(text):
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"^#.*?(?<!\\)$", "", text, flags=re.M)
    return re.sub(r"\[\[.*?\]\]", "", text)


def _matching(text, start):
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise ValueError(text[start : start + 80])


def _declared(statement):
    """The name that a declaration declares, or None."""
    statement = re.sub(r"^\s*template\s*<[^;]*?>\s*(?=\w)", "", statement).strip()
    other = r"(friend|typedef|namespace|static_assert)\b|.*\boperator\b"
    if not statement or re.match(other, statement):
        return None
    if alias := re.match(r"using\s+(\w+)\s*=", statement):
        return alias[1]
    if statement.startswith("using") or re.match(r"(class|struct)\s+\w+$", statement):
        return None
    while (flat := re.sub(r"<[^<>]*>", "", statement)) != statement:  # std::function<void(int)>
        statement = flat
    head = re.split(r"=(?!=)", statement)[0] if "(" not in statement.split("=")[0] else statement
    for name in re.findall(r"(~?\w+)\s*\(", head):
        if name not in _NOT_NAMES:
            return None if name.startswith("~") else name
    name = re.findall(r"\w+", re.sub(r"\[[^\]]*\]", "", head))
    return name[-1] if name else None


def _parse(code, scope, found):
    """Adds what a namespace (scope "") or a type declares to `found`: name -> members."""
    start = at = 0
    public = not scope.startswith("class ")
    own = scope.split()[-1] if scope else None
    while at < len(code):
        if access := re.compile(r"\s*(public|protected|private)\s*:(?!:)").match(code, start):
            public = access[1] == "public"
            start = at = access.end()
        elif code[at] == ";" or code[at] == "{":
            statement, end, body = code[start:at], at, None
            if code[at] == "{":
                end = _matching(code, at)
                body = code[at + 1 : end]
            kind = _SCOPE.search(statement)
            if body is not None and re.search(r"\bnamespace\b", statement):
                if re.search(r"\bclattn\s*$", statement):  # not those inside it
                    _parse(body, "", found)
            elif body is not None and kind and "(" not in statement:
                if public:
                    types = found if own is None else found[own]
                    if "enum" in statement:
                        types.setdefault(kind[1], {})
                    elif own is None:
                        found.setdefault(kind[1], {})
                        _parse(body, kind[0].split()[0] + " " + kind[1], found)
                    else:
                        types.setdefault(kind[1], {})
            elif body is not None and not re.search(r"\)[^()]*$", statement):
                at = end + 1  # an initialiser: the declaration goes on
                continue
            elif public and (name := _declared(statement)) and name != own:
                (found if own is None else found[own]).setdefault(name, {})
            at = start = end + 1
        else:
            at += 1


def public_names(folder=INCLUDE, pattern="*.hpp"):
    """Names of namespace clattn, each with those of its public members."""
    found = {}
    for header in sorted(folder.glob(pattern)):
        _parse(_code(header.read_text()), "", found)
    return found
