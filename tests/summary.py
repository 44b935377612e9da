"""The end of launch/test: what ran, what failed, what was skipped and why, and the total.

    summary.py BUILD STAGE:EXIT_CODE... [NAME: REASON]...

STAGE is PRESET/configure, PRESET/build or PRESET/test. GoogleTest suites count by case, everything
else by CTest entry, and a NAME with a reason as one skipped. Exit code 1 when anything failed.
"""

import os
import re
import sys
import xml.etree.ElementTree as ElementTree


def one_line(text, most=200):
    """A GoogleTest message without its first line, which says where."""
    lines = [line.strip() for line in (text or "").splitlines()[1:] if line.strip()]
    return "; ".join(lines)[:most]


class Suite:
    """The results of one preset."""

    def __init__(self, name):
        self.name = name
        self.passed = 0
        self.failed = []
        self.skipped = []
        self.seconds = 0.0

    def add_entry(self, entry, results):
        """One CTest entry, from CTest's JUnit file."""
        name = entry.get("name")
        status = entry.get("status")
        self.seconds += float(entry.get("time") or 0)
        report = os.path.join(results, name + ".xml")
        cases = 0
        failed_before = len(self.failed)
        if os.path.exists(report):
            try:
                cases = self.add_cases(name, ElementTree.parse(report))
            except ElementTree.ParseError:
                pass  # the program died while it wrote
        if status == "fail" and len(self.failed) == failed_before:
            failure = entry.find("failure")
            message = failure.get("message") if failure is not None else ""
            self.failed.append((name, message or "failed outside of its cases"))
        elif cases == 0 and status == "run":
            self.passed += 1
        elif cases == 0 and status != "fail":
            reason = re.search(r"skipped: (.*)", entry.findtext("system-out") or "")
            if reason:
                self.skipped.append((name, reason.group(1)))
            else:
                self.failed.append((name, f"not run ({status})"))

    def add_cases(self, name, report):
        count = 0
        for case in report.iter("testcase"):
            count += 1
            full = f"{name} {case.get('classname')}.{case.get('name')}"
            failure, skipped = case.find("failure"), case.find("skipped")
            if failure is not None:
                self.failed.append((full, one_line(failure.text)))
            elif skipped is not None:
                self.skipped.append((full, one_line(skipped.text) or "no reason given"))
            elif case.get("status") == "notrun":
                count -= 1
            else:
                self.passed += 1
        return count


def read(build, stages):
    suites = {}
    for preset, stage, code in stages:
        suite = suites.setdefault(preset, Suite(preset))
        junit = os.path.join(build, preset, "tests", "ctest.xml")
        if stage == "test" and os.path.exists(junit):
            for entry in ElementTree.parse(junit).iter("testcase"):
                suite.add_entry(entry, os.path.join(build, preset, "tests", "results"))
        if code != 0 and not suite.failed:
            suite.failed.append((f"{preset}/{stage}", f"exit code {code}"))
    return list(suites.values())


def main(build, *arguments):
    stages, notes = [], []
    for argument in arguments:
        match = re.fullmatch(r"(\w+)/(\w+):(\d+)", argument)
        if match:
            stages.append((match.group(1), match.group(2), int(match.group(3))))
        else:
            notes.append(tuple(argument.split(": ", 1)))
    suites = read(build, stages)

    for suite in suites:
        for name, reason in suite.failed:
            print(f"FAILED  {suite.name}: {name}: {reason}")
    skips = [(f"{suite.name}: {name}", reason) for suite in suites for name, reason in suite.skipped]
    for name, reason in skips + notes:
        print(f"skipped {name}: {reason}")
    print(f"{'suite':<8} {'passed':>7} {'failed':>7} {'skipped':>8} {'test time':>10}")
    for suite in suites:
        print(f"{suite.name:<8} {suite.passed:>7} {len(suite.failed):>7} {len(suite.skipped):>8} "
              f"{suite.seconds:>8.0f} s")
    for name, _ in notes:
        print(f"{name:<8} {0:>7} {0:>7} {1:>8} {0:>8} s")
    passed = sum(suite.passed for suite in suites)
    failed = sum(len(suite.failed) for suite in suites)
    print(f"{passed} passed, {failed} failed, {len(skips) + len(notes)} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
