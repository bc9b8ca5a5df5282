"""Numbers in words."""


def amount(size: float) -> str:
    """Bytes with a unit, such as 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def plural(n: int, noun: str, several: str = "") -> str:
    return f"{n:,} {noun if n == 1 else several or noun + 's'}"
