#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Says of every loop around wgmmas in a CUDA object, library or cubin how many instructions it has, and how many of
them are R2UR: moves of descriptors that the compiler has kept in vector registers, because it does not know that a
warp stays together. There should be none, or two, where the product is in a hurry. And how many are waits for all
wgmmas: as many as wgmmas, and it has put one behind each, for a reason that it prints as C7510 or C7514 (a role that
was not inlined, accumulators read meanwhile). Also the kernel's BRA.DIV: places
where it takes a warp for parted; and BRA.U.ANY: instructions of the copy engine that it loops over the threads of a
warp, because it does not know that one runs them (ptx::elect_one()).

    tools/mainloop_sass.py [--cuobjdump PROGRAM] [--most MOVES] FILE...
"""
import argparse
import re
import shutil
import subprocess
import sys


# Longer loops are walks through tiles, not mainloops.
MOST_INSTRUCTIONS = 3000


def kernels(text):
    """The instructions of each kernel, as (address, text)."""
    for part in text.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", body, re.M)
        yield name.strip(), [(int(address, 16), instruction) for address, instruction in found]


def wgmma_loops(instructions):
    """The innermost loops that have a wgmma: (first, last) index of each."""
    index = {address: i for i, (address, _) in enumerate(instructions)}
    loops = []
    for i, (address, instruction) in enumerate(instructions):
        branch = re.search(r"\bBRA (?:!?U?P\w+, )?(0x[0-9a-f]+)", instruction)
        target = int(branch.group(1), 16) if branch else address + 1
        if target < address and target in index:
            loop = (index[target], i)
            if any("HGMMA" in text for _, text in instructions[loop[0] : i]):
                loops.append(loop)
    return [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]


def demangled(name):
    program = shutil.which("c++filt")
    if program is None:
        return name
    return subprocess.run([program, name], capture_output=True, text=True, check=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cuobjdump", default="cuobjdump", help="of the CUDA toolkit (default: the one in PATH)")
    parser.add_argument("--most", type=int, metavar="MOVES", help="fail if a loop has more R2UR, or is serial")
    parser.add_argument("files", nargs="+", metavar="FILE")
    arguments = parser.parse_args()
    if shutil.which(arguments.cuobjdump) is None:
        sys.exit(f"mainloop_sass: no program {arguments.cuobjdump}; it comes with the CUDA toolkit: --cuobjdump PATH")
    too_many = 0
    for file in arguments.files:
        run = subprocess.run([arguments.cuobjdump, "-sass", file], capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"mainloop_sass: {file}: {run.stderr.strip()}")
        for name, instructions in kernels(run.stdout):
            parted = sum("BRA.DIV" in text for _, text in instructions)
            looped = sum("BRA.U.ANY" in text for _, text in instructions)
            for first, last in wgmma_loops(instructions):
                loop = [text for _, text in instructions[first : last + 1]]
                if len(loop) > MOST_INSTRUCTIONS:
                    continue
                counts = [sum(word in text for text in loop) for word in ("HGMMA", "R2UR", "DEPBAR.LE gsb0, 0x0")]
                print(
                    f"{len(loop)} instructions, {counts[0]} HGMMA, {counts[1]} R2UR, {counts[2]} waits for all; "
                    f"{parted} BRA.DIV, {looped} BRA.U.ANY in {demangled(name)}"
                )
                is_serial = counts[0] > 1 and counts[2] >= counts[0]
                too_many += arguments.most is not None and (counts[1] > arguments.most or is_serial)
    if too_many > 0:
        sys.exit(f"mainloop_sass: {too_many} loops have more than {arguments.most} R2UR, or a wait behind each wgmma")


if __name__ == "__main__":
    main()
