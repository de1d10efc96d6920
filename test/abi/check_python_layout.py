#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Holds examples/python/mkernel.py against the recorded layout of the header: check_python_layout.py GOLDEN FOLDER

What the file has of a structure must be where the header has it; fields that were appended since may be missing.
"""

import ctypes
import re
import sys

STRUCTS = {'mk_unique_id_t': 'UniqueId', 'mk_comm_config_t': 'CommConfig', 'mk_comm_info_t': 'CommInfo',
           'mk_allgather_gemm_args_t': 'AllgatherGemmArgs',
           'mk_gemm_reduce_scatter_args_t': 'GemmReduceScatterArgs',
           'mk_gemm_allreduce_args_t': 'GemmAllreduceArgs'}
CONSTANTS = {'MK_DTYPE_': ('BF16', 'FP16', 'FP32'), 'MK_': ('DEVICE_AUTO', 'DEVICE_HOST', 'DEVICE_CUDA'),
             'MK_LAYOUT_': ('KN', 'NK'), 'MK_ALLGATHER_': ('FORWARD', 'WGRAD')}


def main(golden, folder):
    sys.path.insert(0, folder)
    import mkernel  # pylint: disable=import-outside-toplevel
    fields, values = {}, {}
    with open(golden, encoding='utf-8') as file:
        for line in file:
            if found := re.match(r'struct (\w+) field (\w+) offset (\d+) size (\d+) ', line):
                fields.setdefault(found[1], []).append((found[2], int(found[3]), int(found[4])))
            elif found := re.match(r'enum \w+ (\w+) = (\d+)', line):
                values[found[1]] = int(found[2])
    problems = []
    for name, python_name in STRUCTS.items():
        struct = getattr(mkernel, python_name)
        places = [(field, getattr(struct, field)) for field, _ in struct._fields_]
        seen = [(field, place.offset, place.size) for field, place in places]
        expected = fields[name][:len(seen)]
        problems += [f'{python_name}: expected {right}, saw {one}' for one, right in zip(seen, expected)
                     if one != right]
        if len(seen) > len(expected):
            problems.append(f'{python_name}: {name} has {len(expected)} fields, this {len(seen)}')
        if not seen or ctypes.sizeof(struct) < seen[-1][1] + seen[-1][2]:
            problems.append(f'{python_name}: no fields')
    for prefix, names in CONSTANTS.items():
        problems += [f'{name}: expected {values[prefix + name]}, saw {getattr(mkernel, name)}' for name in names
                     if values[prefix + name] != getattr(mkernel, name)]
    for problem in problems:
        print(problem)
    print(f'{len(STRUCTS)} structures, {sum(map(len, CONSTANTS.values()))} constants: {len(problems)} wrong')
    return 1 if problems else 0


if __name__ == '__main__':
    raise SystemExit(main(*sys.argv[1:]))
