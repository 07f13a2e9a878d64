"""Start a server on a tiny random model, and run each real client against it: `make test-doors`.

Each client lives in .doors/NAME, a virtual environment that is made at its first use. Arguments:
the names of those that are to run, all without any.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.serve import chat_model

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
# name -> what is installed for it, and its script
CLIENTS = {
    "openai": (["openai>=3,<4"], "openai_client.py"),
    "openai2": (["openai>=2,<3"], "openai_client.py"),
    "litellm": (["litellm", "openai<3"], "litellm_client.py"),
    "lm_eval": (["lm-eval[api]"], "lm_eval_client.py"),
}
INSTALL_S, RUN_S = 1200, 600


def python_of(name: str) -> str:
    """The interpreter of a client's environment."""
    home = ROOT / ".doors" / name
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        command = [str(python), "-m", "pip", "install", "-q", *CLIENTS[name][0]]
        subprocess.run(command, check=True, timeout=INSTALL_S)
        (home / "installed").touch()
    return str(python)


def main(names: list[str]) -> int:
    directory = chat_model.directory()
    (call_id,) = chat_model.tokenizer().encode(chat_model.CALL).ids
    command = [sys.executable, "-m", "rollout", "serve", "--json", f"model={directory}", "port=0"]
    command += ["served_model_name=model", "api_key=sesame", "num_threads=1"]
    command += ["max_sequence_length=512"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    failed = []
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        for name in names or CLIENTS:
            script = [python_of(name), str(HERE / CLIENTS[name][1]), url]
            script += [str(call_id)] if name.startswith("openai") else []
            script += [directory, sys.executable] if name == "lm_eval" else []
            if subprocess.run(script, timeout=RUN_S).returncode:
                failed.append(name)
    finally:
        server.terminate()
        status = server.wait(60)
    print(f"server exited with {status}; failed: {failed or 'none'}")
    return 1 if failed or status else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
