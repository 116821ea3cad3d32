"""The scripted server as a program of its own, with a process beside it: `PORT WORD FILE [stubborn]`.

It answers with WORD, and adds its process ids to FILE. A stubborn one does not end by SIGTERM.
"""

import os
import signal
import subprocess
import sys
import time

from tests.processes.openai_server import Reply, serving

if __name__ == "__main__":
    port, word, file, *how = sys.argv[1:]
    if how == ["stubborn"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # It has the handlers that are ignored, too.
    beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"answering with {word}", flush=True)
    with serving(lambda request: Reply(pieces=(word,)), int(port), lists_models=True):
        with open(file, "a", encoding="utf-8") as pids:
            pids.write(f"{word} {os.getpid()} {beside.pid}\n")
        while True:
            time.sleep(60)
