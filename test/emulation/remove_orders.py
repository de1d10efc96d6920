#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Takes the kernels' fences, acquires, releases, CTAs' barriers and waits for bulk copies away, one at a time, and
says whether a program of test/emulation, built with ThreadSanitizer, sees it.

  test/emulation/remove_orders.py BUILD_FOLDER [PART_OF_A_PLACE...]

Changes the sources that BUILD_FOLDER is made of and puts them back: use a clone. A place is FILE:LINE. What is not
seen is either not run there (what products do), or protects words that are atomic themselves, or something else
protects the same data, too. Each of these takes minutes, for all programs run."""
import json
import os
import pathlib
import re
import subprocess
import sys
import time

WEAKER = [
    (r"ptx::fence_acq_rel_\w+\(\)", "(void)0"),
    (r"__threadfence_block\(\)", "(void)0"),
    (r"__syncthreads\(\)", "(void)0"),
    (r"ptx::barrier_sync\([^;]*\)", "(void)0"),
    (r"ptx::cp_async_bulk_wait_group(_read)?<\w+>\(\)", "(void)0"),
    (r"\bld_acquire_", "ld_relaxed_"),
    (r"\bst_release_", "st_relaxed_"),
    (r"\bred_release_gpu_add\b", "red_relaxed_gpu_add"),
    (r"\batom_(release|acq_rel)_gpu_add\b", "atom_relaxed_gpu_add"),
]
LIMIT_S = 600


def weakened(line):
    code = line.split("//")[0]
    for order, weaker in WEAKER:
        if re.search(order, code):
            return re.sub(order, weaker, line)
    return None


def programs_by_header(build, root):
    """Of each header of the kernels, the programs that have it in them."""
    found = {}
    deps = subprocess.run(["ninja", "-C", build, "-t", "deps"], capture_output=True, text=True, check=True).stdout
    program = None
    for line in deps.splitlines():
        if not line.startswith(" "):
            match = re.match(r"test/emulation/(\w+)_test\.p/\1_test\.cc\.o:", line)
            program = match and f"test/emulation/{match[1]}_test"
        elif program and line.strip():
            header = os.path.relpath(os.path.join(build, line.strip()), root)
            if header.startswith("kernels/") and header.endswith(".cuh"):
                found.setdefault(header, []).append(program)
    return found


def fails(build, program):
    built = subprocess.run(["ninja", "-C", build, program], capture_output=True, text=True)
    if built.returncode != 0:
        sys.exit(built.stdout)
    command = ["setarch", "-R", os.path.join(build, program)]
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=1:history_size=5")
    try:
        return subprocess.run(command, env=environment, capture_output=True, timeout=LIMIT_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def quickest_first(build, programs):
    """The programs, which have to pass as the sources are."""
    seconds = {}
    for program in programs:
        began = time.monotonic()
        if fails(build, program):
            sys.exit(f"{program}: expected to pass as the sources are; it fails")
        seconds[program] = time.monotonic() - began
    return sorted(programs, key=seconds.get)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    build, parts = os.path.abspath(sys.argv[1]), sys.argv[2:]
    with open(os.path.join(build, "meson-info", "meson-info.json"), encoding="utf-8") as info:
        root = json.load(info)["directories"]["source"]
    programs = programs_by_header(build, root)
    if not programs:
        sys.exit(f"{build}: expected programs of test/emulation, built; saw none")
    places = []
    for header in sorted(programs):
        lines = pathlib.Path(root, header).read_text(encoding="utf-8").split("\n")
        for index, line in enumerate(lines):
            place = f"{header}:{index + 1}"
            if weakened(line) is not None and (not parts or any(part in place for part in parts)):
                places.append((header, index))
    ordered = quickest_first(build, sorted({program for header, _ in places for program in programs[header]}))
    num_seen = 0
    for header, index in places:
        path = pathlib.Path(root, header)
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")
        line = lines[index]
        lines[index] = weakened(line)
        try:
            path.write_text("\n".join(lines), encoding="utf-8")
            seen_by = next((program for program in ordered if program in programs[header] and fails(build, program)),
                           None)
        finally:
            path.write_text(text, encoding="utf-8")
        num_seen += seen_by is not None
        says = f"seen by {os.path.basename(seen_by)}" if seen_by else "NOT SEEN"
        print(f"{says:40}  {header}:{index + 1}  {line.strip()[:60]}", flush=True)
    print(f"{num_seen} seen, {len(places) - num_seen} not seen")


if __name__ == "__main__":
    main()
