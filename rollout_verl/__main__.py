"""The program `python -m rollout_verl`: checks whether verl finds this backend, and prints why not.

People run it. It imports verl and changes nothing.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version

ENTRY_POINT_GROUP, OLDEST_VERL = "verl.plugins", (0, 9)


def main() -> int:
    """Print one line for each check, up to the first failure. Return 0 if all checks pass, else
    1."""
    for check in (_installed_verl, _entry_point, _plugin_policy, _registered_classes):
        try:
            print(f"ok: {check()}")
        except Exception as error:  # verl logs such errors only at DEBUG
            print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    return 0


def _installed_verl() -> str:
    try:
        found = version("verl")
    except PackageNotFoundError:
        raise RuntimeError("verl is not installed: pip install 'verl>=0.9'") from None
    if tuple(map(int, found.split(".")[:2])) < OLDEST_VERL:
        raise RuntimeError(f"verl {found} has no plug-ins; install verl>=0.9")
    return f"verl {found}"


def _entry_point() -> str:
    found = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == "rollout"]
    if not found:
        raise RuntimeError(
            "no entry point 'rollout' in verl.plugins: install rollout-engine in this environment"
        )
    found[0].load()
    return f"entry point {found[0].value}"


def _plugin_policy() -> str:
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and "rollout" not in policy.split(","):
        raise RuntimeError(
            f"VERL_USE_EXTERNAL_PLUGINS={policy} does not list rollout; unset it, or add rollout"
        )
    return f"VERL_USE_EXTERNAL_PLUGINS={policy}"


def _registered_classes() -> str:
    import verl.workers.rollout.base as base
    import verl.workers.rollout.replica as replica

    names = [replica.get_rollout_replica_class("rollout"), base.get_rollout_class("rollout")]
    return "registered: " + ", ".join(f"{kind.__module__}.{kind.__name__}" for kind in names)


if __name__ == "__main__":
    sys.exit(main())
