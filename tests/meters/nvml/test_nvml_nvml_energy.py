"""NVML's energy and power from a scripted library, and the scripted library against the real one."""

import ctypes
import inspect

import pynvml
import pytest

from experiment_core_utils.meters.nvml import NvmlCounter, NvmlPower
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.energy import EnergyOrigin
from tests.meters.nvml.scripted_nvml import ScriptedEnergyNvml

INSTANT_REFUSED = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 0)


def test_the_counter_is_in_joules_and_the_limit_in_watts() -> None:
    library = ScriptedEnergyNvml()
    counter = NvmlCounter("GPU-12", library)
    assert counter.read_j() == 5000.25
    library.energy_mj["GPU-12"] += 1500
    assert counter.read_j() == 5001.75
    assert (counter.limit_w, counter.wraps_at_j) == (700.0, None)
    assert counter.origin == EnergyOrigin("GPU-12", "gpu", "nvml_counter", "measured", "counter")


def test_a_limit_that_is_not_told_is_none() -> None:
    refused: dict[str, type[Exception]] = {"nvmlDeviceGetEnforcedPowerLimit": pynvml.NVMLError_NotSupported}
    assert NvmlCounter("GPU-12", ScriptedEnergyNvml(refused)).limit_w is None


@pytest.mark.parametrize(
    ("refused", "match"),
    [
        ("nvmlInit", "NVML does not open GPU-12"),
        ("nvmlDeviceGetTotalEnergyConsumption", "GPU-12 does not report its energy: Not Supported"),
    ],
)
def test_without_driver_or_counter_it_is_unavailable(refused: str, match: str) -> None:
    with pytest.raises(MeterUnavailable, match=match):
        NvmlCounter("GPU-12", ScriptedEnergyNvml({refused: pynvml.NVMLError_NotSupported}))


def test_a_gpu_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(MeterUnavailable, match="NVML does not open GPU-13"):
        NvmlCounter("GPU-13", ScriptedEnergyNvml())


def test_a_gpu_that_is_lost_later_is_unavailable() -> None:
    library = ScriptedEnergyNvml()
    counter, power = NvmlCounter("GPU-12", library), NvmlPower("GPU-12", library)
    library.refused |= {
        "nvmlDeviceGetTotalEnergyConsumption": pynvml.NVMLError_GpuIsLost,
        "nvmlDeviceGetFieldValues": pynvml.NVMLError_GpuIsLost,
    }
    with pytest.raises(MeterUnavailable, match="GPU is lost"):
        counter.read_j()
    with pytest.raises(MeterUnavailable, match="GPU is lost"):
        power.read_w()


def test_power_is_that_of_the_moment_where_the_driver_tells_it() -> None:
    library = ScriptedEnergyNvml()
    power = NvmlPower("GPU-12", library)
    assert (power.read_w(), power.no_instant_power) == (412.5, None)
    assert power.origin == EnergyOrigin("GPU-12", "gpu", "power_integral", "measured", "instant_power")
    assert set(library.requested) == {pynvml.NVML_FI_DEV_POWER_INSTANT}


@pytest.mark.parametrize(
    "library",
    [
        ScriptedEnergyNvml(instant=INSTANT_REFUSED),
        ScriptedEnergyNvml(instant=(pynvml.NVML_SUCCESS, pynvml.NVML_VALUE_TYPE_DOUBLE, 0)),
        ScriptedEnergyNvml({"nvmlDeviceGetFieldValues": pynvml.NVMLError_FunctionNotFound}),
    ],
)
def test_otherwise_it_is_the_drivers_average_and_says_so(library: ScriptedEnergyNvml) -> None:
    power = NvmlPower("GPU-12", library)
    assert (power.read_w(), power.origin.basis) == (398.0, "averaged_power")
    assert power.no_instant_power is not None and "GPU-12" in power.no_instant_power


def test_with_neither_power_it_is_unavailable() -> None:
    library = ScriptedEnergyNvml({"nvmlDeviceGetPowerUsage": pynvml.NVMLError_NotSupported}, instant=INSTANT_REFUSED)
    with pytest.raises(MeterUnavailable, match="does not report its power: Not Supported"):
        NvmlPower("GPU-12", library)


# --- the real library -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in vars(ScriptedEnergyNvml) if name.startswith("nvml")])
def test_the_scripted_functions_take_what_the_real_ones_take(name: str) -> None:
    real = list(inspect.signature(getattr(pynvml, name)).parameters.values())
    scripted = list(inspect.signature(getattr(ScriptedEnergyNvml, name)).parameters.values())[1:]
    needed = [each for each in real if each.default is each.empty]
    assert len(needed) == len(scripted)


def test_constants_and_fields_are_those_of_nvml_h() -> None:
    assert (pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_SUCCESS, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT) == (186, 0, 1)
    fields = dict(pynvml.c_nvmlFieldValue_t._fields_)
    assert {"fieldId", "scopeId", "nvmlReturn", "valueType", "value"} <= set(fields)
    assert dict(pynvml.c_nvmlValue_t._fields_)["uiVal"] is ctypes.c_uint
    # A field value that nobody has filled is of scope 0, the GPU.
    assert pynvml.c_nvmlFieldValue_t().scopeId == pynvml.NVML_POWER_SCOPE_GPU == 0


def test_field_values_are_an_array_of_what_the_driver_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real wrapper over a stand-in for the driver's C function."""

    def driver(handle: object, count: ctypes.c_int32, values: object) -> int:
        value = values._obj[0]  # type: ignore[attr-defined]
        assert (count.value, value.fieldId, value.scopeId) == (1, 186, 0)
        value.nvmlReturn, value.valueType, value.value.uiVal = 0, 1, 123_456
        return 0

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda name: driver)
    (value,) = pynvml.nvmlDeviceGetFieldValues(None, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    assert (value.nvmlReturn, value.valueType, value.value.uiVal) == (0, 1, 123_456)


def test_an_error_of_a_field_value_is_one_of_the_librarys() -> None:
    assert isinstance(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED), pynvml.NVMLError_NotSupported)
    assert str(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)) == "Not Supported"


def test_without_a_driver_the_real_library_makes_it_unavailable() -> None:
    with pytest.raises(MeterUnavailable, match="GPU-00000000"):
        NvmlCounter("GPU-00000000-0000-0000-0000-000000000000")
