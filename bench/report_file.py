"""Reports as files: JSON with a line for each member, and for each row of measurements.

program/bench/report_text.cpp writes the same form. `read` takes JSON of any form: reports of older
commits are indented.
"""
import json


def read(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def write(path, report):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text(report) + "\n")


def line(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def text(report):
    members = (f"{line(name)}: {member_text(value)}" for name, value in report.items())
    return "{\n" + ",\n".join(members) + "\n}"


def member_text(value):
    if isinstance(value, dict) and "rows" in value:  # a report within another
        return text(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(map(line, value)) + "\n]"
    return line(value)
