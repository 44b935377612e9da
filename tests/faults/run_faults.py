#!/usr/bin/env python3
"""Kills and stops ranks of a job, and checks that the job fails stop.

    run_faults.py [options] -- program argument...

The program is started by mpirun and must run until it is hurt: for as long as --window at least. It
gets `--timeout SECONDS` appended, and must have been built with KVGRID_FAULT_INJECTION.

  kill    SIGKILL of each rank at each place (KVGRID_FAULT; at `collective` it comes amid one:
          comm/fault_injection.h says how), with --collective N more times there; and of a random
          rank at a random moment from outside, once it has joined MPI. The job must end within
          --bound seconds, with an exit code that is not zero. (A rank that dies earlier, amid the
          handshake with its launcher, can leave Open MPI 4.1's mpirun waiting: none of the
          program's code runs by then.)
  stop    SIGSTOP of a rank at each place. The job must end with code 5 within the deadline and
          --bound seconds, and say which rank waited for what. At `collective` the deadline of the
          others begins when they go on, HOLD_S later. What the rank had on its GPU may still run
          to its end: then they miss it in the next collective or message.
  throw   One rank fails alone (`--throw RANK` appended, tests' own job only). The job must end with
          that rank's exit code, 3.

In every case no process of the job is left (zombies aside), nothing new is in /dev/shm and, with
--gpu, the GPU's memory is free again. Entries
that a living process of another job has mapped are that job's. Exit code 0: all cases held.
--json FILE: {"cases": [{"name", "kind", "exit_code", "seconds", "problems"}], "seconds"}, where a
case's seconds are from the fault to the end of the job; null where there was no fault. exit_code is
null where the job did not end.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid

PLACES = ("start", "append", "attend", "join", "collective")
HOLD_S = 1.0  # collective_hold of comm/fault_injection.h
MARKER = "KVGRID_FAULT_CASE"
START_LIMIT_S = 60.0
DEADLINE_MESSAGE = re.compile(r"kvgrid: rank \d+: .*\S did not end within ")


def read_bytes(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def all_pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def is_zombie(pid):
    state = read_bytes(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return not state or state[0] in (b"Z", b"X")


def processes_of(case_id):
    """pid -> environment of the living processes that descend from this case's mpirun."""
    marker = f"{MARKER}={case_id}".encode()
    found = {}
    for pid in all_pids():
        environment = read_bytes(f"/proc/{pid}/environ").split(b"\0")
        if marker in environment and not is_zombie(pid):
            found[pid] = environment
    return found


def pid_of_joined_rank(case_id, rank):
    """Of a rank that has mapped what it shares with the others: MPI gets there after its handshake."""
    wanted = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    for pid, environment in processes_of(case_id).items():
        if wanted in environment and b" /dev/shm/" in read_bytes(f"/proc/{pid}/maps"):
            return pid
    return None


def new_in_shm(before):
    """Entries of /dev/shm that are new and that no living process has mapped."""
    new = set(os.listdir("/dev/shm")) - before
    if new:
        maps = b"".join(read_bytes(f"/proc/{pid}/maps") for pid in all_pids())
        new = {name for name in new if f"/dev/shm/{name}\n".encode() not in maps}
    return new


def gpu_memory():
    """MiB in use on all GPUs together."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(int(line) for line in subprocess.check_output(query, text=True).split())


class Job:
    """mpirun with the program, its output by line, and when each line came."""

    def __init__(self, options, arguments, fault):
        self.id = uuid.uuid4().hex
        self.shm_before = set(os.listdir("/dev/shm"))
        self.gpu_before = gpu_memory() if options.gpu else None
        self.scratch = tempfile.mkdtemp(prefix="kvgrid-")
        environment = dict(os.environ, TMPDIR=self.scratch, OMPI_ALLOW_RUN_AS_ROOT="1",
                           OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", **{MARKER: self.id})
        environment.pop("KVGRID_FAULT", None)
        if fault:
            environment["KVGRID_FAULT"] = fault
        self.process = subprocess.Popen(
            [options.mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(options.ranks)]
            + options.program + arguments,
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True)
        self.lines = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))

    def time_of(self, text):
        for when, line in list(self.lines):
            if text in line:
                return when
        return None

    def wait_for(self, condition, limit):
        end = time.monotonic() + limit
        while time.monotonic() < end:
            value = condition()
            if value is not None:
                return value
            if self.process.poll() is not None:
                self.reader.join(1)
                return condition()
            time.sleep(0.005)
        return None

    def is_over(self):
        return self.process.poll() is not None and not processes_of(self.id)

    def clean_up(self):
        for pid in processes_of(self.id):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        shutil.rmtree(self.scratch, ignore_errors=True)


def finish(job, hurt_at, bound):
    """Waits for the end of the job; seconds from the fault to it, and what is wrong with it."""
    while not job.is_over() and time.monotonic() < hurt_at + bound:
        time.sleep(0.01)
    took = time.monotonic() - hurt_at
    job.reader.join(1)
    problems = []
    if not job.is_over():
        left = ", ".join(str(pid) for pid in sorted(processes_of(job.id)))
        problems.append(f"not over {bound:g} s after the fault (left: {left or 'mpirun'})")
    new = new_in_shm(job.shm_before)
    end = time.monotonic() + 1
    while new and time.monotonic() < end:  # another job may be about to map what it just made
        time.sleep(0.05)
        new &= new_in_shm(job.shm_before)
    if new:
        problems.append("left in /dev/shm: " + ", ".join(sorted(new)))
    if job.gpu_before is not None:
        end = time.monotonic() + 2  # the driver takes a moment
        while gpu_memory() > job.gpu_before and time.monotonic() < end:
            time.sleep(0.1)
        left = gpu_memory() - job.gpu_before
        if left > 0:
            problems.append(f"{left} MiB left on the GPU")
    return took, problems


def run_case(options, case):
    """(seconds from the fault to the end, exit code, job, problems); null is what did not come."""
    timeout = options.timeout if case["kind"] == "stop" else options.patience
    arguments = ["--timeout", f"{timeout:g}"] + case.get("arguments", [])
    job = Job(options, arguments, case.get("fault"))
    try:
        if "delay" in case:
            pid = job.wait_for(lambda: pid_of_joined_rank(job.id, case["rank"]), START_LIMIT_S)
            time.sleep(case["delay"])
            if pid is None or job.is_over():
                return None, None, job, ["the job was over before the kill: give it more steps"]
            os.kill(pid, signal.SIGKILL)
            hurt_at = time.monotonic()
        else:
            hurt_at = job.wait_for(lambda: job.time_of(": injected fault: "), START_LIMIT_S)
            if hurt_at is None:
                return None, None, job, ["the fault never came"]
        bound = options.bound
        if case["kind"] == "stop":
            bound += timeout + (HOLD_S if case["place"] == "collective" else 0)
        took, problems = finish(job, hurt_at, bound)
        code = job.process.poll()
        if code == 0:
            problems.append("exit code 0")
        if case.get("code", code) != code:
            problems.append(f"exit code {code}, expected {case['code']}")
        if case["kind"] == "stop" and not any(DEADLINE_MESSAGE.search(l) for _, l in job.lines):
            problems.append("no message names a rank and an operation")
        if options.verdict and case["rank"] != 0:
            said = any(line.startswith("FAILED: ") for _, line in job.lines)
            options.verdicts.append(said)
        return took, code, job, problems
    finally:
        job.clean_up()


def all_cases(options):
    ranks = range(options.ranks)
    cases = []
    for place in PLACES:
        visit = 1 if place == "start" else options.visit
        cases += [{"kind": "kill", "name": f"kill at {place}, rank {rank}", "rank": rank,
                   "fault": f"kill:{place}:{rank}:{visit}"} for rank in ranks]
    for index in range(options.collective):
        rank, visit = index % options.ranks, options.visit + index // options.ranks
        cases.append({"kind": "kill", "name": f"kill in collective, rank {rank}, visit {visit}",
                      "rank": rank, "fault": f"kill:collective:{rank}:{visit}"})
    draw = random.Random(options.seed)
    for _ in range(options.random):
        delay, rank = draw.uniform(0, options.window), draw.randrange(options.ranks)
        cases.append({"kind": "kill", "name": f"kill after {delay:.3f} s, rank {rank}",
                      "rank": rank, "delay": delay})
    for index, place in enumerate(PLACES):
        visit = 1 if place == "start" else options.visit
        rank = (index + 1) % options.ranks
        cases.append({"kind": "stop", "name": f"stop at {place}, rank {rank}", "code": 5,
                      "rank": rank, "place": place,
                      "fault": f"stop:{place}:{rank}:{visit}"})
    if options.throw:
        cases += [{"kind": "throw", "name": f"throw, rank {rank}", "code": 3, "rank": rank,
                   "arguments": ["--throw", str(rank)]} for rank in ranks]
    return [case for case in cases if re.search(options.only, case["name"])]


def parse_arguments():
    parser = argparse.ArgumentParser(description="Kills and stops ranks of a job.")
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--bound", type=float, default=5, help="seconds from a fault to the end")
    parser.add_argument("--timeout", type=float, default=3, help="the job's deadline, stop cases")
    parser.add_argument("--patience", type=float, default=60, help="the job's deadline otherwise")
    parser.add_argument("--visit", type=int, default=3, help="which visit of a place is hurt")
    parser.add_argument("--collective", type=int, default=0, metavar="N",
                        help="more kills amid a collective: of each rank at --visit, at the next, ...")
    parser.add_argument("--random", type=int, default=4, help="kills at random moments")
    parser.add_argument("--window", type=float, default=1.5, help="seconds from the joining of MPI to them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", action="store_true", help="the GPU's memory must be free again")
    parser.add_argument("--verdict", action="store_true",
                        help="rank 0, where it is not the one hurt, must print FAILED: reason")
    parser.add_argument("--throw", action="store_true", help="also cases where one rank throws")
    parser.add_argument("--only", default="", help="regular expression of case names")
    parser.add_argument("--json", metavar="FILE", help="the cases, in a new file")
    parser.add_argument("program", nargs="+")
    options = parser.parse_args(namespace=argparse.Namespace(verdicts=[]))
    if options.json and os.path.exists(options.json):
        parser.error(f"--json: {options.json} exists and is not overwritten")
    return options


def main():
    options = parse_arguments()
    begun = time.monotonic()
    held, failed, results = {}, {}, []
    for case in all_cases(options):
        took, code, job, problems = run_case(options, case)
        results.append({"name": case["name"], "kind": case["kind"], "exit_code": code,
                        "seconds": took and round(took, 2), "problems": problems})
        verdict = "ok" if not problems else "FAILED: " + "; ".join(problems)
        print(f"{case['name']:36} exit {str(code):>4}  {took or 0:5.2f} s  {verdict}", flush=True)
        if problems and sum(failed.values()) < 3:
            print("\n".join("    | " + line for _, line in job.lines[-40:]), flush=True)
        counts = failed if problems else held
        counts[case["kind"]] = counts.get(case["kind"], 0) + 1
    kinds = [kind for kind in ("kill", "stop", "throw") if kind in held or kind in failed]
    print(", ".join(f"{kind}: {held.get(kind, 0)} of {held.get(kind, 0) + failed.get(kind, 0)}"
                    for kind in kinds) + f", in {time.monotonic() - begun:.0f} s")
    if options.verdict:
        # Open MPI 4.1's mpirun now and then drops what a rank says while it ends the job.
        said, least = sum(options.verdicts), len(options.verdicts) // 2
        print(f"rank 0's verdict: {said} of {len(options.verdicts)}, at least {least}")
        if said < least:
            failed["verdict"] = 1
    if options.json:
        with open(options.json, "x", encoding="utf-8") as file:
            json.dump({"cases": results, "seconds": round(time.monotonic() - begun, 1)}, file,
                      indent=1)
    print("OK" if not failed else "FAILED")
    return 1 if failed or not held else 0


if __name__ == "__main__":
    sys.exit(main())
