"""The benchmarks: their counts of bytes and products, and the agreement of their providers."""

from pathlib import Path

import ampfuse
import bench_cross_entropy
import bench_fused_adam
import bench_fused_sgd
import bench_grad_scaler
import bench_linear_cross_entropy
import bench_multi_tensor
import bench_patched_step
import pytest
import shapes
import torch
from harness import OURS, Products, Settings
from harness.report import read_rows

BF16, FP32 = torch.bfloat16, torch.float32
M = 2**20


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling takes seconds
    monkeypatch.setattr(bench_linear_cross_entropy, "ROWS_AT_A_TIME", 64)


def losses(bench, shape):
    return [
        bench.case(operation, shape, dtype)
        for operation in bench.OPERATIONS
        for dtype in operation.dtypes
    ]


def lists(bench, shape, *dtype):
    return [bench.case(operation, shape, *dtype) for operation in bench.OPERATIONS]


# Passes over the logits: reads and writes at the floor, and reads plus writes of ampfuse.
PASSES = {
    "loss": (1, 0, 1),
    "train": (1, 1, 2),
    "train_smoothing": (1, 1, 2),
    "train_in_place": (1, 1, 2),
    "train_none": (1, 1, 3),
}
LOGITS = (64, 1000)
# Bytes per logit that torch moves, counted by hand from the tensors that each kernel reads and
# writes: cast, log_softmax, zeros, backward of log_softmax, cast.
TORCH = {
    ("loss", BF16, "torch .float()"): (2 + 4) + (4 + 4),
    ("loss", BF16, "torch"): 2 + 2,
    ("loss", FP32, "torch"): 4 + 4,
    ("train", BF16, "torch .float()"): (2 + 4) + (4 + 4) + 4 + (4 + 4 + 4) + (4 + 2),
    ("train", BF16, "torch"): (2 + 2) + 2 + (2 + 2 + 2),
    ("train", FP32, "torch"): (4 + 4) + 4 + (4 + 4 + 4),
}


def test_floors_of_cross_entropy_match_a_hand_count():
    for case in losses(bench_cross_entropy, LOGITS):
        read, written, _ = PASSES[case.operation]
        size = 64 * 1000 * case.dtype.itemsize
        assert (case.traffic.read, case.traffic.written) == (read * size, written * size)


def test_moved_bytes_of_cross_entropy_match_a_hand_count():
    settings = Settings(torch.device("cpu"), False, 3, 1, Path(), "*")
    moved = {
        (case.operation, case.dtype, provider.name): provider.moves
        for case in losses(bench_cross_entropy, LOGITS)
        for provider in case.setup(settings)
    }
    assert {key: moved[key] for key in TORCH} == TORCH
    ours = {key: bytes_ for key, bytes_ in moved.items() if key[2] == OURS}
    assert ours == {key: PASSES[key[0]][2] * key[1].itemsize for key in ours}


LAYER = (160, 24, 700)
# Matrix products at the floor: the logits, and the gradients of hidden states and weight.
PRODUCTS = {"train": 3, "train_frozen": 2, "train_none": 3, "loss": 1}


def test_floors_of_linear_cross_entropy_match_a_hand_count():
    for case in losses(bench_linear_cross_entropy, LAYER):
        flops = PRODUCTS[case.operation] * 2 * 160 * 24 * 700
        assert case.traffic == Products(flops, case.dtype)


def test_gpu_cases_use_layers_of_the_models_and_cpu_cases_narrower_ones():
    layers = bench_linear_cross_entropy.LAYERS
    assert {shape[1:] for shape in bench_linear_cross_entropy.GPU} == set(layers)
    narrow = {(features // 8, classes) for features, classes in layers}
    assert {shape[1:] for shape in bench_linear_cross_entropy.CPU} == narrow | {(512, 50257)}


@pytest.mark.parametrize(
    ("bench", "quick"), [(bench_cross_entropy, 6), (bench_linear_cross_entropy, 1)]
)
def test_ids_of_cases_are_unique_and_few_cases_are_quick(bench, quick):
    for shapes_of_machine in (bench.CPU, bench.GPU):
        listed = [case for shape in shapes_of_machine for case in losses(bench, shape)]
        assert len({case.id for case in listed}) == len(listed)
        assert sum(case.quick for case in listed) == quick


# Passes over a list of gradients, and bytes per parameter that are read or written: gradient,
# model, moments, master or remainder.
LISTS = {"total_norm": 1, "clip": 3, "clip_below_limit": 1, "unscale": 2, "unscale_norm_clip": 3}
SCALERS = {"step": 2, "step_clip": 3, "step_clip_below_limit": 2, "step_on_device": 1}
ADAM = {
    ("update", FP32): 28,
    ("step", FP32): 32,
    ("update", BF16): 28,
    ("step", BF16): 30,
    ("step_remainder", BF16): 28,
    ("step_smallest", BF16): 20,
    ("step_8bit", BF16): 16,
    ("step_stochastic", BF16): 12,
}
SGD = {("update", FP32): 20, ("step", FP32): 24, ("step", BF16): 22}


def floors(cases):
    return {(case.operation, case.dtype): case.traffic.total for case in cases}


def test_floors_of_lists_match_a_hand_count():
    for dtype in (FP32, BF16):
        found = floors(lists(bench_multi_tensor, "64x1M", dtype))
        assert found == {(n, dtype): p * 64 * M * dtype.itemsize for n, p in LISTS.items()}
    found = floors(lists(bench_grad_scaler, "10x64K"))
    assert found == {(name, FP32): passes * 10 * 65_536 * 4 for name, passes in SCALERS.items()}
    found = floors(lists(bench_fused_adam, "64x1M"))
    assert found == {key: bytes_ * 64 * M for key, bytes_ in ADAM.items()}
    found = floors(lists(bench_fused_sgd, "64x1M"))
    assert found == {key: bytes_ * 64 * M for key, bytes_ in SGD.items()}
    floor = bench_patched_step.case("100x1K").traffic.total
    assert floor == (8 + 8 + 28) * 100 * 1024


def test_models_have_their_published_size():
    sizes = {name: shapes.element_count(make()) for name, make in shapes.MODELS.items()}
    # llama-1b has the shapes of Llama 3.2 1B.
    assert sizes == {"gpt2-124m": 124_439_808, "resnet50": 25_557_032, "llama-1b": 1_235_814_400}


def measured(rows):
    return [row["provider"] for row in rows if row["status"] == "ok"]


@pytest.mark.slow
def test_providers_of_cross_entropy_agree_on_every_operation(run):
    status, rows = run(losses(bench_cross_entropy, LOGITS))
    assert status == 0
    skipped = [row for row in rows if row["status"] != "ok"]
    assert [(row["dtype"], row["provider"]) for row in skipped] == [("float16", "torch")]


@pytest.mark.slow
def test_providers_of_linear_cross_entropy_agree_on_every_operation(run):
    status, rows = run(losses(bench_linear_cross_entropy, LAYER))
    assert status == 0
    assert {row["status"] for row in rows} == {"ok"}
    assert all(float(row["gflop_per_s"]) > 0 and row["peak_mib"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "dtype", "providers"),
    [
        (bench_multi_tensor, [FP32], ["torch foreach", OURS]),
        (bench_fused_adam, [], ["torch fused", "torch foreach", OURS]),
        (bench_fused_sgd, [], ["torch fused", "torch foreach", "torch for-loop", OURS]),
        (bench_grad_scaler, [], ["torch", OURS]),
    ],
)
def test_providers_of_lists_agree_on_every_operation(run, monkeypatch, bench, dtype, providers):
    # More tensors than are compiled, of several sizes.
    for models in (shapes.MODELS, bench_grad_scaler.LISTS):
        monkeypatch.setitem(models, "small", lambda: [(64, 3, 7), (64,), (100, 31)] * 90)
    status, rows = run(lists(bench, "small", *dtype))
    assert status == 0
    assert measured(rows) == providers * len(bench.OPERATIONS)


WITH_A_SMALL_CACHE = """
import runpy, sys
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
from harness import machine, timing
machine.CEILING_BYTES["cpu"] = 2**20
timing.cache_bytes = lambda _: 2**20
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_benchmark_runs_as_a_program(programs, tmp_path):
    options = ("--quick", "--rounds", "3", "--cases", "step/10x1K/*", "--out", tmp_path)
    done = programs.run("-c", WITH_A_SMALL_CACHE, bench_grad_scaler.__file__, *options)
    assert done.returncode == 0, done.stderr
    assert [row.status for row in read_rows(tmp_path / "grad_scaler.csv")] == ["ok", "ok"]


@pytest.mark.slow
def test_patched_and_unpatched_steps_agree(run):
    try:
        status, rows = run([bench_patched_step.case("100x1K")])
    finally:
        ampfuse.unpatch()
    assert status == 0
    assert measured(rows) == ["torch", "torch fused=True", OURS]


@pytest.mark.parametrize(
    ("name", "bench", "shape", "factor"),
    [
        ("cross_entropy", bench_cross_entropy, LOGITS, 1.05),
        ("cross_entropy", bench_cross_entropy, LOGITS, 0.0),
        ("linear_cross_entropy", bench_linear_cross_entropy, LAYER, 1.5),
    ],
)
def test_provider_with_right_loss_but_wrong_gradient_is_reported_as_failed(
    run, monkeypatch, name, bench, shape, factor
):
    def wrong(*args, **options):
        loss = right(*args, **options)
        return loss * factor + loss.detach() * (1 - factor)

    right = getattr(ampfuse, name)
    monkeypatch.setattr(ampfuse, name, wrong)
    status, rows = run([case for case in losses(bench, shape) if case.operation == "train"])
    assert status == 1
    ours = {row["status"] for row in rows if row["provider"] == OURS}
    assert ours == {"failed: result 1 differs from the reference's"}


def test_restore_puts_back_logits_that_a_run_overwrote():
    operation = bench_cross_entropy.Operation("train_in_place", in_place=True)
    batch = bench_cross_entropy.Batch(operation, LOGITS, BF16, torch.device("cpu"))
    criterion = bench_cross_entropy.ampfuse_criterion(batch)
    first = [result.detach().clone() for result in batch.run(criterion)]
    batch.restore()
    again = batch.run(criterion)
    assert all(map(torch.equal, first, again))


def test_program_uses_ampfuse_classes_only_while_patched():
    kinds = []
    for patched in (False, True):
        with ampfuse.patched() if patched else torch.no_grad():
            program = bench_patched_step.Program([torch.ones(3)])
            kinds.append((program.optimizer, program.scaler))
    plain, ours = kinds
    assert list(map(type, plain)) == [torch.optim.AdamW, torch.amp.GradScaler]
    assert all(map(isinstance, ours, (ampfuse.AdamW, ampfuse.GradScaler)))
