"""Compiles one library of ops; run as a script, in a process of its own.

torch's build loads what it has built and prints as it goes: here it does so where nobody is
disturbed, and a compiler that crashes or hangs takes no rank with it.
"""

import json
import sys

if __name__ == "__main__":
    from torch.utils.cpp_extension import load

    try:
        load(**json.loads(sys.argv[1]))
    except RuntimeError as error:  # holds what the compiler said
        sys.exit(str(error))
