"""Which files of the source tree are ours, and on which floor they stand."""

import os

FLOORS = ("include", "kernels", "shard", "comm", "src", "launch")
CODE_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")


def code_files(root, folders=FLOORS + ("tests",)):
    """Paths relative to root, with / between folders, sorted."""
    found = []
    for folder in folders:
        for directory, _, names in os.walk(os.path.join(root, folder)):
            for name in names:
                if name.endswith(CODE_SUFFIXES):
                    path = os.path.relpath(os.path.join(directory, name), root)
                    found.append(path.replace(os.sep, "/"))
    return sorted(found)
