#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares the ABI as compiled with the recorded one.

usage: check_layout.py DESCRIBE_PROGRAM GOLDEN [--update]

The program is the one that describe_header.py writes. --update records an addition; what changes or removes a recorded
line is refused, but for the size of a struct that carries struct_size and has grown.
"""
import subprocess
import sys


def key_of(line):
    """What a line is about: `struct NAME size`, `struct NAME field FIELD`, `enum NAME CONSTANT`, a function's name."""
    words = line.split()
    if words[0] == 'function':
        return line.split('(')[0].replace('*', ' ').split()[-1]
    return ' '.join(words[:4] if words[0] == 'struct' and words[2] == 'field' else words[:3])


def recorded_size(name, recorded):
    return int(recorded.get(f'struct {name} size', '0').split()[-1])


def has_grown(name, recorded, seen):
    return f'struct {name} field struct_size' in recorded and int(seen.split()[-1]) > recorded_size(name, recorded)


def fills_hole(line, recorded):
    """Whether a new field lies where older callers have padding, of which nobody knows the contents."""
    words = line.split()
    return words[0] == 'struct' and words[2] == 'field' and int(words[5]) < recorded_size(words[1], recorded)


def main():
    program, golden_path = sys.argv[1:3]
    described = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=False)
    if described.returncode != 0:
        return 1  # An _INIT macro is wrong; the program has said which.
    seen_lines = described.stdout.splitlines()
    with open(golden_path, encoding='utf-8') as golden:
        recorded_lines = golden.read().splitlines()
    seen = {key_of(line): line for line in seen_lines}
    recorded = {key_of(line): line for line in recorded_lines}

    new_lines = [line for key, line in seen.items() if key not in recorded]
    breaks = [f'+ {line}' for line in new_lines if fills_hole(line, recorded)]
    additions = [line for line in new_lines if not fills_hole(line, recorded)]
    for key, line in recorded.items():
        now = seen.get(key, '(gone)')
        if now == line:
            continue
        if key.endswith(' size') and key in seen and has_grown(line.split()[1], recorded, now):
            additions.append(now)
        else:
            breaks.append(f'- {line}\n+ {now}')
    if breaks:
        print('These changes break programs that were compiled against the recorded ABI:', *breaks, sep='\n')
        print('The ABI only appends: new fields go at the end of a struct that begins with struct_size, new constants '
              'get new numbers, new functions a new version node. Change the header, not the golden file.')
        return 1
    if additions and '--update' not in sys.argv[3:]:
        print('New in the ABI, and not recorded yet:', *(f'+ {line}' for line in additions), sep='\n')
        print(f'If that is meant: {sys.argv[0]} {program} {golden_path} --update')
        return 1
    if additions:
        with open(golden_path, 'w', encoding='utf-8') as golden:
            golden.write('\n'.join(seen_lines) + '\n')
    print(f'{len(seen_lines)} recorded lines, {len(additions)} new.')
    return 0


if __name__ == '__main__':
    sys.exit(main())
