"""What `oallama doctor` says of machines that are not this one: trees of files stand for them."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from oallama.doctor import examine, installed, limits
from oallama.doctor.finding import Finding
from oallama.doctor.gpus import gpus
from oallama.doctor.installed import cpu_features
from oallama.engine import device_list, runtime
from oallama.engine.cuda_libraries import OldDriver
from oallama.engine.device_list import Device
from oallama.errors import OallamaError
from oallama.views.doctor import render_findings

NVIDIA, AMD, NETWORK = ("0x10de", "0x030200"), ("0x1002", "0x030000"), ("0x10de", "0x020000")


def machine(root: Path, *devices: tuple[str, str], driver: str = "") -> Path:
    """PCI devices as (vendor, class), and NVIDIA's driver."""
    for number, (vendor, kind) in enumerate(devices):
        folder = root / f"sys/bus/pci/devices/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    if driver:
        (root / "sys/module/nvidia").mkdir(parents=True)
        (root / "sys/module/nvidia/version").write_text(f"{driver}\n")
    return root


def device(name: str, backend: str) -> Device:
    return Device(name, "a card", "gpu", backend, 1 << 30, 8 << 30, True, True)


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_a_gpu_that_is_used_is_fine(tmp_path: Path) -> None:
    root = machine(tmp_path, NVIDIA, driver="580.1")
    found = only([*gpus(root, [device("CUDA0", "CUDA")], cuda=True, vulkan=False)])
    assert found == Finding("CUDA0", "ok", "a card, 8.0 GiB")


@pytest.mark.parametrize(
    ("driver", "cuda", "state", "remedy"),
    [
        ("", False, "missing", "driver"),
        ("580.1", False, "missing", "toolkit"),
        ("580.1", True, "broken", "nvidia-smi"),
    ],
)
def test_what_an_nvidia_gpu_lacks(tmp_path: Path, driver: str, cuda: bool, state: str, remedy: str) -> None:
    found = only([*gpus(machine(tmp_path, NVIDIA, driver=driver), [], cuda, vulkan=True)])
    assert (found.name, found.state) == ("NVIDIA GPU", state) and remedy in found.remedy and found.effect
    assert driver in found.found


def test_a_driver_that_is_too_old_is_named_with_the_oldest_that_does(tmp_path: Path) -> None:
    root = machine(tmp_path, NVIDIA, driver="535.183.01")
    found = only([*gpus(root, [], cuda=True, vulkan=True, old_driver=OldDriver("12.2", 13))])
    assert (found.state, found.found) == ("broken", "driver 535.183.01") and "supports CUDA 12.2" in found.effect
    assert found.remedy == "install NVIDIA's driver 580 or newer"


def test_a_wheel_lacks_a_package_alone(tmp_path: Path) -> None:
    found = only([*gpus(machine(tmp_path, NVIDIA, driver="580.1"), [], cuda=False, vulkan=True, modular=True)])
    assert found.state == "missing" and found.remedy == "pip install oallama-cuda13"


def test_a_driver_counts_where_no_bus_is_shown(tmp_path: Path) -> None:
    """As in a container."""
    found = only([*gpus(machine(tmp_path, driver="580.1"), [], cuda=False, vulkan=False)])
    assert found.name == "NVIDIA GPU"


def test_vulkan_in_place_of_cuda_is_said(tmp_path: Path) -> None:
    root = machine(tmp_path, NVIDIA, driver="580.1")
    used, unused = gpus(root, [device("Vulkan0", "Vulkan")], cuda=False, vulkan=True)
    assert used.state == "ok" and unused.state == "missing" and "Vulkan" in unused.effect


@pytest.mark.parametrize(("vulkan", "remedy"), [(True, "vulkaninfo"), (False, "apt-get install")])
def test_what_another_gpu_lacks(tmp_path: Path, vulkan: bool, remedy: str) -> None:
    found = only([*gpus(machine(tmp_path, AMD), [], cuda=False, vulkan=vulkan)])
    assert (found.name, found.state) == ("AMD GPU", "missing") and found.remedy.startswith(remedy)


def test_a_gpu_beside_a_wheel_without_vulkans_loader(tmp_path: Path) -> None:
    found = only([*gpus(machine(tmp_path, AMD), [], cuda=False, vulkan=True, vulkan_loader=False)])
    assert (found.state, found.found) == ("missing", "no libvulkan.so.1")
    assert found.remedy == "apt-get install libvulkan1 mesa-vulkan-drivers"


def test_without_a_gpu_nothing_needs_mending(tmp_path: Path) -> None:
    """An NVIDIA network card is none."""
    found = only([*gpus(machine(tmp_path, NETWORK), [], cuda=False, vulkan=True)])
    assert (found.state, found.remedy) == ("note", "")


def test_instruction_sets_are_read_from_llama_cpp_s_text() -> None:
    text = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | AVX512 = 0 | AMX_INT8 = 1 | LLAMAFILE = 1 | REPACK = 1 | "
    assert cpu_features(text) == ["AVX", "AVX2", "AMX_INT8"] and cpu_features("") == []


@pytest.mark.parametrize(
    ("text", "state", "mended"),
    [
        ("always [madvise] never", "ok", False),
        ("[always] madvise never", "ok", False),
        ("always madvise [never]", "note", True),
        (None, "note", False),
    ],
)
def test_huge_pages(tmp_path: Path, text: str | None, state: str, mended: bool) -> None:
    if text is not None:
        file = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
        file.parent.mkdir(parents=True)
        file.write_text(f"{text}\n")
    found = limits.huge_pages(tmp_path)
    assert found.state == state and bool(found.remedy) == mended


def test_busy_and_slow_processors_are_said(tmp_path: Path) -> None:
    assert limits.cpus(tmp_path, 0.0).state == "ok"
    assert "others use 1.5" in limits.cpus(tmp_path, 1.5).found
    governor = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    governor.parent.mkdir(parents=True)
    governor.write_text("powersave\n")
    assert "cpupower" in limits.cpus(tmp_path, 0.0).remedy


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert limits.cache(tmp_path / "cache").state == "ok"
    unwritable = limits.cache(tmp_path / "file" / "cache")
    assert unwritable.state == "missing" and "Not a directory" in unwritable.found and unwritable.remedy
    assert limits.shared_memory(tmp_path).state == "missing"
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert limits.shared_memory(tmp_path).state in ("ok", "note")


def test_packages_that_are_missing_are_named_with_what_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name in ("mpi4py", "matplotlib") else name)
    found = installed.packages()
    assert (found.state, found.found) == ("missing", "no mpi4py, matplotlib")
    assert found.effect == "needed by oallama cluster run, --plot"
    assert found.remedy == "pip install 'oallama[cluster]' 'oallama[plot]'"


def test_an_engine_that_is_not_built_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_built() -> None:
        raise OallamaError("no libllama.so")

    monkeypatch.setattr(runtime, "quiet", not_built)
    monkeypatch.setattr(device_list, "devices", not_built)
    found = only(examine())
    assert (found.state, found.found, found.remedy) == ("broken", "no libllama.so", "make setup")


def test_the_view_has_every_finding_and_its_remedy() -> None:
    findings = [Finding("a", "ok", "fine [x]"), Finding("b", "missing", "nothing", "so much", "do --this")]
    text = StringIO()
    Console(file=text, width=60).print(render_findings(findings))
    shown = text.getvalue()
    assert all(part in shown for part in ("fine [x]", "missing", "b: so much", "    do --this"))
    assert max(map(len, shown.splitlines())) <= 60
