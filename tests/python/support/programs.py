"""Programs in a folder, run by plain Python and by `python -m ampfuse`."""

import os
import subprocess
import sys

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

    def run(self, *arguments, **options):
        command = [sys.executable, *arguments]
        options = {"cwd": self.folder, "env": ENVIRONMENT, "text": True} | options
        return subprocess.run(command, capture_output=True, check=False, **options)

    def both(self, *arguments, **options):
        """Run a program without and with ampfuse."""
        return self.run(*arguments, **options), self.run(
            "-m", "ampfuse", "--quiet", *arguments, **options
        )


def assert_same(plain, ours):
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr
    assert ours.returncode == plain.returncode
