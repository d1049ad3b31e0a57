"""Programs in a folder, run by plain Python and by `python -m ampfuse`."""

import json
import os
import subprocess
import sys

import warm

ENVIRONMENT = {**os.environ, "COLUMNS": "120"}


class Programs:
    """A folder of programs."""

    def __init__(self, folder):
        self.folder = folder

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return self

    def run(self, *arguments, fresh=False, **options):
        """Run Python with these arguments. A fresh process is one that has imported nothing."""
        command = [sys.executable, *map(str, arguments)]
        options = {"cwd": self.folder, "env": ENVIRONMENT, "text": True} | options
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        run = subprocess.run if fresh else warm.run
        return run(command, check=False, **streams | options)

    def ours(self, *arguments, **options):
        """Run `python -m ampfuse` with these arguments."""
        return self.run("-m", "ampfuse", *arguments, **options)

    def reported(self, *arguments, **options):
        """Run a program with ampfuse; return the process and its report."""
        done = self.ours("--json", "told.json", *arguments, **options)
        return done, json.loads((self.folder / "told.json").read_text())

    def both(self, *arguments, fresh=False, **options):
        """Run a program without ampfuse, as Python itself does, and with ampfuse."""
        plain = self.run(*arguments, fresh=True, **options)
        return plain, self.ours("--quiet", *arguments, fresh=fresh, **options)


def assert_same(plain, ours):
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr
    assert ours.returncode == plain.returncode
