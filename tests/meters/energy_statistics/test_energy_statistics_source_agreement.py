"""Counter against integrated power by hand."""

from dataclasses import replace

from experiment_core_utils.meters.energy_statistics import with_disagreements
from experiment_core_utils.records.energy import Basis, DeviceEnergy, EnergyOrigin


def energy(joules: float | None, basis: Basis, bound_j: float | None = 10.0, device: str = "GPU-1") -> DeviceEnergy:
    source = "nvml_counter" if basis == "counter" else "power_integral"
    return DeviceEnergy(EnergyOrigin(device, "gpu", source, "measured", basis), joules, bound_j, None)  # type: ignore[arg-type]


def test_a_difference_beyond_the_sum_of_the_bounds_is_remarked_at_both() -> None:
    # 30 J of 1000 J are 3.0 %; 10 + 10 J are 2.0 %.
    found = with_disagreements([energy(1000.0, "counter"), energy(1030.0, "instant_power")])
    assert {each.remark for each in found} == {
        "integrated power is +3.0% off the counter, of which resolution explains 2.0%"
    }
    assert [each.joules for each in found] == [1000.0, 1030.0]
    # An earlier remark stays; another device has none.
    wrapped = replace(energy(1000.0, "counter"), remark="wrapped")
    first, _, other = with_disagreements(
        [wrapped, energy(900.0, "averaged_power"), energy(5.0, "counter", device="GPU-2")]
    )
    assert first.remark == "wrapped; integrated power is -10.0% off the counter, of which resolution explains 2.0%"
    assert other.remark is None


def test_a_difference_within_the_bounds_or_the_windows_is_not() -> None:
    pair = [energy(1000.0, "counter"), energy(1030.0, "instant_power", bound_j=20.0)]
    assert with_disagreements(pair) == tuple(pair)
    pair = [energy(1000.0, "counter"), energy(1030.0, "instant_power")]
    assert with_disagreements(pair, apart_fraction=0.011) == tuple(pair)


def test_what_is_not_known_is_not_compared() -> None:
    for counted, integrated in (
        (energy(None, "counter"), energy(1030.0, "instant_power")),
        (energy(1000.0, "counter"), energy(None, "instant_power")),
        (energy(1000.0, "counter", None), energy(1300.0, "instant_power")),
        (energy(0.0, "counter"), energy(100.0, "instant_power")),
    ):
        assert with_disagreements([counted, integrated]) == (counted, integrated)
