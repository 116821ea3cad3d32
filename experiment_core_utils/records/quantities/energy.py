"""Energy of a sample's request."""

from typing import Annotated

from experiment_core_utils.records.json_record import Positive, Record
from experiment_core_utils.records.quantities.quantity import Quantity


class SampleEnergy(Record):
    """The energy of a sample's request."""

    #: energy of one request, idle power included: its part of windows over many samples, mean over passes, of a batch
    #: an equal part of it; see [energy.md](energy.md#windows); None if `--energy off`, only estimated, or not among the
    #: samples of the passes
    energy_j: Annotated[Positive | None, Quantity("energy_j", "J", figures=())] = None
    #: error bound of that part; None if `energy_j` is, or no power was read
    energy_bound_j: Positive | None = None
    #: `apportioned`: in proportion to the power read while it ran; `apportioned by time`: to how long it ran, where no
    #: power is read; None if `energy_j` is
    energy_method: str | None = None
    #: source of the windows and, in brackets, basis, such as `nvml_counter (counter)`; None if `energy_j` is
    energy_source: str | None = None
    energy_reason: str | None = None  #: why there is no energy; None if there is, or `energy` is null
