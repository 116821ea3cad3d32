"""The one place where a unit becomes another. Memory holds seconds and bytes, the published JSON ms."""


def milliseconds(seconds: float | None) -> float | None:
    """Seconds to milliseconds; an absent value stays absent."""
    return None if seconds is None else seconds * 1e3
