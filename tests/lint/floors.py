"""The house stays as it was drawn: a folder is a floor, and includes point down only.

    floors.py ROOT        checks the tree; prints FILE:LINE: reason; exit code 1 when it finds any
    floors.py --self-test plants each kind of violation in a scratch tree and must see it
"""

import os
import re
import sys
import tempfile

from tree import FLOORS, code_files

# A floor may include itself and these.
MAY_INCLUDE = {
    "include": {"include"},
    "kernels": {"kernels", "include"},
    "shard": {"shard", "kernels", "include"},
    "comm": {"comm", "kernels", "include"},
    "src": {"src", "shard", "comm", "kernels", "include"},
    "launch": {"launch", "include"},
    "tests": {*FLOORS, "tests"},
}

# Public headers see the standard library, each other and this.
PUBLIC_THIRD_PARTY = {"tl/expected.hpp"}
C_STANDARD = {"stdbool.h", "stddef.h", "stdint.h"}

# Who may see the libraries that carry a job.
CONFINED = [
    (re.compile(r"mpi\.h|mpi-ext\.h"), "MPI", {"comm", "tests"}),
    (re.compile(r"nccl.*\.h"), "NCCL", {"comm", "tests"}),
    (re.compile(r"cu(da|b|blas|pti)?[a-z0-9_]*\.h|(cuda|cub|cooperative_groups|nvtx3)(/.*)?"), "CUDA",
     {"kernels", "comm", "tests"}),
]

TOP_LEVEL = {
    ".ci", ".clang-format", ".clang-tidy", ".gitattributes", ".github", ".gitignore",
    "CHANGELOG.md", "CMakeLists.txt", "CMakePresets.json", "CONTRIBUTING.md", "LICENSE", "NOTICE",
    "README.md", "cmake", "docs", "python", "tests", *FLOORS,
}
# Not ours: version control, editors, build trees.
TOP_LEVEL_IGNORED = re.compile(
    r"\.git|\.cache|\.vscode|\.idea|build(-.*)?|compile_commands\.json|CMakeUserPresets\.json")

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(.*?)[ \t]*$", re.MULTILINE)


def include_violations(path, text):
    """Yields (line, reason) for each #include of the file that must not be there."""
    floor = path.split("/")[0]
    text = COMMENT.sub(lambda comment: "\n" * comment.group().count("\n"), text)
    for match in INCLUDE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        spelled = match.group(1)
        if len(spelled) < 2 or (spelled[0], spelled[-1]) not in (('"', '"'), ("<", ">")):
            yield line, f"#include {spelled}: name the file, so that this check can read it"
            continue
        name = spelled[1:-1]
        quoted = spelled[0] == '"'
        first = name.split("/")[0]
        if ".." in name.split("/"):
            yield line, f"#include {spelled}: write the path from the project's root"
        elif first == "kvgrid":
            if quoted:
                yield line, f"#include {spelled}: public headers are written <{name}>"
        elif first in MAY_INCLUDE and "/" in name:
            if first not in MAY_INCLUDE[floor]:
                yield line, f"{floor}/ must not include {first}/ ({name})"
            elif first == "include":
                yield line, f"#include {spelled}: public headers are written <kvgrid/...>"
            elif not quoted:
                yield line, f'#include {spelled}: headers of the project are written "{name}"'
        elif quoted:
            yield line, f"#include {spelled}: write the path from the project's root"
        else:
            for pattern, what, allowed in CONFINED:
                if pattern.fullmatch(name) and floor not in allowed:
                    yield line, f"{floor}/ must not see {what} ({name})"
                    break
            else:
                standard = re.fullmatch(r"[a-z_]+", name) or name in C_STANDARD
                if floor == "include" and not standard and name not in PUBLIC_THIRD_PARTY:
                    yield line, f"a public header must not need <{name}>"


def unlisted_sources(root, files):
    """Yields the files that no CMakeLists.txt on the way up to the root names."""
    for path in files:
        if not path.endswith((".cpp", ".cu")) and not path.startswith("include/"):
            continue
        directory, listed = path, False
        while directory and not listed:
            directory = os.path.dirname(directory)
            lists = os.path.join(root, directory, "CMakeLists.txt")
            if os.path.exists(lists):
                inside = os.path.relpath(path, directory or ".")
                with open(lists, encoding="utf-8") as file:
                    pattern = r"(?<![\w/.-])" + re.escape(inside) + r"(?![\w/.-])"
                    listed = re.search(pattern, file.read()) is not None
        if not listed:
            yield path


def violations(root):
    """All that is wrong with the tree, as printable lines."""
    found = []
    files = code_files(root)
    for path in files:
        with open(os.path.join(root, path), encoding="utf-8") as file:
            found += [f"{path}:{line}: {reason}" for line, reason in include_violations(path, file.read())]
    for path in unlisted_sources(root, files):
        found.append(f"{path}:1: no CMakeLists.txt names this file: it is not built or not installed")
    for name in sorted(os.listdir(root)):
        if name not in TOP_LEVEL and not TOP_LEVEL_IGNORED.fullmatch(name):
            found.append(f"{name}:1: not an entry of the house; see CONTRIBUTING.md")
    return found


def self_test():
    clean = {
        "include/kvgrid/error.h": "#include <string>\n#include <tl/expected.hpp>\n#include <stdint.h>\n",
        "include/CMakeLists.txt": "kvgrid/error.h\n",
        "kernels/ops.h": "#include <kvgrid/error.h>\n",
        "kernels/cpu/attend.cpp": '#include "kernels/ops.h"\n/*\n#include "src/x.h"\n*/\n#include <hwy/highway.h>\n',
        "kernels/CMakeLists.txt": "cpu/attend.cpp",
        "shard/pool.h": '#include "kernels/ops.h"\n',
        "comm/join.h": '// #include "src/x.h"\n#include "kernels/ops.h"\n#include <mpi.h>\n',
        "src/cache.cpp": '#include "comm/join.h"\n#include "shard/pool.h"\n',
        "src/CMakeLists.txt": "cache.cpp",
        "launch/oracle.h": "#include <kvgrid/error.h>\n",
        "tests/src/cache_test.cpp": '#include "src/cache.h"\n#include "launch/oracle.h"\n#include <mpi.h>\n',
        "tests/src/CMakeLists.txt": "SOURCES cache_test.cpp)",
        "README.md": "",
    }
    planted = [
        ("kernels/a.h", '#include "shard/pool.h"', "kernels/ must not include shard/"),
        ("kernels/a.h", '  #  include   "src/cache.h"', "kernels/ must not include src/"),
        ("shard/a.h", '#include "comm/join.h"', "shard/ must not include comm/"),
        ("comm/a.h", '#include "shard/pool.h"', "comm/ must not include shard/"),
        ("src/a.h", '#include "launch/oracle.h"', "src/ must not include launch/"),
        ("src/a.h", "#include <launch/oracle.h>", "src/ must not include launch/"),
        ("launch/a.h", '#include "kernels/ops.h"', "launch/ must not include kernels/"),
        ("launch/a.h", '#include "src/cache.h"', "launch/ must not include src/"),
        ("src/a.h", '#include "tests/paths.h"', "src/ must not include tests/"),
        ("include/kvgrid/error.h", "#include <mpi.h>", "include/ must not see MPI"),
        ("include/kvgrid/error.h", "#include <cuda_runtime.h>", "include/ must not see CUDA"),
        ("include/kvgrid/error.h", "#include <nccl.h>", "include/ must not see NCCL"),
        ("include/kvgrid/error.h", "#include <fmt/format.h>", "must not need <fmt/format.h>"),
        ("include/kvgrid/error.h", '#include "kernels/ops.h"', "include/ must not include kernels/"),
        ("shard/a.h", "#include <mpi.h>", "shard/ must not see MPI"),
        ("src/a.h", "#include <cuda_fp16.h>", "src/ must not see CUDA"),
        ("src/a.h", '#include "cache.h"', "write the path from the project's root"),
        ("src/a.h", '#include "src/../launch/oracle.h"', "write the path from the project's root"),
        ("src/a.h", '#include "kvgrid/error.h"', "are written <kvgrid/error.h>"),
        ("src/a.h", "#include <shard/pool.h>", 'are written "shard/pool.h"'),
        ("src/a.h", "#include HEADER", "name the file"),
        ("src/forgotten.cpp", "", "no CMakeLists.txt names this file"),
        ("include/kvgrid/forgotten.h", "", "no CMakeLists.txt names this file"),
        ("notes.txt", "", "not an entry of the house"),
    ]

    def check(extra):
        with tempfile.TemporaryDirectory() as root:
            for path, text in {**clean, **extra}.items():
                os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(text)
            return violations(root)

    failures = [f"clean tree: {line}" for line in check({})]
    for path, text, expected in planted:
        found = check({path: text})
        if len(found) != 1 or expected not in found[0] or not found[0].startswith(f"{path}:1:"):
            failures.append(f"planted {path!r} {text!r}: expected {expected!r}, found {found}")
    print("\n".join(failures + [f"{len(planted)} planted violations, {len(failures)} misjudged"]))
    return 1 if failures else 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if len(arguments) != 1:
        sys.exit(__doc__)
    found = violations(arguments[0])
    print("\n".join(found + [f"{len(found)} violations"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
