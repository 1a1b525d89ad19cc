"""Owns what a serving process does with its heap once it has started."""

import gc


def freeze_heap() -> None:
    """Takes what is there out of later collections: modules and models live as long as the process, and walking them
    all, again and again, would make a request wait."""
    gc.collect()
    gc.freeze()
