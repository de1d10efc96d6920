#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks what the built library exports and what it asks for.

usage: check_library.py LIBRARY MKERNEL_H GOLDEN [--libsodium] [--sanitizers]

The options allow shared libraries besides the usual ones.
"""
import re
import subprocess
import sys

# All that a machine with a C++ program on it has. Drivers and NIC libraries are loaded at run time, if they are there.
ALWAYS = r'(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux[-\w]*)\.so\.\d+'
ON_REQUEST = {'--libsodium': r'libsodium\.so\.\d+', '--sanitizers': r'lib(a|t|ub)san\.so\.\d+'}


def run(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main():
    library, header_path, golden_path = sys.argv[1:4]
    complaints = []

    exported = sorted(line.split()[-1] for line in run('nm', '-D', '--defined-only', library).splitlines()
                      if line.split()[-2] != 'A')
    with open(golden_path, encoding='utf-8') as golden:
        recorded = sorted(golden.read().split())
    complaints += [f'not exported: {symbol}' for symbol in recorded if symbol not in exported]
    complaints += [f'exported, and not in {golden_path}: {symbol}' for symbol in exported if symbol not in recorded]

    with open(header_path, encoding='utf-8') as header:
        declared = set(re.findall(r'^MK_API[^;(]*?(\w+)\(', header.read(), flags=re.M))
    names = {symbol.split('@')[0] for symbol in exported}
    complaints += [f'declared in the header, not exported: {name}' for name in sorted(declared - names)]
    complaints += [f'exported, not declared in the header: {name}' for name in sorted(names - declared)]

    allowed = '|'.join([ALWAYS] + [ON_REQUEST[option] for option in sys.argv[4:]])
    dynamic = run('readelf', '-d', library)
    for needed in re.findall(r'\(NEEDED\).*\[(.*)\]', dynamic):
        if not re.fullmatch(allowed, needed):
            complaints.append(f'needs {needed}, which a machine may lack: load it at run time, or link it statically')
    soname = re.findall(r'\(SONAME\).*\[(.*)\]', dynamic)
    if soname != ['libmkernel.so.0']:
        complaints.append(f'soname: expected libmkernel.so.0, saw {soname}')

    print(*complaints, sep='\n')
    print(f'{len(exported)} symbols exported, {len(recorded)} recorded, {len(declared)} declared.')
    return 1 if complaints else 0


if __name__ == '__main__':
    sys.exit(main())
