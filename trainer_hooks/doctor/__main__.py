"""Entry point of `python -m trainer_hooks.doctor`, which runs `main` of
`trainer_hooks.doctor.command`.
"""

import sys

from trainer_hooks.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
