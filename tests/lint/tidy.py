"""clang-tidy over the .cpp files of the library and the command line, warnings as errors.

    tidy.py CLANG_TIDY ROOT BUILD [FILE...]

BUILD has compile_commands.json. A file that was clean is not read again until it, a header of the
project that it includes, the configuration or clang-tidy changes. Without FILE: all of them.
"""

import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys
import time

from tree import FLOORS

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


class Tidy:
    def __init__(self, program, root, build):
        self.program = program
        self.root = os.path.realpath(root)
        self.build = build
        self.stamps = os.path.join(build, "tests", "tidy")
        os.makedirs(self.stamps, exist_ok=True)
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        with open(os.path.join(root, ".clang-tidy"), encoding="utf-8") as file:
            self.configuration = version + file.read()

    def sources(self):
        """{path relative to the root: compile command}"""
        with open(os.path.join(self.build, "compile_commands.json"), encoding="utf-8") as file:
            entries = json.load(file)
        found = {}
        for entry in entries:
            path = os.path.realpath(os.path.join(entry["directory"], entry["file"]))
            relative = os.path.relpath(path, self.root)
            if relative.split(os.sep)[0] in FLOORS and relative.endswith(".cpp"):
                found[relative] = entry["command"]
        return found

    def key(self, path, command):
        """Changes with everything of ours that clang-tidy reads for this file."""
        digest = hashlib.sha256((self.configuration + command).encode())
        pending, seen = [path], set()
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            with open(os.path.join(self.root, name), encoding="utf-8") as file:
                text = file.read()
            digest.update(f"{name}\0{text}\0".encode())
            for included in sorted(INCLUDE.findall(text)):
                for candidate in (included, "include/" + included):
                    if os.path.isfile(os.path.join(self.root, candidate)):
                        pending.append(candidate)
        return digest.hexdigest()

    def check(self, path, command):
        """(path, clean, output, seconds); seconds is None when nothing had changed."""
        stamp = os.path.join(self.stamps, path.replace(os.sep, "_"))
        key = self.key(path, command)
        if os.path.exists(stamp):
            with open(stamp, encoding="utf-8") as file:
                if file.read() == key:
                    return path, True, "", None
        start = time.monotonic()
        # One SIMD target is enough to read the code; the others are the same text.
        result = subprocess.run(
            [self.program, "--quiet", "-p", self.build, "--extra-arg=-Wno-unknown-warning-option",
             "--extra-arg=-DHWY_COMPILE_ONLY_STATIC", os.path.join(self.root, path)],
            capture_output=True, text=True)
        clean = result.returncode == 0
        if clean:
            with open(stamp, "w", encoding="utf-8") as file:
                file.write(key)
        output = result.stdout if result.stdout.strip() else result.stderr
        return path, clean, output, time.monotonic() - start


def main(program, root, build, *only):
    tidy = Tidy(program, root, build)
    sources = tidy.sources()
    if only:
        sources = {path: sources[path] for path in only}
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [pool.submit(tidy.check, path, command) for path, command in sorted(sources.items())]
        for job in concurrent.futures.as_completed(jobs):
            path, clean, output, seconds = job.result()
            state = "unchanged" if seconds is None else f"{seconds:.1f} s"
            print(f"{'clean ' if clean else 'FAILED'} {path} ({state})", flush=True)
            if not clean:
                failed += 1
                print(output, flush=True)
    print(f"{len(sources)} files, {failed} with findings")
    return 1 if failed or not sources else 0


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
