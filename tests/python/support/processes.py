"""Scenarios that two or more ranks run together.

Processes are slow to start, so one group runs all scenarios of a test module, and each test checks
one result. They are forked from a process that has only imported packages: importing torch takes
seconds.
"""

import multiprocessing
import os
import traceback
import warnings

import torch
import torch.distributed as dist

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["ampfuse.checkpoint", "hypothesis", "pytest", "torch._dynamo", "torch.distributed.fsdp"]
)


class Scenarios:
    """The scenarios of a module: functions of one argument that return a dictionary."""

    def __init__(self, ranks=2):
        self.ranks = ranks
        self._functions = {}  # by name and argument
        self._results = []  # of each rank

    def __call__(self, *arguments):
        """Return a decorator. All ranks will call its function with each of the arguments."""

        def register(function):
            for argument in arguments:
                self._functions[function.__name__, argument] = function
            return function

        return register

    def play(self, folder):
        """Run all scenarios, with files in the folder."""
        # The processes have the environment of the one that they are forked from.
        arguments = (str(folder), self._functions, self.ranks, dict(os.environ))
        torch.multiprocessing.start_processes(
            _play, arguments, nprocs=self.ranks, start_method="forkserver"
        )
        files = [folder / f"{rank}.pt" for rank in range(self.ranks)]
        self._results = [torch.load(file, weights_only=False) for file in files]

    def results(self, name, argument):
        """Return each rank's result. Fail if there was an error or a warning of stale masters."""
        results = [of_process[name, argument] for of_process in self._results]
        for result in results:
            assert not isinstance(result, str), result
            assert result["warnings"] == []
        return results


def _play(rank, folder, functions, ranks, environment):
    os.environ.update(environment)
    start = f"file://{folder}/init"
    dist.init_process_group("gloo", init_method=start, rank=rank, world_size=ranks)
    results = {}
    for (name, argument), function in functions.items():
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results[name, argument] = function(argument)
            stale = [str(w.message) for w in caught if "sync_masters" in str(w.message)]
            results[name, argument]["warnings"] = stale
        except Exception:
            results[name, argument] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    # gloo's threads take Python's lock to release tensors, and abort if the interpreter is gone.
    os._exit(0)
