#!/usr/bin/env bash
# Profiles a model of the hub on several tasks; scripts/real_models/NAME.sh name the model, its tasks and its knobs.
# Usage: profile_hub_model.sh REPOSITORY TASKS KNOBS FOLDER [FLAG ...]; the flags go to the profile of each task.
# PYTHON: one with the project's requirements (default python3). MODEL: a folder with the checkpoint, where it is there
# already. TASKS and KNOBS: others than the script's. REVISION: a commit of the repository (default main).
set -euo pipefail
repository=$1 tasks=${TASKS:-$2} knobs=${KNOBS:-$3}
shift 3
[ $# -ge 1 ] || { echo "error: no folder for the results; give one" >&2; exit 2; }
folder=$1
shift
python=${PYTHON:-python3}
PYTHONPATH=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
model=${MODEL:-$folder/model}
if [ -z "${MODEL:-}" ]; then
    mkdir -p "$folder"
    # The hub's client compares each large file with the hub's own sha256.
    "$python" - "$repository" "${REVISION:-main}" "$model" <<'DOWNLOAD' || exit 2
import sys
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
repository, revision, folder = sys.argv[1:]
try:
    snapshot_download(repository, revision=revision, local_dir=folder)
except (HfHubHTTPError, OSError) as error:
    sys.exit(f"error: {repository} cannot be downloaded ({str(error).splitlines()[0]}); give MODEL=FOLDER of a copy")
DOWNLOAD
elif [ ! -e "$model/config.json" ]; then
    echo "error: MODEL=$model has no config.json; give the folder of a checkpoint" >&2
    exit 2
fi
mkdir -p "$folder"
# All results of a folder are of the files whose digests stand beside them.
found=$(cd "$model" && find -L . -type f ! -path './.cache/*' -print0 | sort -z | xargs -0 sha256sum)
[ -e "$folder/digests.txt" ] || printf '%s\n' "$found" > "$folder/digests.txt"
if [ "$found" != "$(cat "$folder/digests.txt")" ]; then
    echo "error: $model is not the checkpoint whose digests are in $folder/digests.txt; give another folder" >&2
    exit 2
fi
# shellcheck disable=SC2086  # tasks and knobs are lists of words
MODEL_PATH=$model "$python" -m knob_profiler datasets $tasks --output_dir "$folder" -- $knobs "$@" || failed=$?
for task in $tasks; do
    results=$folder/${task//_/-}
    [ -e "$results/conclusion.json" ] || continue
    "$python" -m knob_profiler analyse knobs "$results"
    "$python" -m knob_profiler report "$results"
    "$python" -m knob_profiler verify "$results" || failed=$?
done
exit "${failed:-0}"
