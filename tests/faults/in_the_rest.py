"""Faults in checkpoints, patching, the tools, the build and the benchmarks."""

from fault import Fault

FAULTS = [
    # --- checkpoints ---
    Fault(
        "Tensors stored in another order, as channels_last ones, are not verified before a load.",
        "python/ampfuse/checkpoint/_tree.py",
        """\
    if "$order" in value:
        return [value["$order"][1]]
    return tensors_of(list(value.values()))
""",
        """\
    return tensors_of(list(value.values()))
""",
        "tests/python/checkpoint",
    ),
    Fault(
        "Old checkpoints are removed before the new one is in place.",
        "python/ampfuse/checkpoint/_folder.py",
        """\
        self.unfinished.rename(self.path)
        flush(self.path.parent)
        remove_others(self.path, keep)
""",
        """\
        remove_others(self.path, keep)
        self.unfinished.rename(self.path)
        flush(self.path.parent)
""",
        "tests/python/checkpoint",
    ),
    Fault(
        "load(rng=False) sets the random states nevertheless if an optimizer is loaded.",
        "python/ampfuse/checkpoint/_load.py",
        'if "rng" in stored and (resumes if rng is None else rng):',
        'if "rng" in stored and (resumes or rng):',
        "tests/python/checkpoint",
    ),
    Fault(
        "A process that was forked during a save keeps the run locked after the save.",
        "python/ampfuse/checkpoint/_folder.py",
        "            exits.callback(fcntl.flock, lock, fcntl.LOCK_UN)",
        "           ",
        "tests/python/checkpoint",
    ),
    Fault(
        "An optimizer that maximizes does not do so after C++ has loaded its checkpoint.",
        "csrc/checkpoint/optimizer_archive.cpp",
        "if (stored.contains(name)) {",
        'if (stored.contains(name) && name != "maximize") {',
        "test_cpp tests/python/checkpoint",
    ),
    # --- patching ---
    Fault(
        "A parameter that is in a group twice gets ampfuse's optimizer.",
        "python/ampfuse/patching/optimizers.py",
        """\
        if len(set(params)) < len(params):
            return "a parameter that is in a group twice"
""",
        "",
        "tests/python/patching",
    ),
    Fault(
        "unpatch() inside of a patched() block ends the block's patching.",
        "python/ampfuse/patching/__init__.py",
        "part.is_patched = False",
        "part.is_patched, part.blocks = False, 0",
        "tests/python/patching",
    ),
    Fault(
        "A loss that ours refuses and torch computes loses its label_smoothing.",
        "python/ampfuse/patching/losses.py",
        """\
            "label_smoothing": label_smoothing,
""",
        "",
        "tests/python/patching",
    ),
    # --- memory ---
    Fault(
        "The account takes the forward of an optimizer's closure for a part of its step.",
        "python/ampfuse/tools/memory/recorder.py",
        "phase = STEP if self._stepping and not torch.is_grad_enabled() else FORWARD",
        "phase = STEP if self._stepping else FORWARD",
        "tests/python/memory",
    ),
    Fault(
        "A plan lists allowed changes that save nothing.",
        "python/ampfuse/tools/memory/plan.py",
        "if changed.peak()[0] < record.peak()[0]:",
        "if changed.peak()[0] <= record.peak()[0]:",
        "tests/python/memory",
    ),
    Fault(
        "If the whole batch is a multiple of the largest one, it gets one micro-batch too many.",
        "python/ampfuse/tools/memory/batch.py",
        "count = -(-effective // largest)",
        "count = effective // largest + 1",
        "tests/python/memory",
    ),
    Fault(
        "The monitor counts no more steps after the first optimizer is gone.",
        "python/ampfuse/tools/hooks.py",
        "if self._reference is None or self._reference() is None:",
        "if self._reference is None:",
        "tests/python/memory",
    ),
    # --- precision ---
    Fault(
        "A trial in float16 divides gradients of earlier micro-batches by the scale once more.",
        "python/ampfuse/tools/precision/scaling.py",
        """\
        if accumulated := gradients_of(params):
            torch._foreach_mul_(accumulated, self.scale)
""",
        "",
        "tests/python/precision",
    ),
    Fault(
        "An operator that makes infinities in float32, too, is blamed for those in 16 bits.",
        "python/ampfuse/tools/precision/judge.py",
        "if found[:2] not in expected:",
        "if found:",
        "tests/python/precision",
    ),
    # --- diagnosis ---
    Fault(
        "A loader counts the batches of steps that are no longer measured.",
        "python/ampfuse/tools/diagnosis/clock.py",
        """\
        self._notes.clear()
        self._loader_exits.close()
""",
        """\
        self._notes.clear()
""",
        "tests/python/diagnosis",
    ),
    Fault(
        "The first start of a loader's workers counts as one that persistent workers would save.",
        "python/ampfuse/tools/diagnosis/loaders.py",
        "if self._has_trained:",
        "if True:",
        "tests/python/diagnosis",
    ),
    # --- commands ---
    Fault(
        "Compared times are within the spread if only one of them reaches into the other's.",
        "python/ampfuse/tools/command/compare.py",
        "low <= other_high and other_low <= high",
        "low <= other_high or other_low <= high",
        "tests/python/command",
    ),
    Fault(
        "A script that is run by a symbolic link cannot import the modules beside its file.",
        "python/ampfuse/tools/command/program.py",
        "sys.path[0] = os.path.dirname(os.path.realpath(file))",
        "sys.path[0] = os.path.dirname(file)",
        "tests/python/command",
    ),
    Fault(
        "A program that sets RANK for its own use gets no report.",
        "python/ampfuse/__main__.py",
        "self._process and self._is_first_rank",
        'self._process and os.environ.get("RANK", "0") == "0"',
        "tests/python/command",
    ),
    # --- the build ---
    Fault(
        "The build takes CMake 3.5 for newer than 3.27.",
        "setup.py",
        "(int(match[1]), int(match[2])) >= (3, 27)",
        "float(match[0]) >= 3.27",
        "tests/python/install/test_packaging.py",
    ),
    Fault(
        "find_package(ampfuse) accepts a torch of another minor release than it was built for.",
        "csrc/cmake/ampfuseConfig.cmake.in",
        'set(_ampfuse_folder "${CMAKE_CURRENT_LIST_DIR}/torch${AMPFUSE_TORCH_MINOR}")',
        'file(GLOB _ampfuse_folder "${CMAKE_CURRENT_LIST_DIR}/torch2*")\n'
        "list(GET _ampfuse_folder 0 _ampfuse_folder)",
        "tests/python/install/test_packaging.py",
    ),
    # --- benchmarks ---
    Fault(
        "What a provider holds between two runs does not count as its memory.",
        "benchmarks/harness/measure.py",
        "provider.held() + extra_peak(device, provider.run)",
        "extra_peak(device, provider.run)",
        "tests/python/bench",
    ),
]
