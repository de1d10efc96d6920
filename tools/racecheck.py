#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs the kernels under compute-sanitizer's racecheck and holds its reports against those that are explained in
test/gpu/racecheck.known. Exit code 1: a report that is not there, or a program that fails.

    tools/racecheck.py [--binaries DIR] [--seconds N] [--logs DIR] [--only NAME]... [--patterns]

Operators run on one rank through mk-perf, and on two ranks, which may share a GPU, in the programs of test/gpu. These
are long under the tool, a hundred times as slow; one that has not ended after --seconds is stopped, and what it has
reported until then counts. --patterns says instead what the tool reports of racecheck_patterns, code that is known to
be right or wrong.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATTERNS = ["queue", "queue-unsynced", "queue-early", "bulk-copy", "polled-word"]
PERF = {
    "gemm": "allgather_gemm --shape m=256,n=512,k=512",
    "gemm-pairs": "allgather_gemm --shape m=512,n=640,k=512",
    "gemm-few-rows": "allgather_gemm --shape m=16,n=512,k=2048",
    "gemm-ping-pong": "allgather_gemm --shape m=256,n=4096,k=256",
    "wgrad": "allgather_gemm_wgrad --shape m=256,n=512,k=256",
    "dispatch": "moe_dispatch_gemm --shape tokens=96,hidden=128,inter=512,experts=4,topk=2",
    "combine": "moe_gemm_combine --shape tokens=96,hidden=512,inter=128,experts=4,topk=2",
    "attention": "ring_attention --shape batch=1,seq=1024,heads=2,kv_heads=1,dim=128,causal=1",
    "attention-64": "ring_attention --shape batch=1,seq=1024,heads=2,kv_heads=1,dim=64,causal=0",
    "attention-packed": "ring_attention --shape batch=1,seq=1024,heads=2,kv_heads=1,dim=128,causal=1,packed=3",
    "backward": "ring_attention_backward --shape batch=1,seq=1024,heads=2,kv_heads=1,dim=128,causal=1",
    "backward-around": "ring_attention_backward --shape batch=1,seq=1024,heads=2,kv_heads=1,dim=128,causal=0",
    "backward-packed": "ring_attention_backward --shape batch=1,seq=512,heads=2,kv_heads=1,dim=128,causal=1,packed=3",
}
TESTS = {
    "operators_test": "2",
    "operators_outputs_test": "--ranks 2 --quick",
    "operators_wgrad_test": "2",
    "operators_moe_test": "--ranks 2 --quick",
    "attention_test": "--ranks 2 --quick",
    "operators_network_test": "--ranks 2 --quick",
    "operators_moe_network_test": "--ranks 2 --quick",
    "attention_network_test": "--ranks 2 --quick",
    "attention_packed_network_test": "--ranks 2 --quick",
}


def without_brackets(text, opening, closing):
    kept, depth = [], 0
    for letter in text:
        if letter == opening:
            depth += 1
        elif letter == closing:
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(letter)
    return "".join(kept)


def short_name(function):
    """Class and function, or the function alone, of a demangled name; of a lambda, whose it is."""
    text = without_brackets(function.replace("operator ()", "operator"), "<", ">")
    text = without_brackets(without_brackets(text, "(", ")"), "[", "]")
    parts = [part.split()[-1] for part in text.replace(" const", "").split("::") if part.strip()]
    parts = [part for part in parts if part != "operator"]
    is_member = len(parts) > 1 and parts[-2][0].isupper()
    return "::".join(parts[-2:] if is_member else parts[-1:])


def reports(text):
    """Pairs of (function, function) that racecheck reports, in alphabetical order, and how often."""
    found, first = {}, None
    pattern = re.compile(r"(between|and) (?:Read|Write) access at (.*?)\+0x[0-9a-f]+(?: in \S+)?")
    for line in text.splitlines():
        match = pattern.search(line)
        if match is None:
            continue
        if match.group(1) == "between":
            first = short_name(match.group(2))
        elif first is not None:
            pair = tuple(sorted((first, short_name(match.group(2)))))
            found[pair] = found.get(pair, 0) + 1
    return found


def known_pairs(path):
    """'FUNCTION FUNCTION REASON' a line."""
    known = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            first, second, reason = line.split(maxsplit=2)
            known[tuple(sorted((first, second)))] = reason
    return known


def program(folder, name):
    for place in ("", "test/gpu", "tools/mk-perf"):
        path = folder / place / name
        if path.exists():
            return str(path)
    sys.exit(f"racecheck: expected {name} in {folder}, saw none; build with -Dcuda=enabled or give --binaries")


def run(arguments, seconds):
    command = ["compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "analysis", "--print-limit", "100000",
               "--show-backtrace", "no", "--target-processes", "all", *arguments]
    environment = dict(os.environ, NCCL_NVLS_ENABLE="0", LD_LIBRARY_PATH=":".join(
        [str(pathlib.Path(arguments[0]).parent), os.environ.get("LD_LIBRARY_PATH", "")]))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
                               start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds)
        ended = True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        ended = False
    return output.decode(errors="replace"), ended, process.returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build-cuda")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--logs", type=pathlib.Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--patterns", action="store_true")
    options = parser.parse_args()

    if shutil.which("compute-sanitizer") is None:
        sys.exit("racecheck: no program compute-sanitizer; it comes with the CUDA toolkit")
    binaries = options.binaries.resolve()
    if options.patterns:
        jobs = {name: ["racecheck_patterns", name] for name in PATTERNS}
    else:
        jobs = {name: ["mk-perf", *text.split(), "--device", "cuda", "-g", "1", "--iters", "1", "--warmup", "0", "--baseline", "none"]
                for name, text in PERF.items()}
        jobs.update({name: [name, *text.split()] for name, text in TESTS.items()})
    unknown = [name for name in options.only if name not in jobs]
    if unknown:
        sys.exit(f"racecheck: --only: expected one of {', '.join(jobs)}, saw {', '.join(unknown)}")
    jobs = {name: [program(binaries, words[0]), *words[1:]] for name, words in jobs.items()
            if not options.only or name in options.only}
    known = known_pairs(ROOT / "test/gpu/racecheck.known")
    num_unexplained = num_failed = 0
    for name, arguments in jobs.items():
        text, ended, status = run(arguments, options.seconds)
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{name}.txt").write_text(text)
        found = reports(text)
        unexplained = {} if options.patterns else {pair: times for pair, times in found.items() if pair not in known}
        # Without a summary the tool has looked at nothing.
        has_failed = status != 0 or "RACECHECK SUMMARY" not in text if ended else "COMPUTE-SANITIZER" not in text
        num_unexplained += len(unexplained)
        num_failed += has_failed
        state = "" if ended else f", stopped after {options.seconds} s"
        if has_failed:
            state += f", FAILED: exit {status}, {text.strip().splitlines()[-1:]}"
        print(f"{name}: {len(found)} pairs, {len(unexplained)} unexplained{state}", flush=True)
        for pair, times in sorted((found if options.patterns else unexplained).items()):
            print(f"  {pair[0]} {pair[1]} ({times} times)", flush=True)
    if not options.patterns:
        print(f"racecheck: {num_unexplained} pairs unexplained, {num_failed} programs failed")
    return 1 if num_unexplained or num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
