"""The process's device, and what its layers share."""

import functools
import os
from dataclasses import dataclass, field

import clattn


@dataclass
class Device:
    """A context with the queue on which every step of the process runs in order."""

    context: clattn.Context
    queue: clattn.Queue
    workspace: clattn.AttentionWorkspace = field(default_factory=clattn.AttentionWorkspace)


@functools.cache
def device() -> Device:
    """Opened by the first layer, so behind any fork of vLLM's processes.

    The cache and all tensors are memory of the host, so the device is a CPU unless CLATTN_DEVICE
    names another one.
    """
    context = clattn.Context(os.environ.get("CLATTN_DEVICE", "cpu"))
    return Device(context, context.create_queue())
