# SPDX-License-Identifier: MIT
"""What the examples have in common, as job.h for those in C: the ranks of a job, which any launcher starts as
processes with MK_RANK and MK_NRANKS set, and who learn the id of their communicator from a file.
"""

import os
import time

import mkernel


def rank_and_nranks():
    return int(os.environ.get('MK_RANK', 0)), int(os.environ.get('MK_NRANKS', 1))


def shared_id(path, rank):
    """Rank 0 makes the id and leaves it at `path`, the others wait for it there for a minute."""
    if rank == 0:
        unique_id = mkernel.get_unique_id()
        with open(path + '.part', 'wb') as file:
            file.write(unique_id)
        os.rename(path + '.part', path)
        return unique_id
    for _ in range(600):
        if os.path.exists(path):
            with open(path, 'rb') as file:
                return file.read()
        time.sleep(0.1)
    raise SystemExit(f'rank {rank}: no id at {path} after a minute')
