"""The one place where a unit becomes another. Memory holds seconds and bytes, the published files ms and kWh."""

JOULES_PER_KWH = 3.6e6


def milliseconds(seconds: float | None) -> float | None:
    """Seconds to milliseconds; an absent value stays absent."""
    return None if seconds is None else seconds * 1e3


def joules_of_kwh(kilowatt_hours: float) -> float:
    """Kilowatt-hours to joules."""
    return kilowatt_hours * JOULES_PER_KWH


def span(seconds: float) -> str:
    """For a reader: "42 s", "17 min", "3 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
