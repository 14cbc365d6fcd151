"""Sliding windows of heads that draft several tokens past what they know. Read check_window."""


def check_window(window: int | None, key: str, depths: int) -> None:
    """Refuse a window that some trained depth would lose all true features by.

    Args:
        window: positions a row may look back to, itself included; None means all.
        key: the setting that says how many depths are trained.
        depths: its value.

    Raises:
        ValueError: for pydantic, which words it as a ConfigError.
    """
    if window is not None and window < depths:
        raise ValueError(
            f"sliding_window={window} is below {key}={depths}; expected a window in which the "
            "deepest draft still sees a position known to the target, or null"
        )
