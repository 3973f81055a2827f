def bicubic(
    source: object,
    size: tuple[int, int],
    target: object,
    target_size: tuple[int, int],
    box: tuple[float, float, float, float],
    down_first: bool,
    /,
) -> bool: ...
