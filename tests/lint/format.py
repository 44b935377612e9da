"""All C++ and CUDA files are as clang-format leaves them.

    format.py CLANG_FORMAT ROOT
"""

import os
import subprocess
import sys

from tree import code_files


def main(clang_format, root):
    files = code_files(root)
    result = subprocess.run([clang_format, "--dry-run", "-Werror", "--ferror-limit=3", *files], cwd=root)
    print(f"{len(files)} files; to repair: {os.path.basename(clang_format)} -i FILE")
    return 1 if result.returncode else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
