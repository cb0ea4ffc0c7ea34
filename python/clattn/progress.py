"""What is shown of long work on a terminal."""

import sys
from typing import TextIO


class ProgressBar:
    """A line on a terminal that tells how much is done, to be passed as `progress`.

    Where the stream, standard error by default, is no terminal, nothing is printed.
    """

    WIDTH = 30

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self.title = title
        self.stream = sys.stderr if stream is None else stream

    def __call__(self, done: int, total: int) -> None:
        if not self.stream.isatty() or total == 0:
            return
        bar = ("#" * (self.WIDTH * done // total)).ljust(self.WIDTH)
        end = "\n" if done == total else ""
        print(f"\r{self.title} [{bar}] {done} of {total}", end=end, file=self.stream, flush=True)
