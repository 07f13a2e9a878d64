"""Recorded launches are compiled without a device, and what a bundle lacks of them is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.backends.repeating_device import check_a_life_with_a_suspend
from tests.tiny_models import tiny_engine, tiny_model

pytest.importorskip("triton")

import triton
import triton.language as tl

from rollout.backends.cuda.ops import TritonOps
from scripts.gpu_bundle import ROOT, TRITON, missing_kernels, pack_kernels, pinned_versions, record
from scripts.kernel_launches import describe, make_libcuda, recorded, with_variants
from tests.backends.launching_device import launching_device

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are not interpreted where there is a device"
)

LOAD = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
for path in sys.argv[1:]:
    spec = spec_from_file_location(path.rpartition("/")[2].partition(".")[0], path)
    spec.loader.exec_module(module_from_spec(spec))
"""


def kernel(pointer, size, scale, other, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Never launched: only its parameters matter."""


def line(size: int = 3, *, offset: int = 0, scale: float = 1.0, block: int = 8) -> str:
    pointer = torch.zeros(9, dtype=torch.float16)[offset:]
    return describe(kernel, (pointer, size, scale, None), {"BLOCK": block, "num_warps": 4})


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (line(3), line(5), True),
        (line(3), line(1), False),
        (line(3), line(16), False),
        (line(32), line(0), True),
        (line(3), line(-3), True),
        (line(3), line(2**31 + 3), False),
        (line(2**31 + 3), line(2**40 + 1), True),
        (line(2**31), line(2**31 + 3), False),
        (line(offset=0), line(offset=8), True),
        (line(offset=0), line(offset=1), False),
        (line(scale=1.0), line(scale=2.0), True),
        (line(block=8), line(block=16), False),
    ],
)
def test_launches_are_told_apart_as_triton_tells_them(one: str, other: str, is_same: bool) -> None:
    assert (one == other) == is_same


def test_a_launch_in_float16_has_variants_with_aligned_pointers_and_in_bfloat16() -> None:
    pointers = [
        json.loads(text)["arguments"]["pointer"] for text in with_variants([line(offset=1)])
    ]
    assert sorted(pointers) == [
        ["tensor", dtype, is_aligned]
        for dtype in ("bfloat16", "float16")
        for is_aligned in (False, True)
    ]


class Bundle(NamedTuple):
    """Recorded launches of two kernels, what was compiled for them, and where it is packed."""

    launches: Path
    packed: Path
    compiled: list[str]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundle")
    launches, packed = folder / "launches", folder / "packed"
    ops, x = TritonOps(), torch.ones(2, 64)
    with recorded(launches) as recorder, recorder.launches_alone():
        for eps in (1e-6, 1e-5):
            ops.rms_norm(x, x[0], eps)
        ops.add_rms_norm(x, x, x[0], 1e-6)
    return Bundle(launches, packed, pack_kernels(launches, packed).names)


def test_launches_of_one_compiled_kernel_are_recorded_once(bundle: Bundle) -> None:
    assert len(bundle.launches.read_text().splitlines()) == 2
    assert sorted(name for name in bundle.compiled if name.endswith("_kernel")) == [
        "add_rms_norm_kernel",
        "rms_norm_kernel",
    ]


def test_a_second_build_compiles_only_what_the_bundle_lacks_and_names_it(
    bundle: Bundle, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    shutil.copytree(bundle.packed, packed)
    shutil.rmtree(next(packed.glob("*/rms_norm_kernel.cubin")).parent)
    assert missing_kernels(bundle.launches, packed) == ["rms_norm_kernel"]


def test_modules_of_the_bundle_load_where_the_drivers_library_is_found(
    bundle: Bundle, tmp_path: Path
) -> None:
    """Each module links against libcuda, so no earlier import has to load it."""
    make_libcuda(tmp_path)
    modules = [str(path) for path in bundle.packed.glob("*/*.so")]
    assert modules
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", LOAD, *modules], env=environment, check=True)


def test_an_engine_on_the_stand_in_launches_all_its_kernels_and_has_the_models_tokens(
    tmp_path: Path,
) -> None:
    model, launches = tiny_model("qwen3", seed=9), tmp_path / "launches"
    with recorded(launches) as recorder, launching_device(recorder):
        engine = tiny_engine(model, device="cuda", max_requests=6, max_sequence_length=64)
        check_a_life_with_a_suspend(engine, model)
        engine.weights_checksum()
    texts = launches.read_text().splitlines()
    names = {json.loads(text)["kernel"].rpartition(":")[2] for text in texts}
    assert names >= {
        *("append_kv_kernel", "decode_attention_kernel", "prefill_attention_kernel"),
        *("add_rms_norm_kernel", "rms_norm_kernel", "silu_mul_kernel"),
        *("copy_tokens_kernel", "fingerprint_kernel", "chunk_statistics_kernel", "draw_kernel"),
        *("histogram_kernel", "threshold_kernel", "tile_starts_kernel", "query_tiles_kernel"),
    }


IS_OF_THE_BUNDLE = triton.__version__ == pinned_versions(
    (ROOT / "constraints-312.txt").read_text(encoding="utf-8")
).get("triton")


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (IS_OF_THE_BUNDLE and TRITON.is_dir()), reason="needs `make gpu-bundle` and its Triton"
)
def test_the_bundle_has_the_kernels_that_scenarios_and_the_benchmark_launch(tmp_path: Path) -> None:
    launches = tmp_path / "launches"
    assert record(launches, ("scenarios", "benchmark")) == []
    assert missing_kernels(launches, TRITON) == []
