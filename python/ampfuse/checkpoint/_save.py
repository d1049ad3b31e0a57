"""`save`: writes a checkpoint, at once or in the background."""

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ampfuse._arguments import checked_count
from ampfuse._random import random_states
from ampfuse.amp.gate import Gate
from ampfuse.checkpoint import _ranks
from ampfuse.checkpoint._errors import required
from ampfuse.checkpoint._folder import Writing
from ampfuse.checkpoint._parts import check_arguments, is_model, refuse_shards, state_of
from ampfuse.checkpoint._tree import Encoder
from ampfuse.checkpoint._write import Written, joined, leave_note, note_of, write_files, writing


class Saving:
    """A checkpoint that is being written, or has been; `save` returns it.

    Args:
        path: The folder of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        """The folder of the checkpoint, which is there when it is complete."""
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def wait(self) -> Path:
        """Wait until the checkpoint is on the disk.

        A save in the background is waited for on rank 0. Other ranks wait for what they write.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self.path

    def done(self) -> bool:
        """Return True if this rank has written its part, or failed to.

        On rank 0 and without other ranks, the checkpoint is then there, unless `wait()` raises.
        """
        return self._thread is None or not self._thread.is_alive()

    def _start(self, function: Callable[[], None]) -> None:
        """Write the checkpoint in a thread, which the interpreter waits for before it exits."""
        self._thread = threading.Thread(target=self._run, args=[function], name="checkpoint")
        self._thread.start()

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self._error = error
            raise  # it is printed, even if nobody waits


def save(
    path: str | os.PathLike[str],
    *,
    step: int,
    values: Any = None,
    rng: bool = True,
    gradients: bool = False,
    keep: int | None = None,
    background: bool = False,
    **objects: Any,
) -> Saving:
    """Write a checkpoint of this step into the folder `path` of a run.

    All ranks call it. Each rank writes its shards of DTensors (FSDP2, tensor parallel), and rank 0
    the rest of models and optimizers. Other states that differ, as those of loaders and random
    numbers do, are stored for each rank.

    The checkpoint is complete or not there, whenever the process is killed. It holds tensors as
    safetensors and the rest as JSON. Nothing is executed when it is loaded. If it cannot be
    written, earlier checkpoints are as they were. The host waits for the copies of tensors on a
    GPU.

    Args:
        path: The folder of the run, which is made if needed.
        step: The number of the step; a checkpoint of the same step is replaced.
        values: Numbers, texts, tensors, and lists, tuples and dicts of them; `load` returns those
            of rank 0.
        rng: Store the states of the random number generators of Python, NumPy and torch.
        gradients: Store the gradients of models, too, for a save between two micro-batches.
        keep: Number of checkpoints that are left: this one and those of the highest earlier steps.
            Checkpoints of later steps, which another run has saved, stay. None keeps all.
        background: Return when all tensors are copied, and write in a thread. The next save waits
            for it. An error is printed, and raised by `wait()` of the result.
        **objects: What has a `state_dict` and `load_state_dict`, by any name, for example `model=`,
            `optimizer=`, `scaler=`, `scheduler=` and `loader=` (a StatefulDataLoader). DDP and
            torch.compile may be around a model.

    Returns:
        A `Saving`, whose `path` is the folder of the checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be written.
        TypeError: `step` or `keep` is not an int, or an object or value cannot be stored.
        ValueError: `step` or `keep` is out of range.
        ImportError: safetensors or xxhash is missing: `pip install safetensors xxhash`.

    Examples:
        >>> import tempfile, torch, ampfuse.checkpoint
        >>> model = torch.nn.Linear(3, 2)
        >>> folder = tempfile.mkdtemp()
        >>> ampfuse.checkpoint.save(folder, step=10, model=model).path.name
        'step-00000010'
        >>> ampfuse.checkpoint.load(folder, model=model).step
        10
    """
    step = checked_count("save: step", step, least=0)
    if keep is not None:
        keep = checked_count("save: keep", keep, least=1)
    check_arguments(path, objects, "save")
    for module in ("safetensors.torch", "xxhash"):
        required(module)
    folder, (rank, size) = Path(path).absolute(), _ranks.rank_and_size()
    encode = Encoder()
    content = {
        "step": step,
        "parts": _encoded(encode, objects, values, rng=rng, gradients=gradients),
    }
    tensors = {
        name: tensor
        for name, tensor in encode.tensors.items()
        if (encode.shards[name].is_first if name in encode.shards else rank == 0)
    }
    if background:
        tensors = _ranks.run_on_all_ranks(
            lambda: {name: one.to("cpu", copy=True) for name, one in tensors.items()}
        )
    opened: list[Writing] = []  # on rank 0, until it is finished or a thread finishes it

    def begin() -> tuple[Path, Path]:
        with writing(folder, step):
            opened.append(Writing(folder, step))
        return opened[0].path, opened[0].unfinished

    def write() -> Written:
        with writing(folder, step):
            return write_files(unfinished, tensors, encode.shards, rank)

    def finish(checkpoint: Writing, parts: Iterable[Written]) -> None:
        with writing(folder, step):
            checkpoint.finish(content | joined(parts), keep)

    def write_all(checkpoint: Writing) -> None:
        others = range(1, size if encode.shards else 1)
        try:
            finish(checkpoint, [write(), *(note_of(unfinished, other) for other in others)])
        finally:
            checkpoint.close()

    def write_part() -> None:
        with writing(folder, step):
            leave_note(unfinished, rank, write)

    try:
        path, unfinished = _ranks.get_from_rank_0(begin)
        saving = Saving(path)
        if not background:
            parts = _ranks.gathered(_ranks.run_on_all_ranks(write))
            _ranks.get_from_rank_0(lambda: finish(opened[0], parts))
        elif rank == 0:
            (checkpoint,) = opened
            saving._start(lambda: write_all(checkpoint))
            opened.clear()
            checkpoint.hand_over()
        elif encode.shards:
            saving._start(write_part)
    finally:
        for checkpoint in opened:
            checkpoint.close()
    return saving


def _encoded(
    encode: Encoder, objects: dict[str, Any], values: Any, *, rng: bool, gradients: bool
) -> dict[str, Any]:
    """Encode all that is saved. Only the result on rank 0 is used."""
    is_alone = _ranks.rank_and_size()[1] == 1

    def encode_this_rank() -> tuple[dict[str, Any], dict[str, Any], bytes]:
        shared, own = {}, {}
        for value in objects.values():
            if isinstance(value, Gate):
                value.wait()  # before the optimizer's rate is read
        for name, value in objects.items():
            state = state_of(value, gradients=gradients)
            if is_model(value) or hasattr(value, "param_groups"):
                shared[name] = encode(state, name)
            else:
                refuse_shards(state, name)
                own[name] = state
        if rng:
            own["rng"] = random_states()
        refuse_shards(values, "values")
        # They come last, so that tensors of models that are in them keep their names.
        shared["values"] = encode(values, "values")
        return shared, own, b"" if is_alone else _ranks.pack(own)

    shared, own, packed = _ranks.run_on_all_ranks(encode_this_rank)
    _ranks.check_same(encode, [*shared, *own])
    if is_alone:
        return shared | {name: encode(state, name) for name, state in own.items()}
    return shared | _ranks.merge(encode, packed)
