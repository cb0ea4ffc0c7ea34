"""What is shown of long work on a terminal."""

import sys
from typing import TextIO


class ProgressBar:
    """A line on a terminal that tells how much is done, to be passed as `progress`.

    Where the stream, standard error by default, is no terminal, nothing is printed. In a `with`
    statement the line ends even if the call that it was passed to fails.
    """

    WIDTH = 30

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self.title = title
        self.stream = sys.stderr if stream is None else stream
        self._open = False

    def __call__(self, done: int, total: int) -> None:
        if not self.stream.isatty() or total == 0:
            return
        bar = ("#" * (self.WIDTH * done // total)).ljust(self.WIDTH)
        print(f"\r{self.title} [{bar}] {done} of {total}", end="", file=self.stream, flush=True)
        self._open = True
        if done == total:
            self._end_line()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._end_line()

    def _end_line(self) -> None:
        if self._open:
            print(file=self.stream, flush=True)
        self._open = False
