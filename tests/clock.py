"""What is logged that a clock has said: no two runs have it alike."""
CLOCK = ("time", "per_second", "share/", "mfu/", "trained/")


def without_clock(row: dict) -> dict: return {k: v for k, v in row.items() if not any(w in k for w in CLOCK)}
