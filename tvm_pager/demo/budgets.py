"""Default budgets of the demonstration, from what the plain run needed. Pure arithmetic."""

from __future__ import annotations

from tvm_pager.units import parse_bytes

__all__ = ["DEVICE_FRACTION", "choose_budgets"]

DEVICE_FRACTION = 0.35  # of the plain run's peak
_HOST_FRACTION = 0.4  # of what the device does not hold; the rest is left for NVMe
# The pager keeps fixed staging buffers inside the host budget; below this little is left for pages.
_MIN_HOST_BYTES = 4 * 2**20
_ROUND_BYTES = 2**12


def choose_budgets(need_bytes: int, device: str | None, host: str | None) -> tuple[int, int]:
    """Gives device and host budget in bytes; what was asked for stands, the rest follows from it.

    Raises:
        ConfigError: `device` or `host` is no byte size.
    """
    if device is None:
        device_bytes = int(need_bytes * DEVICE_FRACTION) // _ROUND_BYTES * _ROUND_BYTES
    else:
        device_bytes = parse_bytes(device, whole_bytes=need_bytes)
    if host is not None:
        return device_bytes, parse_bytes(host, whole_bytes=need_bytes)
    rest_bytes = max(0, need_bytes - device_bytes)
    host_bytes = int(rest_bytes * _HOST_FRACTION) // _ROUND_BYTES * _ROUND_BYTES
    return device_bytes, max(_MIN_HOST_BYTES, host_bytes)
