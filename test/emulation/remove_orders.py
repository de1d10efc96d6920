#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Takes the kernels' fences, acquires and releases away, one at a time, and says whether a program of
test/emulation, built with ThreadSanitizer, sees it.

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

WEAKER = [
    (r"ptx::fence_acq_rel_\w+\(\)", "(void)0"),
    (r"__threadfence_block\(\)", "(void)0"),
    (r"\bld_acquire_", "ld_relaxed_"),
    (r"\bst_release_", "st_relaxed_"),
    (r"\bred_release_gpu_add\b", "red_relaxed_gpu_add"),
    (r"\batom_acq_rel_gpu_add\b", "atom_relaxed_gpu_add"),
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


def sees(build, programs):
    """The first of the programs that fails, or None."""
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=1:history_size=5")
    for program in programs:
        built = subprocess.run(["ninja", "-C", build, program], capture_output=True, text=True)
        if built.returncode != 0:
            sys.exit(built.stdout)
        command = ["setarch", "-R", os.path.join(build, program)]
        try:
            ran = subprocess.run(command, env=environment, capture_output=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return program
        if ran.returncode != 0:
            return program
    return None


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    build, parts = os.path.abspath(sys.argv[1]), sys.argv[2:]
    with open(os.path.join(build, "meson-info", "meson-info.json"), encoding="utf-8") as info:
        root = json.load(info)["directories"]["source"]
    programs = programs_by_header(build, root)
    if not programs:
        sys.exit(f"{build}: expected programs of test/emulation, built; saw none")
    if failed := sees(build, sorted(set(sum(programs.values(), [])))):
        sys.exit(f"{failed}: expected to pass as the sources are; it fails")
    num_seen = num_unseen = 0
    for header in sorted(programs):
        path = pathlib.Path(root, header)
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")
        for index, line in enumerate(lines):
            place = f"{header}:{index + 1}"
            changed = weakened(line)
            if changed is None or (parts and not any(part in place for part in parts)):
                continue
            try:
                path.write_text("\n".join(lines[:index] + [changed] + lines[index + 1 :]), encoding="utf-8")
                seen_by = sees(build, sorted(programs[header]))
            finally:
                path.write_text(text, encoding="utf-8")
            num_seen += seen_by is not None
            num_unseen += seen_by is None
            print(f"{'seen by ' + os.path.basename(seen_by) if seen_by else 'NOT SEEN':40}  {place}  {line.strip()[:60]}", flush=True)
    print(f"{num_seen} seen, {num_unseen} not seen")


if __name__ == "__main__":
    main()
